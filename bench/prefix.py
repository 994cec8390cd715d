"""The cost of the prefix cache, a block: look-up and insertion of recorded prompts, as an engine does them.

    python bench/prefix.py TRACE [--requests N] [--capacity N,N,...] [--policy NAME] [--reference]
    python bench/prefix.py --runs [--policy NAME]

For each prompt: `match_prefix`, room made with `evict`, blocks for the rest, `cache_blocks` behind what was found, and
all references given back. Only calls of the cache are timed; the tokens are made before. Every block of a prompt counts
once, found or inserted, with the eviction that it forced; the part of evictions is told beside. A prompt longer than
half of the blocks is cut there; capacity 0 stands for as many blocks as the prompts have, so that none is evicted.

With `--reference`, the first prompts with 200,000 blocks in all also go through the reference, where the same blocks
must be found, and its time is told beside ours for these.

With `--runs`, instead: a look-up of 4,096 blocks of 16 tokens that were cached in turn with those of another prompt, so
that 1, 8, 64 or 512 of them at a time lie in one piece.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the checkout, where no pagepool is installed
import pagepool
from pagepool import reference
from pagepool.replay.prompts import Prompts
from pagepool.replay.ptrace import read_trace


@dataclass
class Costs:
    """Blocks looked up, found and evicted, and nanoseconds in all calls of the cache and in `evict`."""

    blocks: int = 0
    found: int = 0
    evicted: int = 0
    all: int = 0
    evict: int = 0


def serve(memory: Any, prompts: list[tuple[np.ndarray, int]], block_size: int, capacity: int, policy: str) -> Costs:
    """All prompts through a cache of `capacity` blocks."""
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


def compare(prompts: list[tuple[np.ndarray, int]], block_size: int, capacity: int, policy: str) -> None:
    """Print how much faster ours is, for the first prompts. Raises `SystemExit` when the two find different blocks."""
    few, blocks = [], 0
    for prompt in prompts:
        blocks += len(prompt[0])
        if blocks > 200_000:
            break
        few.append(prompt)
    ours = serve(pagepool, few, block_size, capacity, policy)
    theirs = serve(reference, few, block_size, capacity, policy)
    if (ours.blocks, ours.found, ours.evicted) != (theirs.blocks, theirs.found, theirs.evicted):
        raise SystemExit(f"ours {ours} and the reference {theirs} do not agree")
    print(
        f"{'':<20}the first {len(few)} prompts: {ours.all / ours.blocks:.1f} ns a block, the reference "
        f"{theirs.all / theirs.blocks:,.0f}: {theirs.all / ours.all:.0f} times"
    )


def main() -> None:
    """Print a line for each capacity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--capacity", default="1000,3000,5859,10000,20000,30000,0")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    if options.runs:
        for run in (1, 8, 64, 512):
            print(f"{options.policy:<9}runs of {run:>3} blocks {look_up(run, options.policy):>8.1f} ns a block")
        return
    if options.trace is None:
        parser.error("a trace, or --runs")
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
