"""torch's scaled_dot_product_attention of a whole prompt, as a worker process with the protocol of side_worker.py.

Two methods share a KV head among query heads: `enable_gqa`, and K and V repeated in advance. The faster one counts.
"""

import torch
from answering import answer_questions

torch.set_grad_enabled(False)


def made(heads, kv_heads, dim, length, dtype):
    """Return the calls that compute a prompt, by method."""
    q, k, v = (torch.randn(1, count, length, dim).to(getattr(torch, dtype)) for count in (heads, kv_heads, kv_heads))
    attend = torch.nn.functional.scaled_dot_product_attention
    group = heads // kv_heads
    repeated = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    return {
        "enable_gqa": lambda: attend(q, k, v, is_causal=True, enable_gqa=True),
        "repeated": lambda: attend(q, *repeated, is_causal=True),
    }


if __name__ == "__main__":
    answer_questions(made)
