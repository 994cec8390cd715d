"""Prompts through the prefix cache alone: in order, without time, each forgotten before the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagepool.replay.ptrace import Trace

__all__ = ["CachePass", "PassError", "Prompts", "cache_pass"]

MAX_IDS = 2**31


class PassError(ValueError):
    """The trace cannot go through a prefix cache, or not with this block size."""


class Prompts:
    """The prompts of a trace as rows of block ids, which stand for blocks of tokens: equal where all tokens are.

    trace       one that was read with its prefixes
    block_size  tokens per block; None: the trace's own. One that divides it cuts each block of the trace
    partial     whether a last block that is not full has an id, too

    Raises `PassError` for a trace without prefix blocks, a size that does not divide theirs, and ids beyond 31 bits.
    """

    def __init__(self, trace: Trace, block_size: int | None, partial: bool) -> None:
        if not trace.block or trace.runs is None:
            raise PassError("the trace names no prefix blocks, which --clock none needs")
        self.trace = trace
        self.block_size = block_size or trace.block
        self.partial = partial
        if trace.block % self.block_size:
            raise PassError(
                f"--block-size {self.block_size} does not divide the trace's blocks of {trace.block} tokens"
            )
        self._cuts = trace.block // self.block_size
        last = max((start + length for runs in trace.runs for start, length in _pairs(runs)), default=0)
        if last * self._cuts > MAX_IDS:
            raise PassError(f"{last} block ids cut in {self._cuts} are more than {MAX_IDS}")
        self.full_blocks = sum(tokens // self.block_size for tokens in trace.prompt)
        self.most_ids = sum(-(-tokens // self.block_size) for tokens in trace.prompt)

    def __iter__(self) -> Iterator[tuple[NDArray[np.int32], int, int]]:
        """For each prompt its ids, how many of its blocks are full, and its session."""
        trace, cuts = self.trace, self._cuts
        for runs, tokens, session in zip(trace.runs or [], trace.prompt, trace.session, strict=True):
            full = tokens // self.block_size
            parts = [np.arange(start * cuts, (start + length) * cuts, dtype=np.int32) for start, length in _pairs(runs)]
            ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
            yield ids[: -(-tokens // self.block_size) if self.partial else full], full, session


@dataclass(frozen=True)
class CachePass:
    """What one pass has counted. `nanoseconds` is the wall time of all calls of the cache, `blocks` what it was given.

    `capacity` is None when there was room for everything.
    """

    policy: str
    capacity: int | None
    full_blocks: int
    hit_blocks: int
    evictions: int
    blocks: int
    nanoseconds: int


def cache_pass(memory: Any, prompts: Prompts, policy: str, capacity: int | None) -> CachePass:
    """One pass through a cache of `capacity` blocks; `memory` is pagepool or pagepool.reference.

    Hits are the full blocks in the leading run of those that were cached, blocks are touched from head to tail, and
    each that was not cached is then. Raises `PoolError` if the cache does not give back everything at the end.
    """
    allocator = memory.BlockAllocator(min(prompts.most_ids, MAX_IDS - 1) if capacity is None else capacity)
    cache = memory.PrefixCache(allocator, 1, policy)
    hits = blocks = nanoseconds = 0
    for ids, full, session in prompts:
        start = perf_counter_ns()
        found = cache.touch(ids, cache_salt=session)
        nanoseconds += perf_counter_ns() - start
        hits += min(found, full)
        blocks += len(ids)
    cache.check()
    evictions = cache.stats()["evicted"]
    cache.reset_prefix_cache()
    allocator.check()
    return CachePass(policy, capacity, prompts.full_blocks, hits, evictions, blocks, nanoseconds)


def _pairs(runs: list[int]) -> Iterator[tuple[int, int]]:
    return zip(runs[::2], runs[1::2], strict=True)
