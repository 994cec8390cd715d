"""`--clock none`: send one prompt after the other through the prefix cache alone, without time.

A hybrid model resumes at the last cached block that also has a recurrent state; `hybrid_pass` counts both.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from pagepool.prefix.checkpoints import CheckpointIndex
from pagepool.replay.prompts import MAX_IDS, Prompts

__all__ = ["CachePass", "HybridPass", "StateOptions", "cache_pass", "hybrid_pass"]


@dataclass(frozen=True)
class CachePass:
    """The counts of one pass over `blocks` blocks. `nanoseconds` is the wall time of all calls of the cache.

    `capacity` None: unlimited.
    """

    policy: str
    capacity: int | None
    full_blocks: int
    hit_blocks: int
    evictions: int
    blocks: int
    nanoseconds: int


def cache_pass(memory: Any, prompts: Prompts, policy: str, capacity: int | None) -> CachePass:
    """Run all prompts through a cache of `capacity` blocks.

    `memory` is pagepool or pagepool.reference. The hits of a prompt are its cached leading blocks. The blocks of a
    prompt are touched from head to tail, and missing blocks are cached. Raises `PoolError` if a block is still in use
    at the end.
    """
    cache = _make_cache(memory, prompts, policy, capacity)
    hits = blocks = nanoseconds = 0
    for ids, session in prompts:
        start = perf_counter_ns()
        hits += cache.touch(ids, cache_salt=session)
        nanoseconds += perf_counter_ns() - start
        blocks += len(ids)
    cache.check()
    evictions = cache.stats()["evicted"]
    cache.reset_prefix_cache()
    cache.allocator.check()
    return CachePass(policy, capacity, prompts.full_blocks, hits, evictions, blocks, nanoseconds)


def _make_cache(memory: Any, prompts: Prompts, policy: str, capacity: int | None) -> Any:
    blocks = min(prompts.most_ids, MAX_IDS - 1) if capacity is None else capacity
    return memory.PrefixCache(memory.BlockAllocator(blocks), 1, policy)


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


def hybrid_pass(memory: Any, prompts: Prompts, policy: str, capacity: int | None, options: StateOptions) -> HybridPass:
    """Run all prompts through a cache of `capacity` blocks and an index of recurrent states.

    Each prompt resumes at the longest prefix with both a cached block and a state. It saves states at the positions
    that the index returns, and one at its last full block. As in a model, the last token of a prompt is always
    computed. The index counts blocks instead of tokens: sizes and grid are divided by the block size.

    Raises `PoolError` if an invariant is broken at the end.
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
    for request in range(len(prompts)):
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
    index.check()
    cache.check()
    stats = cache.stats()
    return HybridPass(
        policy, capacity, prompts.full_blocks, hits, usable, stats["evicted"] + stats["cached"], peak, index.stats()
    )
