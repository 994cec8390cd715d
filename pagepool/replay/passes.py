"""`--clock none`: send one prompt after the other through the prefix cache alone, without time.

A hybrid model resumes at the last cached block that also has a recurrent state; `hybrid_pass` counts both.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TypeAlias

from pagepool.prefix.checkpoints import CheckpointIndex
from pagepool.replay.lru_sweep import LruSweep, NotSwept
from pagepool.replay.prompts import MAX_IDS, Prompts

__all__ = [
    "BELADY",
    "PLAIN_POLICIES",
    "CachePass",
    "HybridPass",
    "StateOptions",
    "cache_pass",
    "cache_passes",
    "hybrid_pass",
]

BELADY = "belady"
PLAIN_POLICIES = ("arc", "lfu", "s3fifo")  # implemented only in pagepool.reference
Report: TypeAlias = Callable[[int, str], Any]
Watch: TypeAlias = Callable[[int, int, int, int, int], None]


@dataclass(frozen=True)
class CachePass:
    """The counts of one pass over `blocks` blocks. `nanoseconds` is the wall time of all calls of the cache.

    `capacity` None: unlimited. `nanoseconds` None: the counts come from an `LruSweep`, without a cache.
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
    """Run all prompts through a cache of `capacity` blocks.

    `memory` is pagepool or pagepool.reference; policies that pagepool lacks always run in pagepool.reference. The hits
    of a prompt are its cached leading blocks. The blocks of a prompt are touched from head to tail, and missing blocks
    are cached. Raises `PoolError` if a block is still in use at the end.
    """
    cache = _make_cache(memory, prompts, policy, capacity)
    hits = blocks = nanoseconds = 0
    state = f"{policy} with {'unlimited' if capacity is None else f'{capacity:,}'} blocks"
    for done, (ids, session) in enumerate(prompts):
        report(done, state)
        start = perf_counter_ns()
        hits += cache.touch(ids, cache_salt=session)
        nanoseconds += perf_counter_ns() - start
        blocks += len(ids)
    cache.check()
    evictions = cache.stats()["evicted"]
    cache.reset_prefix_cache()
    cache.allocator.check()
    return CachePass(policy, capacity, prompts.full_blocks, hits, evictions, blocks, nanoseconds)


def cache_passes(
    memory: Any,
    prompts: Prompts,
    policies: Sequence[str],
    capacities: Sequence[int | None],
    sweep: bool = True,
    report: Report = lambda done, state: None,
) -> list[CachePass]:
    """Run every policy at every capacity. "belady" is the upper bound of all policies.

    LRU at several capacities takes one pass unless `sweep` is False. Other policies take one pass per capacity.
    `report(done, state)` gets the number of finished prompts of all passes, and a description of the current pass.
    """
    passes: list[CachePass] = []
    for policy in policies:
        at_once = None
        if policy == BELADY:
            at_once = _bounds(prompts, capacities)
        elif policy == "lru" and sweep and len(capacities) > 1:
            at_once = _swept(prompts, capacities)
        if at_once is not None:
            passes += at_once
            continue
        for capacity in capacities:
            before = len(passes) * len(prompts)

            def shifted(done: int, state: str, before: int = before) -> None:
                report(before + done, state)

            passes.append(cache_pass(memory, prompts, policy, capacity, shifted))
    return passes


def _make_cache(memory: Any, prompts: Prompts, policy: str, capacity: int | None) -> Any:
    if policy in PLAIN_POLICIES:
        memory = importlib.import_module("pagepool.reference")
    blocks = min(prompts.most_ids, MAX_IDS - 1) if capacity is None else capacity
    return memory.PrefixCache(memory.BlockAllocator(blocks), 1, policy)


def _swept(prompts: Prompts, capacities: Sequence[int | None]) -> list[CachePass] | None:
    """Return the passes of LRU, computed from stack distances, or None if the block ids do not allow this."""
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
    """Return the most hits that any policy can have at each capacity."""
    ids, ends = prompts.flat()
    bound = importlib.import_module("pagepool.reference.policies").belady_pass
    found = []
    for capacity in capacities:
        start = perf_counter_ns()
        hits, evictions = bound(ids.tolist(), ends.tolist(), len(ids) if capacity is None else capacity)
        took = perf_counter_ns() - start
        found.append(CachePass(BELADY, capacity, prompts.full_blocks, hits, evictions, len(ids), took))
    return found


@dataclass(frozen=True)
class StateOptions:
    """Sizes of recurrent states.

    Attributes
    ----------
    state_bytes : int
        Bytes of one recurrent state.
    budget_bytes : int or None
        Limit in bytes of all states, None for no bound.
    grid : int
        Distance in tokens between two states of the grid, 0 for no grid.
    """

    state_bytes: int
    budget_bytes: int | None = None
    grid: int = 16_384


@dataclass(frozen=True)
class HybridPass:
    """The counts of one pass, in full blocks.

    Two counts are for comparison with a state at the end of every cached block. `every_block` is the number of such
    states in the whole pass, `peak_blocks` their largest number at one time.
    """

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
    """Run all prompts through a cache of `capacity` blocks and an index of recurrent states.

    Each prompt resumes at the longest prefix with both a cached block and a state. It saves states at the positions
    that the index returns, and one at its last full block. As in a model, the last token of a prompt is always
    computed. The index counts blocks instead of tokens: sizes and grid are divided by the block size.

    `watch` is called after each prompt with its full blocks, hits and usable hits, and with the numbers of states and
    cached blocks. Raises `PoolError` if an invariant is broken at the end.
    """
    size = prompts.block_size
    cache = _make_cache(memory, prompts, policy, capacity)
    index = CheckpointIndex(
        max(1, options.state_bytes // size),
        None if options.budget_bytes is None else options.budget_bytes // size,
        grid=-(-options.grid // size),
        spacing=1,
        align=1,
    )
    hits = usable = peak = 0
    for request in prompts.order:
        # Includes the last, partial block, so that in most prompts a token follows the last full block.
        ids, session = prompts.row(request, True), prompts.trace.session[request]
        full = prompts.trace.prompt[request] // size
        blocks = cache.touch(ids[:full], cache_salt=session)
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
