"""torch's scaled_dot_product_attention over contiguous K and V.

The heads of a group as the queries of one head, its fastest form: each load then serves all of them.
"""

import torch

from sides.common import Call
from sides.torch_common import TorchSide


class Side(TorchSide):
    def __init__(self, case):
        super().__init__(case)
        q, self.pairs = self.contiguous()
        self.grouped = q.reshape(case.k.shape[0], case.k.shape[2], -1, case.k.shape[3])

    def calls(self, threads):
        attend, copies = torch.nn.functional.scaled_dot_product_attention, self.case.copies
        return {"grouped": Call(lambda i: attend(self.grouped, *self.pairs[i % copies]), self.output)}
