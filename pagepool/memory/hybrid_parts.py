"""What a `HybridSequence` is made of: the groups of its layers, and the checkpoints that it can be rolled back to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pagepool.errors import PoolError, StaleHandle
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.paged_seq import PagedSeqState
from pagepool.memory.state_handle import StateHandle

__all__ = [
    "Checkpoint",
    "KvGroup",
    "all_or_none",
    "audit",
    "begin_all",
    "find",
    "newest",
    "release_unneeded",
    "require_tokens",
]


@dataclass(frozen=True)
class KvGroup:
    """The layers of a model that share a block table.

    allocator           where its blocks come from; groups may share one
    block_size          tokens per block; by default those of the pool that has these blocks, else 16
    window              None for full attention, else as `window_left`: how many tokens before its own a query sees
    max_blocks_per_seq  length of the table; by default as many as the allocator may have, and 131,072 for a window,
                        whose sequence may be longer than its allocator is large
    """

    allocator: BlockAllocator
    block_size: int | None = None
    window: int | None = None
    max_blocks_per_seq: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 0:
            raise ValueError(f"window must be None or at least 0, not {self.window}")

    @property
    def most_blocks(self) -> int | None:
        """What `max_blocks_per_seq` comes to; None for as many as the allocator may have."""
        return 131_072 if self.max_blocks_per_seq is None and self.window is not None else self.max_blocks_per_seq


class Checkpoint:
    """Where a sequence can be rolled back to: its `position`, and a copy of its recurrent state."""

    __slots__ = ("_state", "position")

    def __init__(self, position: int, state: StateHandle | None) -> None:
        self.position = position
        self._state = state

    def __repr__(self) -> str:
        return f"Checkpoint(position={self.position})"

    def _release(self) -> None:
        """Gives the slot of its state back."""
        if self._state is not None:
            self._state.close()


def find(checkpoints: list[Checkpoint], wanted: Checkpoint) -> Checkpoint:
    """`wanted`, which must be one of them: `StaleHandle` when it was given up or is another sequence's."""
    if not any(known is wanted for known in checkpoints):
        raise StaleHandle(f"the checkpoint at {wanted.position} is none of the {len(checkpoints)} of this sequence")
    return wanted


def newest(checkpoints: list[Checkpoint], length: int) -> int:
    """The position of the newest at or before `length`, 0 for 0: at the beginning a state is zeros.

    Raises `ValueError`, with both numbers, when the oldest comes later.
    """
    known = [checkpoint.position for checkpoint in checkpoints]
    if length and (not known or known[0] > length):
        oldest = f"the oldest state checkpoint is at {known[0]}" if known else "there is no state checkpoint"
        raise ValueError(f"cannot roll back to {length} tokens: {oldest}")
    return max([position for position in known if position <= length], default=0)


def release_unneeded(
    gone: Iterable[Checkpoint], kept: Iterable[Checkpoint], saved: Iterable[tuple[int, bool, list[Checkpoint]]]
) -> None:
    """Releases those that are gone, but neither kept nor needed by an abort."""
    needed = {id(known) for known in kept} | {id(known) for *_, before in saved for known in before}
    for known in gone:
        if id(known) not in needed:
            known._release()


def require_tokens(length: int, groups: Iterable[KvGroup], tables: Iterable[PagedSeqState]) -> None:
    """Raises `ValueError` when a window has given back what the next token would see after a cut to `length`."""
    for group, state in zip(groups, tables, strict=True):
        start, gone = length - (group.window or 0), state.first_block * state.block_size
        if length and gone > max(0, start):
            need = f"token {max(0, start)} is needed, the first {gone} were given back"
            raise ValueError(f"cannot roll back to {length} tokens: {need}")


def begin_all(parts: Iterable[Any]) -> None:
    """Begins a transaction on every part; when one raises, on none."""
    begun: list[Any] = []
    try:
        for part in parts:
            part.begin()
            begun.append(part)
    except BaseException:
        for part in begun:
            part.abort()
        raise


@contextmanager
def all_or_none(parts: Sequence[Any]) -> Iterator[None]:
    """What is done to the parts within stays, unless it raises."""
    begin_all(parts)
    try:
        yield
    except BaseException:
        for part in parts:
            part.abort()
        raise
    for part in parts:
        part.commit()


def audit(length: int, groups: Iterable[KvGroup], tables: Iterable[PagedSeqState], positions: list[int]) -> None:
    """Raises `PoolError` when tables and positions of checkpoints do not fit a sequence of this length.

    len(table) == length; 0 <= positions, rising, <= length
    first token of a table <= min(length, positions) - window
    """
    for group, state in zip(groups, tables, strict=True):
        if state.len != length:
            raise PoolError(f"broken invariant: a table has {state.len} tokens, the sequence {length}")
        start = max(0, min([length, *positions]) - (group.window or 0))
        gone = state.first_block * state.block_size
        if gone > start:
            raise PoolError(f"broken invariant: token {start} is needed, the first {gone} were given back")
    if positions != sorted(set(positions)) or any(position > length for position in positions):
        raise PoolError(f"broken invariant: checkpoints at {positions} of {length} tokens")
