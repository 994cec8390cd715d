"""vLLM's CPU attention of prompts over its paged cache, in a process of its own: reads a line of JSON, answers with
one, as side_worker.py does. vLLM chooses the instruction set for each block size, and the faster block size counts.
"""

import json
import math
import sys
import time

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

torch.set_grad_enabled(False)
current_platform.import_kernels()
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()  # asks the system for permission
BLOCK_SIZES = (32, 128)


def made(heads, kv_heads, dim, sequences, length, cached, dtype):
    """The calls of `sequences` prompts of `length` tokens behind `cached` ones, by block size."""
    kind, context = getattr(torch, dtype), length + cached
    q = torch.randn(sequences * length, heads, dim).to(kind)
    out, calls = torch.empty_like(q), {}
    starts = torch.arange(sequences + 1, dtype=torch.int32) * length
    lens = torch.full((sequences,), context, dtype=torch.int32)
    for size in BLOCK_SIZES:
        isa = _get_attn_isa(kind, size, dim, "auto")
        blocks = -(-context // size)
        tables = torch.randperm(sequences * blocks, dtype=torch.int32).reshape(sequences, blocks)
        cache = torch.zeros(tables.numel(), kv_heads, 2 * size, dim, dtype=kind).chunk(2, dim=2)
        for table in tables:
            k, v = torch.randn(2, context, kv_heads, dim).to(kind)
            slots = (table.long()[:, None] * size + torch.arange(size)).reshape(-1)[:context]
            ops.cpu_attn_reshape_and_cache(k, v, *cache, slots, isa, kv_cache_dtype="auto")
        plan = ops.cpu_attn_get_scheduler_metadata(
            sequences, heads, kv_heads, dim, lens, kind, starts, True, -1, isa, True, None, "auto"
        )

        def run(tables=tables, cache=cache, plan=plan):
            ops.cpu_attention_with_kv_cache(
                q, *cache, out, starts, lens, 1 / math.sqrt(dim), True, None, -1, tables, 0.0, plan, None, None,
                1.0, 1.0, "auto",
            )  # fmt: skip

        calls[f"{size}, {isa}"] = run
    return calls


def seconds_of(run, least):
    calls, begin = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begin < least:
        run()
        calls += 1
    return (time.perf_counter() - begin) / calls


def main():
    prompt, prompt_threads, calls = None, 0, {}
    for line in sys.stdin:
        question = json.loads(line)
        threads, least = question.pop("threads"), question.pop("seconds")
        try:
            torch.set_num_threads(threads)
            if (question, threads) != (prompt, prompt_threads):  # the plan depends on the threads
                calls, prompt, prompt_threads = made(**question), question, threads
                for run in calls.values():
                    run()
            answer = {"seconds": min(seconds_of(run, least) for run in calls.values()), "ways": list(calls)}
        except RuntimeError as error:
            answer = {"failed": str(error)}
        print(json.dumps(answer), flush=True)


main()
