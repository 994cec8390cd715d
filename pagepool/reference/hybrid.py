"""HybridSequence in plain Python: the block tables of groups of layers and a recurrent state, changed together.

For a sequence of `len` tokens and its checkpoints:

    tables         each table has all `len` tokens. With a window: whole blocks from (anchor - window) on
    anchor         min(len - keep, position of the oldest checkpoint)
    state          the state after `len` tokens. A checkpoint has the state after `position` tokens in its own slot
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from pagepool._arguments import integer
from pagepool.errors import PoolError, PoolExhausted, StaleHandle
from pagepool.reference.block_table import PagedSeqState

__all__ = ["Checkpoint", "HybridSequence"]


class HeldSlot:
    """A slot of a state pool, owned by a sequence or a checkpoint."""

    def __init__(self, pool: Any, request_id: int, zero: bool = True) -> None:
        self.pool = pool
        self.index = pool.alloc(request_id, zero)
        self.closed = False

    @property
    def slot(self) -> Any:
        """The slot. Raises `StaleHandle` after `close`."""
        if self.closed:
            raise StaleHandle(f"slot {self.index} was released")
        return self.pool.slot(self.index)

    def view(self, layer: int, name: str) -> Any:
        """Return the state `name` of a layer, `(*shape)`. Raises `StaleHandle` after `close`."""
        _ = self.slot  # raises
        return self.pool.view(layer, name)[self.index]

    def fork(self) -> HeldSlot:
        """Copy the state to a new slot. Raises `PoolExhausted` if no slot is free."""
        copy = HeldSlot(self.pool, self.slot.request_id)
        self.pool.copy(copy.index, self.index)
        return copy

    def close(self, zero: bool = True) -> None:
        """Release the slot."""
        if not self.closed:
            self.pool.release(self.index, zero)
            self.closed = True


class Checkpoint:
    """A position to roll back to: the number of tokens, and a `HeldSlot` with a copy of the state, or None."""

    def __init__(self, position: int, state: Any) -> None:
        self.position = position
        self.state = state


class HybridSequence:
    """One sequence in all its `groups` (`KvGroup`, over a reference allocator) and in a slot of `states`.

    >>> from pagepool import KvGroup
    >>> from pagepool.reference import BlockAllocator
    >>> sequence = HybridSequence([KvGroup(BlockAllocator(8), 2), KvGroup(BlockAllocator(4), 2, window=1)])
    >>> for _ in range(5):
    ...     slots = sequence.append(2)
    >>> [state.blocks for state in sequence.kv]
    [[0, 1, 2, 3, 4], [1, 0]]
    """

    def __init__(self, groups: Iterable[Any], states: Any = None, *, label: Any = None, keep: int = 0) -> None:
        self.groups = tuple(groups)
        self.keep = integer("keep", keep, 0)
        self.label = label
        self.kv = [PagedSeqState(g.allocator, g.block_size, g.most_blocks, label) for g in self.groups]
        request = label if isinstance(label, int) and label else 1
        self.state = None if states is None else HeldSlot(states, request)
        self.len = 0
        self.closed = False
        self.checkpoints: list[Checkpoint] = []
        self.drafts: list[HeldSlot] = []

    def append(self, n: int = 1) -> list[np.ndarray]:
        """Free the blocks before the windows, then add n tokens. Returns the slots in every group.

        Unshared blocks before a window are reused for the new tokens, in the order of the groups. So this can succeed
        even if the allocator has no free block.
        """
        self._use()
        n = integer("n", n, 0)
        missing = [state._missing(self.len + n) for state in self.kv]
        plans = []
        for allocator in dict.fromkeys(state.allocator for state in self.kv):
            wanted = sum(
                new + len(state._shared(n))
                for state, new in zip(self.kv, missing, strict=True)
                if state.allocator is allocator
            )
            left = [state._blocks[place] for state, place in self._left(allocator)]
            own = [block for block in left if allocator.ref_count(block) == 1][:wanted]
            allocator.demand(wanted - len(own))
            plans.append((allocator, own, wanted - len(own)))
        for allocator, own, new in plans:
            taken = chain(own, allocator.allocate_n(new).tolist())
            moving = set(own)
            for state, place in list(self._left(allocator)):
                if state._blocks[place] in moving:
                    moving.remove(state._blocks[place])
                else:
                    state.allocator.free(state._blocks[place])
                state._blocks[place] = state._table[place] = -1
                state.first_block = place + 1
            for state in self.kv:
                if state.allocator is allocator:
                    state.append_taken(n, taken)
            allocator.free(list(taken)[::-1])
        self.len += n
        return [state.slots(n) for state in self.kv]

    def adopt(self, blocks: Iterable[Any], num_tokens: int) -> None:
        """Start an empty sequence with tokens that blocks of every group already hold."""
        self._use()
        num_tokens = integer("num_tokens", num_tokens, 0)
        rows = [[int(block) for block in row] for row in blocks]
        if self.len or len(rows) != len(self.kv):
            raise ValueError(
                f"blocks must have {len(self.kv)} rows, not {len(rows)}, for an empty sequence, not {self.len} tokens"
            )
        done: list[PagedSeqState] = []
        try:
            for state, row in zip(self.kv, rows, strict=True):
                state.adopt(row, num_tokens)
                done.append(state)
        except (PoolError, ValueError):
            for state in done:
                state.truncate(0)
            raise
        self.len = num_tokens

    def trim(self) -> None:
        """Free the blocks before the windows."""
        self._use()
        for state, start in zip(self.kv, self._starts(), strict=True):
            state.drop_before(start)

    def fork(self, label: Any = None) -> HybridSequence:
        """Return a sequence with the same tokens and a copy of the state, without checkpoints."""
        self._use()
        child = HybridSequence((), label=self.label if label is None else label, keep=self.keep)
        child.state = None if self.state is None else self.state.fork()
        child.groups, child.len = self.groups, self.len
        child.kv = [state.fork() for state in self.kv]
        return child

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint at the present position. There is at most one per position."""
        self._use()
        if not any(known.position == self.len for known in self.checkpoints):
            self.checkpoints.append(Checkpoint(self.len, None if self.state is None else self.state.fork()))
        return self.checkpoints[-1]

    def discard(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint."""
        self._known(checkpoint)
        self._keep_checkpoints([known for known in self.checkpoints if known is not checkpoint])

    def rollback(self, to: int | Checkpoint) -> int:
        """Roll back to a checkpoint, or by a number of tokens and then to the last known state. Returns the length."""
        if isinstance(to, Checkpoint):
            return self._return_to(self._known(to).position)
        self._use()
        return self._return_to(self._state_at(self.len - integer("tokens", to, 0, self.len)))

    def truncate(self, len: int) -> None:
        """Keep the first `len` tokens. The state after them must be known."""
        self._use()
        if self._state_at(integer("len", len, 0, self.len)) != len:
            raise ValueError(f"the state after {len} tokens is unknown: no checkpoint is at this position")
        self._return_to(len)

    def hold_drafts(self, n: int) -> None:
        """Take a slot for the state after each of the last n tokens. Raises `PoolExhausted` if there are too few."""
        self._use()
        if self.drafts or not 0 <= n <= self.len:
            raise ValueError(f"{n} drafts of {self.len} tokens; {len(self.drafts)} are held")
        if self.state is not None:
            if self.state.pool.free_count < n:
                raise PoolExhausted(f"{n} drafts need a slot each, {self.state.pool.free_count} are free")
            self.drafts = [HeldSlot(self.state.pool, self.state.slot.request_id, False) for _ in range(n)]

    def retract(self, length: int) -> None:
        """Remove the last tokens. The state becomes that of the last draft that stays; without drafts it stays."""
        self._use()
        for state in self.kv:
            state.truncate(length)
        kept = len(self.drafts) - (self.len - length)
        if kept > 0:
            self.state, self.drafts[kept - 1] = self.drafts[kept - 1], self.state
        while self.drafts:
            self.drafts.pop().close(False)
        self.len = length

    def close(self) -> None:
        """Free all blocks and slots."""
        if not self.closed:
            for state in self.kv:
                state.close()
            while self.drafts:
                self.drafts.pop().close(False)
            self._keep_checkpoints([])
            self.closed = True
            if self.state is not None:
                self.state.close()

    def check(self) -> None:
        """Raise `PoolError` if a table does not have the tokens that it must have."""
        anchor = min([self.len, *[known.position for known in self.checkpoints]])
        for group, state in zip(self.groups, self.kv, strict=True):
            start = max(0, anchor - (group.window or 0))
            if state.len != self.len or state.first_block * state.block_size > start:
                raise PoolError(f"a table has {state.len} tokens from block {state.first_block} on, not {self.len}")

    def _starts(self) -> list[int]:
        """Return the first token that each group needs."""
        anchor = min([self.len - self.keep, *[known.position for known in self.checkpoints]])
        return [0 if group.window is None else max(0, anchor - group.window) for group in self.groups]

    def _left(self, allocator: Any) -> Iterable[tuple[PagedSeqState, int]]:
        """Yield the tables of an allocator with the places of their blocks before the windows."""
        for state, start in zip(self.kv, self._starts(), strict=True):
            if state.allocator is allocator:
                for place in range(state.first_block, start // state.block_size):
                    yield state, place

    def _state_at(self, length: int) -> int:
        """Return the largest length up to `length` with a known state."""
        if self.state is None or length == self.len:
            return length
        known = [0] * (length == 0) + [one.position for one in self.checkpoints if one.position <= length]
        if not known:
            raise ValueError(f"no checkpoint at position {length} or earlier")
        return max(known)

    def _return_to(self, length: int) -> int:
        if length < self.len:
            for group, state in zip(self.groups, self.kv, strict=True):
                if length and state.first_block * state.block_size > max(0, length - (group.window or 0)):
                    raise ValueError(f"{length} tokens need blocks before {state.first_block}, which were freed")
            for state in self.kv:
                state.truncate(length)
            if self.state is not None:
                copies = [known.state for known in self.checkpoints if known.position == length]
                if copies:
                    self.state.pool.copy(self.state.index, copies[0].index)
                else:
                    slot, request = self.state.slot, self.state.slot.request_id
                    slot.reset()
                    slot.request_id = request
            self.len = length
            self._keep_checkpoints([known for known in self.checkpoints if known.position <= length])
        return length

    def _known(self, checkpoint: Checkpoint) -> Checkpoint:
        self._use()
        if not any(known is checkpoint for known in self.checkpoints):
            raise StaleHandle(f"the checkpoint at position {checkpoint.position} was dropped")
        return checkpoint

    def _keep_checkpoints(self, kept: list[Checkpoint]) -> None:
        for known in self.checkpoints:
            if known not in kept and known.state is not None:
                known.state.close()
        self.checkpoints = kept

    def _use(self) -> None:
        if self.closed:
            raise StaleHandle(
                "the sequence was closed" if self.label is None else f"the sequence {self.label!r} was closed"
            )
