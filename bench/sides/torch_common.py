"""What the sides of torch share: K and V as tensors of a dtype, threads set before the calls."""

import torch

from sides.common import Side

torch.set_grad_enabled(False)


def tensor(values, unit, dtype):
    """int8 times a power of two, exact in every dtype."""
    return torch.from_numpy(values.copy()).to(getattr(torch, dtype)) * float(unit)


class TorchSide(Side):
    def use(self, threads):
        torch.set_num_threads(threads)

    def contiguous(self):
        """q as (n, heads, 1, dim) and `copies` pairs of K and V as (n, kv heads, context, dim)."""
        case = self.case
        q = torch.from_numpy(case.q).to(getattr(torch, case.dtype)).unsqueeze(2)
        k, v = (tensor(x, case.UNIT, case.dtype).transpose(1, 2).contiguous() for x in (case.k, case.v))
        return q, [(k, v), *((k.clone(), v.clone()) for _ in range(case.copies - 1))]

    def output(self, result):
        return result.float().reshape(self.case.q.shape).numpy()
