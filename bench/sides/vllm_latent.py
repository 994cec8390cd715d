"""vLLM's decode over a latent cache (MLA) on a CPU, as a worker process with the protocol of side_worker.py.

As vLLM does, it uses the AMX backend for bfloat16 on a CPU with AMX, otherwise the plain CPU backend. The AMX backend
takes blocks of 32 or more tokens; the faster one of 32 and 128 counts. The plain one takes blocks of 16.
"""

from itertools import cycle

import torch
from answering import answer_questions
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

torch.set_grad_enabled(False)
current_platform.import_kernels()
HAS_AMX = torch.cpu._is_amx_tile_supported()
if HAS_AMX:
    torch.cpu._init_amx()  # asks the system for permission


def made(heads, sequences, context, dim, v_dim, scale, dtype, copies):
    """Return the calls of a decode step, by block size. Calls rotate over `copies` of the cache."""
    kind = getattr(torch, dtype)
    by_amx = HAS_AMX and kind is torch.bfloat16
    q = torch.randn(sequences, heads, dim).to(kind)
    out = torch.empty(sequences, heads, v_dim, dtype=kind)
    lens = torch.full((sequences,), context, dtype=torch.int32)
    calls = {}
    for size in (32, 128) if by_amx else (16,):
        tables = torch.randperm(sequences * context // size, dtype=torch.int32).reshape(sequences, -1)
        first = torch.randn(tables.numel(), size, dim).to(kind)
        caches = cycle([first, *(first.clone() for _ in range(copies - 1))])
        if by_amx:
            calls[f"{size}, amx"] = amx_call(q, caches, out, tables, lens, scale)
        else:

            def run(tables=tables, caches=caches):
                ops.mla_decode_kvcache_cpu(out, q, next(caches), scale, tables, lens)

            calls[f"{size}"] = run
    return calls


def amx_call(q, caches, out, tables, lens, scale):
    """Return the call that vLLM's AMX backend makes in each layer."""
    from vllm.v1.attention.backends.mla import amx_mla

    size = next(caches).shape[1]
    rows = amx_mla._expand_block_table(tables, size)
    splits = amx_mla._compute_num_kv_splits(int(lens.max()), torch.get_num_threads())
    logits = torch.zeros(q.shape[0], q.shape[1], splits, out.shape[2] + 1)
    places, lengths = torch.arange(q.shape[0]), lens.long()

    def run():
        flat = next(caches).view(-1, 1, q.shape[2])
        ops.cpu_mla_decode(
            q, flat, flat[..., : out.shape[2]], out, None, None, None, logits, rows, places, lengths, scale, 0.0, False,
            0, None, None,
        )  # fmt: skip

    return run


if __name__ == "__main__":
    answer_questions(made)
