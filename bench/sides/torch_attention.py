"""torch over contiguous K and V: scaled_dot_product_attention, and FlexAttention compiled for shape and threads.

The heads of a group are the queries of one head, so that each load serves all of them: up to four times as fast as
`enable_gqa=True`, and never slower.
"""

import torch

from sides.common import Call, Side

torch.set_grad_enabled(False)


def tensor(values, unit, dtype):
    """int8 times a power of two, exact in every dtype."""
    kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    return torch.from_numpy(values.copy()).to(kind) * float(unit)


class TorchSide(Side):
    """Sets torch's threads before the calls."""

    def use(self, threads):
        torch.set_num_threads(threads)

    def output(self, result):
        return result.float().reshape(self.case.q.shape).numpy()


class Grouped(TorchSide):
    """Return q as (n, kv heads, group, dim) and `copies` pairs of K and V as (n, kv heads, context, dim)."""

    def __init__(self, case):
        super().__init__(case)
        q = torch.from_numpy(case.q).to(getattr(torch, case.dtype))
        self.grouped = q.reshape(case.k.shape[0], case.k.shape[2], -1, case.k.shape[3])
        k, v = (tensor(x, case.UNIT, case.dtype).transpose(1, 2).contiguous() for x in (case.k, case.v))
        self.pairs = [(k, v), *((k.clone(), v.clone()) for _ in range(case.copies - 1))]

    def attend(self, q, k, v):
        raise NotImplementedError

    def calls(self, threads):
        copies = self.case.copies
        return {"grouped": Call(lambda i: self.attend(self.grouped, *self.pairs[i % copies]), self.output)}


class Sdpa(Grouped):
    def attend(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class Flex(Grouped):
    """Compiled per thread count: torch 2.13 crashes with code for any thread count (`cpp.dynamic_threads`)."""

    def __init__(self, case):
        import torch._inductor.config
        from torch.nn.attention.flex_attention import flex_attention

        super().__init__(case)
        self.config = torch._inductor.config
        torch._dynamo.reset()
        self.attend = torch.compile(flex_attention, dynamic=False)

    def use(self, threads):
        self.config.cpp.threads = threads  # part of the key of the compiled code's cache
        super().use(threads)
