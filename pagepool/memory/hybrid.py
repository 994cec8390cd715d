"""HybridSequence: one handle for all that a sequence has: pages, pages of sliding windows, and a recurrent state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from pagepool._arguments import integer, wrong
from pagepool.config import MAX_BLOCK_SIZE
from pagepool.errors import PoolError, PoolExhausted, StaleHandle, refuse_copy
from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.batch import group_append, group_close, group_truncate, require_truncate
from pagepool.memory.block_table import PagedSeqState
from pagepool.memory.explain import closed
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.memory.state import SequenceSlot

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Checkpoint", "HybridSequence", "KvGroup"]

MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class KvGroup:
    """The layers of a model that share a block table.

    Parameters
    ----------
    allocator
        The `BlockAllocator` of its blocks; groups may share one.
    block_size
        Tokens per block; by default the block size of the allocator's pool, else 16.
    window
        None for full attention, else `window_left` of `decode`: tokens that a query sees to its left.
    max_blocks_per_seq
        Length of the block table. The default is the maximum of the allocator; with a window 131,072, because a
        sequence may be longer than the allocator is large.
    """

    allocator: BlockAllocator
    block_size: int | None = None
    window: int | None = None
    max_blocks_per_seq: int | None = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.allocator, "allocate_n", None)):  # pagepool.reference has another class
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
        """The length of the table; None for the maximum of the allocator."""
        return 131_072 if self.max_blocks_per_seq is None and self.window is not None else self.max_blocks_per_seq


class HeldSlot:
    """A slot of a pool of states that a sequence or a checkpoint holds: number `index` of `pool`, until `close`.

    A slot for a draft is written before it is read, so it is not zeroed: this would cost as much as the draft.
    """

    __slots__ = ("_closed", "index", "pool")
    __reduce__ = refuse_copy

    def __init__(self, pool: SsmStatePool, request_id: int, zero: bool = True) -> None:
        self.pool = pool
        self.index = pool.alloc(request_id, zero)
        self._closed = False

    @property
    def slot(self) -> SequenceSlot:
        """The `SequenceSlot`. Raises `StaleHandle` after `close`."""
        if self._closed:
            raise StaleHandle(f"slot {self.index} was released: it may have another owner by now")
        return self.pool.slot(self.index)

    def view(self, layer: int, name: str) -> Any:
        """Returns a view (*shape) of the state `name` of a layer, if the pool has a layout. Raises `StaleHandle`."""
        _ = self.slot  # raises
        return self.pool.view(layer, name)[self.index]

    def fork(self) -> HeldSlot:
        """Copies the state into a new slot of the same request. Raises `PoolExhausted`; then nothing has changed."""
        copy = HeldSlot(self.pool, self.slot.request_id)
        try:
            self.pool.copy(copy.index, self.index)
        except BaseException:
            copy.close()
            raise
        return copy

    def close(self, zero: bool = True) -> None:
        """Zeroes the state and releases the slot. A second call does nothing."""
        if not self._closed:
            self.pool.release(self.index, zero)
            self._closed = True


class Checkpoint:
    """A position to which a `HybridSequence` can be rolled back: the number of tokens, and a copy of the recurrent
    state."""

    __slots__ = ("_state", "position")

    def __init__(self, position: int, state: HeldSlot | None) -> None:
        self.position = position
        self._state = state

    def __repr__(self) -> str:
        return f"Checkpoint(position={self.position})"

    def _close(self) -> None:
        if self._state is not None:
            self._state.close()


class HybridSequence:
    """All memory of one sequence of a hybrid model. Every call changes all parts or none.

    `kv[i]` is the `PagedSeqState` of group i. `state` is None, or has `pool`, `index` and `slot` of its slot, and
    `view(layer, name)`. The engine writes keys, values and states through them, and moves the sequence with the methods
    here. `append` frees the blocks that are behind a window, unless a checkpoint needs them. A sequence is not
    thread-safe. Raises `PoolExhausted` when no slot is free for the state, `ValueError` for wrong arguments.

    Parameters
    ----------
    groups
        One `KvGroup` for each set of layers that has a block table: full attention, sliding windows.
    states
        The `SsmStatePool` of its recurrent state, or None; block size and state size are independent.
    label
        A request id or a name, for `BlockAllocator.owners`.
    keep
        Number of tokens that can be rolled back without a checkpoint. Windows keep blocks for this many more tokens.

    Attributes
    ----------
    drafts : list
        The slots that `hold_drafts` has taken. Each has the attributes of `state`.

    Examples
    --------
    >>> from pagepool import BlockAllocator, KvGroup, StateLayout
    >>> states = SsmStatePool.from_layout(StateLayout(layers=[{"h": ((2,), "float32")}]), 4)
    >>> blocks = BlockAllocator(16)
    >>> sequence = HybridSequence([KvGroup(blocks, 4), KvGroup(blocks, 4, window=3)], states)
    >>> slots = sequence.append(10)
    >>> there = sequence.checkpoint()
    >>> sequence.state.view(0, "h")[...] = 7
    >>> slots = sequence.append(6)
    >>> sequence.rollback(there), sequence.state.view(0, "h").tolist(), [state.len for state in sequence.kv]
    (10, [0.0, 0.0], [10, 10])
    """

    _closed = True  # until `__init__` has ended
    __reduce__ = refuse_copy

    def __init__(
        self,
        groups: Iterable[KvGroup],
        states: SsmStatePool | None = None,
        *,
        label: int | str | None = None,
        keep: SupportsIndex = 0,
    ) -> None:
        self._len = 0
        self._checkpoints: list[Checkpoint] = []  # positions rise
        self.drafts: list[HeldSlot] = []
        self.keep = integer("keep", keep, 0)
        self.groups = groups_of(groups)
        if states is not None and not isinstance(states, SsmStatePool):
            raise wrong("states", "an SsmStatePool or None", states)
        if label is not None and not isinstance(label, (int, str)):
            raise wrong("label", "an int, a str or None", label)
        self.label = label
        self.kv = [PagedSeqState(g.allocator, g.block_size, g.most_blocks, label) for g in self.groups]
        self.state: HeldSlot | None = None
        if states is not None:
            self.state = HeldSlot(states, label if isinstance(label, int) and label else 1)
        self._closed = False

    @property
    def len(self) -> int:
        """Tokens that were appended."""
        return self._len

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that it can be rolled back to, the oldest first."""
        return tuple(self._checkpoints)

    def append(self, n: SupportsIndex = 1) -> list[NDArray[np.int64]]:
        """Makes room for n more tokens in every group; returns their slots, one int64 array (n,) for each group.

        First frees the blocks that are behind the window of the first new token. The new tokens may take these blocks,
        so a window advances in a full pool. Raises the errors of `PagedSeqState.append`; then nothing has changed.
        """
        self._use()
        number = integer("n", n)
        length = self._len + number
        slots = group_append(self.kv, number, self._starts())
        self._len = length
        return slots

    def adopt(self, blocks: Iterable[Any], num_tokens: SupportsIndex) -> None:
        """Starts an empty sequence with tokens that have their K and V in blocks, for example in cached ones.

        The caller brings the recurrent state to the same position: `StateCheckpoints.resume`. Raises `ValueError` when
        the sequence has tokens or `blocks` does not have one row for each group, and the errors of
        `PagedSeqState.adopt`; then nothing has changed.

        Parameters
        ----------
        blocks
            For each group the blocks that hold the tokens, as for `PagedSeqState.adopt`; the caller keeps its own
            references.
        """
        self._use()
        length = integer("num_tokens", num_tokens, 0)
        if not isinstance(blocks, Iterable):
            raise wrong("blocks", "a row of ids for each group", blocks)
        rows = list(blocks)
        if self._len or len(rows) != len(self.kv):
            raise ValueError(
                f"cannot adopt {len(rows)} rows of blocks: there are {len(self.kv)} groups, with {self._len} tokens"
            )
        adopted = 0
        try:
            for state, row in zip(self.kv, rows, strict=True):
                state.adopt(row, length)
                adopted += 1
        except BaseException:
            group_truncate(self.kv[:adopted], 0)
            raise
        self._len = length

    def trim(self) -> None:
        """Frees the blocks that are behind a window immediately, instead of at the next `append`."""
        self._use()
        for state, start in zip(self.kv, self._starts(), strict=True):
            state.drop_before(start)

    def fork(self, label: int | str | None = None) -> HybridSequence:
        """Returns a new sequence with the same tokens and a copy of the state, without checkpoints.

        Raises `PoolExhausted` when no slot is free for the state; then nothing has changed.
        """
        self._use()
        child = HybridSequence((), label=self.label if label is None else label, keep=self.keep)
        child.groups = self.groups
        try:
            child.state = None if self.state is None else self.state.fork()
            for state in self.kv:
                child.kv.append(state.fork())
                child.kv[-1].label = child.label
        except BaseException:
            child.close()
            raise
        child._len = self._len
        return child

    def checkpoint(self) -> Checkpoint:
        """Returns a `Checkpoint` of this position, kept until `discard` or until a rollback to before it.

        Copies the recurrent state. Does not copy pages, but windows keep their blocks from this position on. Returns
        the same checkpoint if this position has one. Raises `PoolExhausted` when no slot is free; then nothing has
        changed.
        """
        self._use()
        known = self._checkpoints
        if not known or known[-1].position < self._len:
            found = Checkpoint(self._len, None)
            known.append(found)
            try:
                found._state = None if self.state is None else self.state.fork()
            except BaseException:
                known.pop()
                raise
        return known[-1]

    def discard(self, checkpoint: Checkpoint) -> None:
        """Drops a checkpoint and frees its slot. Raises `StaleHandle` for one that is not of this sequence."""
        self._use()
        if not isinstance(checkpoint, Checkpoint):
            raise wrong("checkpoint", "a Checkpoint", checkpoint)
        self._checkpoints.remove(find(self._checkpoints, checkpoint))
        checkpoint._close()

    def rollback(self, to: SupportsIndex | Checkpoint) -> int:
        """Goes back to a `Checkpoint`, or by n tokens; returns the new length.

        A sequence with a recurrent state can only go back to a checkpoint. For n tokens it goes to the newest
        checkpoint at or before `len - n`, and the caller feeds the tokens after the new length again. Later checkpoints
        are dropped. Raises `ValueError` when a window has freed blocks that are needed there or the oldest checkpoint
        is later, `StaleHandle` for a dropped checkpoint, `InvalidBlock` when a block was freed by someone else; then
        nothing has changed.
        """
        self._use()
        if isinstance(to, Checkpoint):
            return self._return_to(find(self._checkpoints, to).position)
        number = integer("to, unless it is a Checkpoint,", to)
        if not 0 <= number <= self._len:
            raise ValueError(f"cannot roll back {number} of {self._len} tokens")
        return self._return_to(self._known_at(self._len - number))

    def truncate(self, len: SupportsIndex) -> None:
        """Keeps the first `len` tokens. Raises `ValueError` if no checkpoint has this position, and as `rollback`."""
        self._use()
        length = integer("len", len)
        if not 0 <= length <= self._len:
            raise ValueError(f"cannot truncate {self._len} tokens to {length}")
        known = self._known_at(length)
        if known != length:
            raise ValueError(f"cannot truncate to {length} tokens: the recurrent state is known at {known}")
        self._return_to(length)

    def hold_drafts(self, n: SupportsIndex) -> None:
        """Takes a slot for the recurrent state after each of the last n tokens, which are drafts; until `retract`.

        The model leaves `state` as it is after the token before the drafts, and writes the state after draft i into
        `drafts[i]`. Without a recurrent state nothing is taken. Raises `PoolExhausted` when fewer than n slots are
        free, `ValueError` when it holds drafts or has fewer tokens; then nothing has changed.

        >>> from pagepool import StateLayout
        >>> states = SsmStatePool.from_layout(StateLayout(layers=[{"h": ((1,), "float32")}]), 4)
        >>> sequence = HybridSequence([], states)
        >>> _ = sequence.append(3)  # one token and two drafts
        >>> sequence.hold_drafts(2)
        >>> for value, slot in enumerate([sequence.state, *sequence.drafts]):
        ...     slot.view(0, "h")[:] = value
        >>> sequence.retract(2)  # the first draft was right
        >>> sequence.state.view(0, "h"), states.used_count
        (array([1.], dtype=float32), 1)
        """
        self._use()
        number = integer("n", n, 0, self._len)
        if self.drafts:
            raise ValueError(f"cannot hold {number} drafts: {len(self.drafts)} are held, retract ends them")
        if self.state is None:
            return
        pool, request_id = self.state.pool, self.state.slot.request_id
        if pool.free_count < number:
            raise PoolExhausted(f"asked for {number} slots for drafts, {pool.free_count} of {pool.capacity} are free")
        held = [self.state] * number  # memory first
        taken = 0
        try:
            while taken < number:
                held[taken] = HeldSlot(pool, request_id, zero=False)
                taken += 1
        except BaseException:
            release_drafts(held, taken)
            raise
        self.drafts = held

    def retract(self, length: SupportsIndex) -> None:
        """Removes the tokens after the first `length`, which were appended but not computed, or were rejected drafts.

        The recurrent state becomes the state after the last draft that stays: its slot becomes `state`, and all other
        slots of drafts are released. No state is copied, so views of `state` are to be taken anew. Without drafts the
        state does not change, and has not seen the removed tokens. Raises `ValueError` when the sequence has fewer
        tokens, when a window has freed blocks that are needed or when a checkpoint is later, `InvalidBlock` when a
        block was freed by someone else; then nothing has changed.
        """
        self._use()
        target = integer("length", length, 0, self._len)
        known = self._checkpoints
        if known and known[-1].position > target:
            raise ValueError(f"cannot retract to {target} tokens: a checkpoint is at {known[-1].position}")
        require_tokens(target, self.groups, self.kv)
        last = target - (self._len - len(self.drafts)) - 1
        group_truncate(self.kv, target)
        if last >= 0 and self.state is not None:
            self.state, self.drafts[last] = self.drafts[last], self.state
        release_drafts(self.drafts, len(self.drafts))
        self._len = target

    def close(self) -> None:
        """Frees all blocks and slots. Later calls raise `StaleHandle`, but a second `close` does nothing.

        Raises `InvalidBlock` when a block was freed by someone else; then nothing has changed. Needs no memory.
        """
        if self._closed:
            return
        group_close(self.kv)
        release_drafts(self.drafts, len(self.drafts))
        close_from(0, self._checkpoints)
        if self.state is not None:
            self.state.close()
        self._checkpoints.clear()
        self._closed = True

    def check(self) -> None:
        """Audits the parts against each other. Raises `PoolError` that names a broken equation."""
        audit(self._len, self.groups, self.kv, [known.position for known in self._checkpoints])

    def stats(self) -> dict[str, int]:
        """Returns a dict: blocks of all groups, slots of states and drafts, checkpoints."""
        checkpoints = self._checkpoints
        return {
            "len": self._len,
            "blocks": sum(len(state.blocks) for state in self.kv),
            "given_back": sum(state.first_block for state in self.kv),
            "states": ((not self._closed) + len(checkpoints)) * (self.state is not None) + len(self.drafts),
            "checkpoints": len(checkpoints),
        }

    def _starts(self) -> list[int]:
        """The first token that each group must keep."""
        anchor = self._len - self.keep
        if self._checkpoints:
            anchor = min(anchor, self._checkpoints[0].position)
        return [0 if group.window is None else max(0, anchor - group.window) for group in self.groups]

    def _known_at(self, length: int) -> int:
        """The greatest length up to `length` at which the recurrent state is known."""
        return length if self.state is None or length == self._len else newest(self._checkpoints, length)

    def _return_to(self, length: int) -> int:
        if length == self._len:
            return length
        require_tokens(length, self.groups, self.kv)
        require_truncate(self.kv, length)
        known = self._checkpoints
        kept = [one for one in known if one.position <= length]
        if self.state is not None:
            self._restore(self.state, length)
        group_truncate(self.kv, length)
        self._len, self._checkpoints = length, kept
        close_from(len(kept), known)
        return length

    def _restore(self, state: HeldSlot, length: int) -> None:
        """Restores the state after `length` tokens: 0, or the position of a checkpoint."""
        for known in self._checkpoints:
            if known.position == length and known._state is not None:
                state.pool.copy(state.index, known._state.index)
                return
        slot, request = state.slot, state.slot.request_id
        slot.reset()
        slot.request_id = request

    def _use(self) -> None:
        if self._closed:
            raise closed("the sequence", self.label)

    def __del__(self) -> None:
        self.close()


def groups_of(groups: Iterable[KvGroup]) -> tuple[KvGroup, ...]:
    """The groups as a tuple. Raises `TypeError` if one is not a `KvGroup`."""
    if not isinstance(groups, Iterable):
        raise wrong("groups", "an iterable of KvGroup", groups)
    found = tuple(groups)
    for place, group in enumerate(found):
        if not isinstance(group, KvGroup):
            raise wrong(f"groups[{place}]", "a KvGroup", group)
    return found


def release_drafts(drafts: list[HeldSlot], count: int) -> None:
    """Releases the first `count` slots, the last of them first, and clears the list. Needs no memory."""
    while count:
        count -= 1
        drafts[count].close(zero=False)
    drafts.clear()


def close_from(place: int, checkpoints: list[Checkpoint]) -> None:
    """Releases the slots of `checkpoints[place:]`. Needs no memory, and so uses no iterator."""
    while place < len(checkpoints):
        checkpoints[place]._close()
        place += 1


def find(checkpoints: list[Checkpoint], wanted: Checkpoint) -> Checkpoint:
    """Return `wanted`. Raises `StaleHandle` if it was dropped or belongs to another sequence."""
    for known in checkpoints:
        if known is wanted:
            return wanted
    where = f"checkpoint at position {wanted.position}"
    raise StaleHandle(f"{where} does not belong to this sequence, which has {len(checkpoints)} checkpoints")


def newest(checkpoints: list[Checkpoint], length: int) -> int:
    """The position of the newest checkpoint at or before `length`; 0 for 0, where a state is zeros.

    Raises `ValueError` when the oldest checkpoint is later.
    """
    known = [checkpoint.position for checkpoint in checkpoints]
    if length and (not known or known[0] > length):
        oldest = f"the oldest state checkpoint is at {known[0]}" if known else "there is no state checkpoint"
        raise ValueError(f"cannot roll back to {length} tokens: {oldest}")
    return max([position for position in known if position <= length], default=0)


def require_tokens(length: int, groups: Iterable[KvGroup], tables: Iterable[PagedSeqState]) -> None:
    """Raises `ValueError` if a window has freed tokens that the first token after `length` sees."""
    for group, state in zip(groups, tables, strict=True):
        start, gone = length - (group.window or 0), state.first_block * state.block_size
        if length and gone > max(0, start):
            need = f"token {max(0, start)} is needed, the first {gone} were freed"
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
            raise PoolError(f"broken invariant: token {start} is needed, the first {gone} were freed")
    if positions != sorted(set(positions)) or any(position > length for position in positions):
        raise PoolError(f"broken invariant: checkpoints at {positions} of {length} tokens")
