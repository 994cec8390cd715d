"""torch's FlexAttention, compiled for the shape and the number of threads, over contiguous K and V.

The heads of a group are the queries of one head: up to four times as fast as `enable_gqa=True`, and never slower.
Code for any number of threads (`cpp.dynamic_threads`) would be compiled once, but that of torch 2.13 crashes.
"""

import torch
import torch._inductor.config
from torch.nn.attention.flex_attention import flex_attention

from sides.common import Call
from sides.torch_common import TorchSide


class Side(TorchSide):
    def __init__(self, case):
        super().__init__(case)
        q, self.pairs = self.contiguous()
        self.grouped = q.reshape(case.k.shape[0], case.k.shape[2], -1, case.k.shape[3])
        torch._dynamo.reset()
        self.attend = torch.compile(flex_attention, dynamic=False)

    def use(self, threads):
        torch._inductor.config.cpp.threads = threads  # part of the key under which compiled code is kept
        super().use(threads)

    def calls(self, threads):
        copies = self.case.copies
        return {"grouped": Call(lambda i: self.attend(self.grouped, *self.pairs[i % copies]), self.output)}
