"""Prompts through the prefix cache alone, in order and without time, each forgotten before the next.

A hybrid model can use of a cached prefix what lies before a recurrent state that is kept; `hybrid_pass` counts both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeAlias

from pagepool.prefix.belady import belady_pass
from pagepool.prefix.checkpoint_index import CheckpointIndex
from pagepool.replay.lru_sweep import LruSweep, NotSwept
from pagepool.replay.prompts import MAX_IDS, Prompts

__all__ = ["BELADY", "CachePass", "HybridPass", "StateOptions", "cache_pass", "cache_passes", "hybrid_pass"]

BELADY = "belady"
Report: TypeAlias = Callable[[int, str], Any]
Watch: TypeAlias = Callable[[int, int, int, int, int], None]


@dataclass(frozen=True)
class CachePass:
    """What one pass has counted. `nanoseconds` is the wall time of all calls of the cache, `blocks` what it was given.

    `capacity` is None when there was room for everything, `nanoseconds` when no cache but a sweep has counted.
    """

    policy: str
    capacity: int | None
    full_blocks: int
    hit_blocks: int
    evictions: int
    blocks: int
    nanoseconds: int | None


def cache_pass(
    memory: Any, prompts: Prompts, policy: str, capacity: int | None, report: Report = lambda done, state: None
) -> CachePass:
    """One pass through a cache of `capacity` blocks; `memory` is pagepool or pagepool.reference.

    Hits are the full blocks in the leading run of those that were cached, blocks are touched from head to tail, and
    each that was not cached is then. Raises `PoolError` if the cache does not give back everything at the end.
    """
    allocator = memory.BlockAllocator(min(prompts.most_ids, MAX_IDS - 1) if capacity is None else capacity)
    cache = memory.PrefixCache(allocator, 1, policy)
    hits = blocks = nanoseconds = 0
    state = f"{policy} with {'unlimited' if capacity is None else f'{capacity:,}'} blocks"
    for done, (ids, full, session) in enumerate(prompts):
        report(done, state)
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


def cache_passes(
    memory: Any,
    prompts: Prompts,
    policies: Sequence[str],
    capacities: Sequence[int | None],
    sweep: bool = True,
    report: Report = lambda done, state: None,
) -> list[CachePass]:
    """Every policy at every capacity, policies first. Several capacities of LRU take one pass, unless `sweep` is False;
    the others take one each, over the prompts read once. "belady" is the bound of all. `report` is told how many
    prompts are done, of those of all passes, and what is at hand."""
    passes: list[CachePass] = []
    for policy in policies:
        found = None
        if policy == BELADY:
            found = _bounds(prompts, capacities)
        elif policy == "lru" and sweep and len(capacities) > 1:
            found = _swept(prompts, capacities)
        for capacity in capacities if found is None else ():
            before = len(passes) * len(prompts)
            told = partial(lambda before, done, state: report(before + done, state), before)
            passes.append(cache_pass(memory, prompts, policy, capacity, told))
        passes += found or []
    return passes


def _swept(prompts: Prompts, capacities: Sequence[int | None]) -> list[CachePass] | None:
    """The passes of LRU by stack distances, or None where those do not tell."""
    try:
        lru = LruSweep(prompts)
    except NotSwept:
        return None
    full, blocks = prompts.full_blocks, lru.touches
    return [
        CachePass("lru", capacity, full, lru.hits(capacity), lru.evictions(capacity), blocks, None)
        for capacity in capacities
    ]


def _bounds(prompts: Prompts, capacities: Sequence[int | None]) -> list[CachePass]:
    """The most hits that any policy could have at each capacity."""
    ids, ends = prompts.flat()
    found = []
    for capacity in capacities:
        start = perf_counter_ns()
        hits, evictions = belady_pass(ids, ends, len(ids) if capacity is None else capacity)
        took = perf_counter_ns() - start
        found.append(CachePass(BELADY, capacity, prompts.full_blocks, hits, evictions, len(ids), took))
    return found


@dataclass(frozen=True)
class StateOptions:
    """How large a state is, what all of them may take (None: no bound), and the tokens from one of the grid to the
    next (0: no grid)."""

    state_bytes: int
    budget_bytes: int | None
    grid: int


@dataclass(frozen=True)
class HybridPass:
    """What one pass has counted. Blocks are full ones. `every_block` and `peak_blocks` are the states that would have
    been kept, in all and at a time, with one at the end of every cached block."""

    policy: str
    capacity: int | None
    full_blocks: int
    hit_blocks: int
    usable_blocks: int
    every_block: int
    peak_blocks: int
    states: dict[str, Any]


def hybrid_pass(
    memory: Any,
    prompts: Prompts,
    policy: str,
    capacity: int | None,
    options: StateOptions,
    watch: Watch | None = None,
) -> HybridPass:
    """One pass through a cache of `capacity` blocks with states beside it: each prompt goes on from the longest prefix
    that has both, keeps states where the index wants them, and one at its last full block, where it ends.

    Everything is counted in blocks: the ids stand for them, and sizes and grid are divided by the tokens of one. As in
    a model, the last token of a prompt is always computed. `watch` is called after each prompt with its full blocks,
    those that hit and those of them that are usable, and with the states and the blocks that are kept then. Raises
    `PoolError` if an equation is broken at the end.
    """
    size = prompts.block_size
    allocator = memory.BlockAllocator(min(prompts.most_ids, MAX_IDS - 1) if capacity is None else capacity)
    cache = memory.PrefixCache(allocator, 1, policy)
    index = CheckpointIndex(
        max(1, options.state_bytes // size),
        None if options.budget_bytes is None else options.budget_bytes // size,
        grid=-(-options.grid // size),
        spacing=1,
    )
    hits = usable = peak = 0
    for request in prompts.order:
        # With the block that is not full: one token at least lies behind the last full one, most of the time.
        ids, full = prompts.row(request, True)
        session = prompts.trace.session[request]
        blocks = min(cache.touch(ids[:full], cache_salt=session), full)
        found = index.find(ids, blocks, cache_salt=session)
        begin = 0 if found is None else found[0]
        for position, reason in index.stops(ids, blocks, begin, cache_salt=session):
            index.admit(ids, position, reason, cache_salt=session)
        end = min(full, len(ids))
        if end > begin:
            index.admit(ids, end, "end", cache_salt=session)
        hits += blocks
        usable += begin
        peak = max(peak, cache.num_cached)
        if watch is not None:
            watch(full, blocks, begin, index.num_states, cache.num_cached)
    index.check()
    cache.check()
    stats = cache.stats()
    return HybridPass(
        policy, capacity, prompts.full_blocks, hits, usable, stats["evicted"] + stats["cached"], peak, index.stats()
    )
