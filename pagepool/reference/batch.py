"""Append to or release all sequences of a batch in plain Python, all or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pagepool._arguments import integer
from pagepool.reference.allocator import BlockAllocator
from pagepool.reference.block_table import PagedSeqState

__all__ = ["append_batch", "release_batch"]


def append_batch(states: Sequence[PagedSeqState], counts: Sequence[int]) -> None:
    """Append `counts[i]` tokens to `states[i]`, in order; all or nothing.

    Raises `PoolExhausted` if the allocator has too few blocks for all states. Raises `ValueError` if the lists have
    different lengths, a state appears twice, a count is negative or a state would exceed its maximum.
    """
    _distinct(states)
    if len(states) != len(counts):
        raise ValueError(f"{len(states)} states but {len(counts)} counts")
    wanted: Counter[BlockAllocator] = Counter()
    dropped: Counter[tuple[BlockAllocator, int]] = Counter()  # references that earlier states will have dropped
    for state, count in zip(states, counts, strict=True):
        count = integer("count", count, 0)
        wanted[state.allocator] += state._missing(state.len + count)
        for place in state._shared(count):
            key = (state.allocator, state._blocks[place])
            if state.allocator.ref_count(key[1]) - dropped[key] > 1:
                dropped[key] += 1
                wanted[state.allocator] += 1
    for allocator, blocks in wanted.items():
        allocator.demand(blocks)
    for state, count in zip(states, counts, strict=True):
        state.append(count)


def release_batch(states: Sequence[PagedSeqState], close: bool = False) -> None:
    """Release or close every state. Raises `ValueError`, and releases no state, if a state appears twice."""
    _distinct(states)
    for state in states:
        state._use()
    for state in states:
        state.close() if close else state.release()


def _distinct(states: Sequence[Any]) -> None:
    if len({id(state) for state in states}) != len(states):
        raise ValueError("a state appears twice")
