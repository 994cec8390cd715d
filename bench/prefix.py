"""Cost of the prefix cache per block: look-up and insertion of recorded prompts, in an engine's order of calls.

    python bench/prefix.py TRACE [--requests N] [--capacity N,N,...] [--policy NAME] [--reference]
    python bench/prefix.py --runs [--policy NAME]
    python bench/prefix.py --shared

For each prompt the benchmark calls `match_prefix`, frees blocks with `evict`, allocates the missing blocks, adds them
with `cache_blocks`, and drops all references. Only these calls are timed; the tokens are prepared before. Each block of
a prompt counts once, found or inserted, and includes the eviction that it caused. The time of evictions is also printed
separately. A prompt longer than half of the capacity is cut there. Capacity 0 means a cache that holds all prompts, so
that no block is evicted.

`--reference` also runs the first prompts, 200,000 blocks in total, through the reference implementation. It must find
the same blocks, and both times are printed.

`--runs` measures a look-up of 4,096 blocks of 16 tokens instead. They are cached in alternation with the blocks of
another prompt, so that the nodes of 1, 8, 64 or 512 consecutive blocks are adjacent in memory.

`--shared` measures a look-up of 1,000 blocks of 16 tokens that another process has cached in a shared pool, beside the
look-up in a cache of one process. The blocks are adjacent, or anywhere in a pool of 100,000 blocks.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout
import pagepool
from pagepool import reference
from pagepool.replay.prompts import Prompts
from pagepool.replay.ptrace import read_trace


@dataclass
class Costs:
    """Blocks looked up, found and evicted; nanoseconds in all timed calls and in `evict` alone."""

    blocks: int = 0
    found: int = 0
    evicted: int = 0
    all: int = 0
    evict: int = 0


def serve(memory: Any, prompts: list[tuple[np.ndarray, int]], block_size: int, capacity: int, policy: str) -> Costs:
    """Run all prompts through a cache of `capacity` blocks."""
    allocator = memory.BlockAllocator(capacity)
    cache = memory.PrefixCache(allocator, block_size, policy)
    offsets = np.arange(block_size, dtype=np.int32)
    costs = Costs()
    for ids, session in prompts:
        tokens = (ids[: capacity // 2, None] * np.int32(block_size) + offsets).reshape(-1)
        begin = perf_counter_ns()
        found = cache.match_prefix(tokens, cache_salt=session)
        missing = len(tokens) // block_size - len(found)
        start = perf_counter_ns()
        if missing > allocator.free_count:
            costs.evicted += cache.evict(missing - allocator.free_count)
        end = perf_counter_ns()
        table = np.concatenate([found, allocator.allocate_n(missing)])
        costs.evict += end - start
        costs.all += end - begin
        begin = perf_counter_ns()
        cache.cache_blocks(tokens, table, cache_salt=session, start=len(found))
        costs.all += perf_counter_ns() - begin
        allocator.free(table)
        costs.blocks += len(table)
        costs.found += len(found)
    return costs


def fill(pool: Any, cache: pagepool.PrefixCache, tokens: np.ndarray) -> None:
    """Cache a prompt in blocks that are drawn from the whole pool."""
    blocks = pool.allocator.allocate_n(pool.num_blocks)
    chosen = blocks if len(blocks) == 1000 else np.random.default_rng(1).permutation(blocks)[:1000]
    cache.cache_blocks(tokens, chosen)
    pool.allocator.free(blocks)


def look_up_all(pool: Any, cache: pagepool.PrefixCache, tokens: np.ndarray) -> float:
    """Return the microseconds of `match_prefix` for cached tokens, best of 300."""
    times = []
    for _ in range(300):
        begin = perf_counter_ns()
        found = cache.match_prefix(tokens)
        times.append(perf_counter_ns() - begin)
        if len(found) != 1000:
            raise SystemExit(f"{len(found)} blocks were found, not 1,000")
        pool.allocator.free(found)
    return min(times) / 1e3


def compare_shared(num_blocks: int) -> None:
    """Print what a hit of 1,000 blocks costs another process of a shared pool, and in a cache of one process."""
    layout = pagepool.KvLayout(num_layers=1, num_kv_heads=1, head_dim=8)
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, 16_000, np.int32)
    memory = os.memfd_create("prefix", os.MFD_ALLOW_SEALING)
    pool = pagepool.KvCachePool.from_layout(layout, num_blocks, shared=memory)
    fill(pool, pagepool.PrefixCache(pool.allocator), tokens)
    read, write = os.pipe()
    if os.fork() == 0:
        own = pagepool.KvCachePool.from_layout(layout, num_blocks, shared=memory)
        os.write(write, str(look_up_all(own, pagepool.PrefixCache(own.allocator), tokens)).encode())
        os._exit(0)
    os.wait()
    shared = float(os.read(read, 100))
    private = pagepool.KvCachePool.from_layout(layout, num_blocks)
    cache = pagepool.PrefixCache(private.allocator, 16)
    fill(private, cache, tokens)
    alone = look_up_all(private, cache, tokens)
    print(f"1,000 blocks of {num_blocks:>7,}: shared {shared:>6.1f} us, one process {alone:>6.1f} us")


def look_up(run: int, policy: str) -> float:
    """Return the nanoseconds per block of `match_prefix`, best of 20, for nodes in adjacent runs of `run` blocks."""
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


def compare(prompts: list[tuple[np.ndarray, int]], block_size: int, capacity: int, policy: str) -> None:
    """Print the speed-up over the reference for the first prompts. Raises `SystemExit` if the two find other blocks."""
    few, blocks = [], 0
    for prompt in prompts:
        blocks += len(prompt[0])
        if blocks > 200_000:
            break
        few.append(prompt)
    ours = serve(pagepool, few, block_size, capacity, policy)
    theirs = serve(reference, few, block_size, capacity, policy)
    if (ours.blocks, ours.found, ours.evicted) != (theirs.blocks, theirs.found, theirs.evicted):
        raise SystemExit(f"pagepool {ours} and the reference {theirs} differ")
    print(
        f"{'':<20}the first {len(few)} prompts: {ours.all / ours.blocks:.1f} ns a block, the reference "
        f"{theirs.all / theirs.blocks:,.0f}: {theirs.all / ours.all:.0f} times"
    )


def main() -> None:
    """Print a line for each capacity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--capacity", default="1000,3000,5859,10000,20000,30000,0")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    if options.runs:
        for run in (1, 8, 64, 512):
            print(f"{options.policy:<9}runs of {run:>3} blocks {look_up(run, options.policy):>8.1f} ns a block")
        return
    if options.shared:
        for num_blocks in (1_000, 100_000):
            compare_shared(num_blocks)
        return
    if options.trace is None:
        parser.error("a trace, --runs or --shared")
    source = Prompts(read_trace(options.trace, options.requests, prefixes=True))
    prompts = [(ids, session) for ids, session in source]
    most = 2 * max((len(ids) for ids, _ in prompts), default=0)
    for number in map(int, options.capacity.split(",")):
        capacity = number or max(most, source.full_blocks)
        costs = serve(pagepool, prompts, source.block_size, capacity, options.policy)
        print(
            f"{options.policy:<9}{number or 'no bound':>10} {len(prompts):>7,} prompts {costs.blocks:>11,} blocks, "
            f"{costs.found:,} found, {costs.blocks - costs.found:,} inserted, {costs.evicted:,} evicted: "
            f"{costs.all / max(1, costs.blocks):.1f} ns a block, {costs.evict / max(1, costs.blocks):.1f} to evict"
        )
        if options.reference:
            compare(prompts, source.block_size, capacity, options.policy)


if __name__ == "__main__":
    main()
