"""What a hybrid model can use of a prefix cache: the longest cached prefix at whose end a recurrent state is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagepool.prefix.checkpoint_index import CheckpointIndex
from pagepool.replay.prompts import MAX_IDS, Prompts

__all__ = ["HybridPass", "StateOptions", "hybrid_pass"]

Watch = Callable[[int, int, int, int, int], None]


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
