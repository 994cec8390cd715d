"""vLLM's CPU attention of prompts over its paged cache, as a worker process with the protocol of side_worker.py.

vLLM chooses the instruction set for each block size, and the faster block size counts. With one new token per sequence
this is decode. Sequences may have a common prefix: vLLM's CPU kernels read it once for each of them.
"""

import math
from itertools import cycle

import torch
from answering import answer_questions
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

torch.set_grad_enabled(False)
current_platform.import_kernels()
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()  # asks the system for permission
BLOCK_SIZES = (32, 128)


def made(heads, kv_heads, dim, sequences, length, cached, dtype, shared=0, copies=1):
    """Return the calls of `sequences` prompts of `length` tokens after `cached` tokens, by block size.

    The first `shared` tokens are the same in all sequences. Calls rotate over `copies` of K and V.
    """
    kind, context = getattr(torch, dtype), length + cached
    q = torch.randn(sequences * length, heads, dim).to(kind)
    out, calls = torch.empty_like(q), {}
    starts = torch.arange(sequences + 1, dtype=torch.int32) * length
    lens = torch.full((sequences,), context, dtype=torch.int32)
    for size in BLOCK_SIZES:
        isa = _get_attn_isa(kind, size, dim, "auto")
        blocks, common = -(-context // size), shared // size
        ids = torch.randperm(common + sequences * (blocks - common), dtype=torch.int32)
        own = ids[common:].reshape(sequences, blocks - common)
        tables = torch.cat((ids[:common].expand(sequences, common), own), 1)
        first = torch.zeros(ids.numel(), kv_heads, 2 * size, dim, dtype=kind)
        for table in tables:
            k, v = torch.randn(2, context, kv_heads, dim).to(kind)
            slots = (table.long()[:, None] * size + torch.arange(size)).reshape(-1)[:context]
            ops.cpu_attn_reshape_and_cache(k, v, *first.chunk(2, dim=2), slots, isa, kv_cache_dtype="auto")
        caches = cycle([first.chunk(2, dim=2), *(first.clone().chunk(2, dim=2) for _ in range(copies - 1))])
        plan = ops.cpu_attn_get_scheduler_metadata(
            sequences, heads, kv_heads, dim, lens, kind, starts, True, -1, isa, True, None, "auto"
        )

        def run(tables=tables, caches=caches, plan=plan):
            ops.cpu_attention_with_kv_cache(
                q, *next(caches), out, starts, lens, 1 / math.sqrt(dim), True, None, -1, tables, 0.0, plan, None, None,
                1.0, 1.0, "auto",
            )  # fmt: skip

        calls[f"{size}, {isa}"] = run
    return calls


if __name__ == "__main__":
    answer_questions(made)
