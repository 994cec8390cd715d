"""What a `HybridSequence` is made of: the groups of its layers, and the checkpoints that it can be rolled back to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pagepool.arguments import integer, wrong
from pagepool.config import MAX_BLOCK_SIZE
from pagepool.errors import PoolError, StaleHandle
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.block_table import PagedSeqState
from pagepool.memory.journal import Participation, run_all
from pagepool.memory.state_handle import StateHandle

__all__ = [
    "NO_CHECKPOINTS",
    "Checkpoint",
    "Checkpoints",
    "KvGroup",
    "Parts",
    "audit",
    "find",
    "groups_of",
    "newest",
    "require_tokens",
]


MAX_BLOCKS = 2**31 - 1


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
        if not callable(getattr(self.allocator, "allocate_n", None)):  # the reference has its own
            raise wrong("allocator", "a BlockAllocator", self.allocator)
        for name, low, high in (
            ("block_size", 1, MAX_BLOCK_SIZE),
            ("window", 0, None),
            ("max_blocks_per_seq", 0, MAX_BLOCKS),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integer(name, value, low, high))

    @property
    def most_blocks(self) -> int | None:
        """What `max_blocks_per_seq` comes to; None for as many as the allocator may have."""
        return 131_072 if self.max_blocks_per_seq is None and self.window is not None else self.max_blocks_per_seq


class Checkpoint:
    """Where a sequence can be rolled back to: its `position`, and a copy of its recurrent state."""

    __slots__ = ("_lists", "_state", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self._state: StateHandle | None = None
        self._lists = 0  # how many `Checkpoints` have it; the slot of its state goes back with the last of them

    def __repr__(self) -> str:
        return f"Checkpoint(position={self.position})"

    def _leave(self) -> None:
        self._lists -= 1
        if not self._lists and self._state is not None:
            self._state.close()


class Checkpoints:
    """Those of a sequence, or those that an abort of a transaction would bring back: `drop` lets them go.

    All that `drop` needs is made before, since it must not fail.
    """

    __slots__ = ("_leave", "items")

    def __init__(self, items: tuple[Checkpoint, ...] = ()) -> None:
        self.items = items
        self._leave: list[Callable[[], object]] = [known._leave for known in items]
        for known in items:
            known._lists += 1

    def drop(self) -> None:
        """They are no longer needed here."""
        run_all(self._leave)


NO_CHECKPOINTS = Checkpoints()


class Parts:
    """The tables and the recurrent state of a sequence, moved together. What ends a transaction is made before."""

    __slots__ = ("_aborts", "_closes", "_commits", "all", "kv", "state")

    def __init__(self, kv: list[PagedSeqState], state: StateHandle | None) -> None:
        self.kv = kv
        self.state = state
        self.all: list[Any] = kv + ([] if state is None else [state])
        self._commits: list[Callable[[], object]] = [part.commit for part in self.all]
        self._aborts: list[Callable[[], object]] = [part.abort for part in self.all]
        self._closes: list[Callable[[], object]] = [table.close for table in kv]

    def begin(self) -> None:
        """Begins a transaction on every part; when one raises, on none."""
        begun = [Participation(part) for part in self.all]
        undo: list[Callable[[], object]] = [*begun]
        try:
            for part in begun:
                part.begin()
        except BaseException:
            run_all(undo)
            raise

    def commit(self) -> None:
        """Ends it; what was done stays."""
        run_all(self._commits)

    def abort(self) -> None:
        """Ends it; everything is as it was."""
        run_all(self._aborts)

    def close(self) -> None:
        """Gives the blocks back."""
        run_all(self._closes)

    def __enter__(self) -> None:
        """What is done to the parts within stays, unless it raises."""
        self.begin()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


def groups_of(groups: Iterable[KvGroup]) -> tuple[KvGroup, ...]:
    """All of them, in their order. Raises `TypeError` for anything else."""
    if not isinstance(groups, Iterable):
        raise wrong("groups", "an iterable of KvGroup", groups)
    found = tuple(groups)
    for place, group in enumerate(found):
        if not isinstance(group, KvGroup):
            raise wrong(f"groups[{place}]", "a KvGroup", group)
    return found


def find(checkpoints: tuple[Checkpoint, ...], wanted: Checkpoint) -> Checkpoint:
    """`wanted`, which must be one of them: `StaleHandle` when it was given up or is another sequence's."""
    for known in checkpoints:
        if known is wanted:
            return wanted
    raise StaleHandle(f"the checkpoint at {wanted.position} is none of the {len(checkpoints)} of this sequence")


def newest(checkpoints: tuple[Checkpoint, ...], length: int) -> int:
    """The position of the newest at or before `length`, 0 for 0: at the beginning a state is zeros.

    Raises `ValueError`, with both numbers, when the oldest comes later.
    """
    known = [checkpoint.position for checkpoint in checkpoints]
    if length and (not known or known[0] > length):
        oldest = f"the oldest state checkpoint is at {known[0]}" if known else "there is no state checkpoint"
        raise ValueError(f"cannot roll back to {length} tokens: {oldest}")
    return max([position for position in known if position <= length], default=0)


def require_tokens(length: int, groups: Iterable[KvGroup], tables: Iterable[PagedSeqState]) -> None:
    """Raises `ValueError` when a window has given back what the next token would see after a cut to `length`."""
    for group, state in zip(groups, tables, strict=True):
        start, gone = length - (group.window or 0), state.first_block * state.block_size
        if length and gone > max(0, start):
            need = f"token {max(0, start)} is needed, the first {gone} were given back"
            raise ValueError(f"cannot roll back to {length} tokens: {need}")


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
