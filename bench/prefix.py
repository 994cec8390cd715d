"""The cost of the prefix cache, a block: look-up and insertion of recorded prompts, as an engine does them.

    python bench/prefix.py TRACE [--requests N] [--capacity N] [--policy NAME]
    python bench/prefix.py --runs [--policy NAME]

For each prompt: `match_prefix`, room made with `evict`, blocks for the rest, `cache_blocks`, and all references given
back. Only calls of the cache are timed; the tokens are made before. Ours takes all N requests, the reference the first
of them, as many as have 200,000 blocks. Both must find the same blocks there.

With `--runs`, instead: a look-up of 4,096 blocks of 16 tokens that were cached in turn with those of another prompt, so
that 1, 8, 64 or 512 of them at a time lie in one piece.
"""

from __future__ import annotations

import argparse
from time import perf_counter_ns
from typing import Any

import numpy as np

import pagepool
from pagepool import reference
from pagepool.replay.prompts import Prompts
from pagepool.replay.ptrace import read_trace


def serve(memory: Any, prompts: list[tuple[np.ndarray, int]], block_size: int, capacity: int, policy: str) -> tuple:
    """Blocks of the prompts, blocks found, and nanoseconds in the cache."""
    allocator = memory.BlockAllocator(capacity)
    cache = memory.PrefixCache(allocator, block_size, policy)
    offsets = np.arange(block_size, dtype=np.int32)
    blocks = hits = nanoseconds = 0
    for ids, session in prompts:
        tokens = (ids[: capacity // 2, None] * np.int32(block_size) + offsets).reshape(-1)
        start = perf_counter_ns()
        found = cache.match_prefix(tokens, cache_salt=session)
        missing = len(tokens) // block_size - len(found)
        if missing > allocator.free_count:
            cache.evict(missing - allocator.free_count)
        nanoseconds += perf_counter_ns() - start
        table = np.concatenate([found, allocator.allocate_n(missing)])
        start = perf_counter_ns()
        cache.cache_blocks(tokens, table, cache_salt=session)
        nanoseconds += perf_counter_ns() - start
        allocator.free(table)
        blocks += len(table)
        hits += len(found)
    return blocks, hits, nanoseconds


def look_up(run: int, policy: str) -> float:
    """Nanoseconds a block of `match_prefix`, the best of 20, where runs of `run` blocks lie in one piece."""
    allocator = pagepool.BlockAllocator(2 * 4096)
    cache = pagepool.PrefixCache(allocator, 16, policy)
    prompts = np.random.default_rng(0).integers(0, 2**31 - 1, (2, 4096 * 16), np.int32)
    tables = allocator.allocate_n(2 * 4096).reshape(2, 4096)
    for start in range(0, 4096, run):
        for tokens, table in zip(prompts, tables, strict=True):
            cache.cache_blocks(tokens[: (start + run) * 16], table, start=start)
    times = []
    for _ in range(20):
        begin = perf_counter_ns()
        found = cache.match_prefix(prompts[0])
        times.append((perf_counter_ns() - begin) / len(found))
        allocator.free(found)
    return min(times)


def main() -> None:
    """Print a line for each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--capacity", type=int, default=30_000)
    parser.add_argument("--policy", default="lru")
    options = parser.parse_args()
    if options.runs:
        for run in (1, 8, 64, 512):
            print(f"{options.policy:<9}runs of {run:>3} blocks {look_up(run, options.policy):>8.1f} ns a block")
        return
    if options.trace is None:
        parser.error("a trace, or --runs")
    source = Prompts(read_trace(options.trace, options.requests, prefixes=True), None, False)
    prompts = [(ids, session) for ids, _, session in source]
    few, blocks = [], 0
    for prompt in prompts:
        if blocks + len(prompt[0]) > 200_000:
            break
        blocks += len(prompt[0])
        few.append(prompt)
    sides = []
    for name, memory, part in (("ours", pagepool, prompts), ("ours", pagepool, few), ("reference", reference, few)):
        blocks, hits, nanoseconds = serve(memory, part, source.block_size, options.capacity, options.policy)
        sides.append((hits, nanoseconds / max(1, blocks)))
        print(
            f"{name:<10}{options.policy:<9}{len(part):>7,} prompts {blocks:>11,} blocks of {source.block_size} tokens "
            f"{hits / max(1, blocks):>7.1%} found {sides[-1][1]:>9.1f} ns a block"
        )
    if sides[1][0] != sides[2][0]:
        raise SystemExit(f"ours found {sides[1][0]} blocks, the reference {sides[2][0]}")
    print(f"ours is {sides[2][1] / sides[1][1]:.0f} times as fast as the reference")


if __name__ == "__main__":
    main()
