"""HybridSequence: one handle for all that a sequence has: pages, pages of sliding windows, and a recurrent state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagepool.errors import StaleHandle
from pagepool.memory.hybrid_parts import (
    Checkpoint,
    KvGroup,
    all_or_none,
    audit,
    begin_all,
    find,
    newest,
    release_unneeded,
    require_tokens,
)
from pagepool.memory.lockstep import append_each
from pagepool.memory.paged_seq import PagedSeqState
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.memory.state_handle import StateHandle

__all__ = ["HybridSequence"]


class HybridSequence:
    """All memory of one sequence, moved together: every call is done in all parts or in none.

    groups   a `KvGroup` for each set of layers with a block table of its own: full attention, windows
    states   the `SsmStatePool` of its recurrent state, or None; block size and state size are independent
    label    whose it is: a request id or a name
    keep     how many tokens back it can be rolled without a checkpoint: the windows keep their blocks that much longer

    `kv[i]` is the `PagedSeqState` of group i, `state` a `StateHandle` or None; the engine writes keys, values and
    states through them, and moves the sequence with the methods here. What a window has left is given back by the next
    `append`, unless a checkpoint needs it. It takes part in a `Transaction`. One thread at a time may use it. Raises
    `PoolExhausted`, `ValueError`.

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

    def __init__(
        self,
        groups: Iterable[KvGroup],
        states: SsmStatePool | None = None,
        *,
        label: int | str | None = None,
        keep: int = 0,
    ) -> None:
        if keep < 0:
            raise ValueError(f"keep must be at least 0, not {keep}")
        self.groups = tuple(groups)
        self.keep = keep
        self.label = label
        self.kv = [PagedSeqState(g.allocator, g.block_size, g.most_blocks, label) for g in self.groups]
        self.state: StateHandle | None = None
        if states is not None:
            self.state = states.handle(states.alloc(label if isinstance(label, int) and label else 1))
        self._len = 0
        self._closed = False
        self._checkpoints: list[Checkpoint] = []  # positions rise
        self._saved: list[tuple[int, bool, list[Checkpoint]]] = []  # of the open transactions, the innermost last

    @property
    def len(self) -> int:
        """Tokens that were appended."""
        return self._len

    @property
    def closed(self) -> bool:
        """Whether it was released."""
        return self._closed

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Those that it can be rolled back to, the oldest first."""
        return tuple(self._checkpoints)

    @property
    def open_transactions(self) -> int:
        """How many transactions have begun and not ended."""
        return len(self._saved)

    def append(self, n: int = 1) -> list[NDArray[np.int64]]:
        """Makes room for n more tokens in every group; returns their slots, one int64 array (n,) for each group.

        First it gives back the blocks that the windows have left: of their queries, the next is that of the first new
        token. Those that were its alone hold the new tokens, so that a window moves in a full pool. Raises as
        `PagedSeqState.append`; then nothing has changed.
        """
        self._use()
        slots = append_each(self.kv, n, self._starts())
        self._len += n
        return slots

    def adopt(self, blocks: Iterable[Any], num_tokens: int) -> None:
        """Begins with tokens that are in blocks already, as those that a prefix cache has found; `len` is their number.

        blocks  for each group those that hold the tokens, as `PagedSeqState.adopt` takes them; the caller's references
                stay the caller's

        The recurrent state is the caller's to bring there: `StateCheckpoints.resume`. Raises `ValueError` when there
        are tokens already, or rows of blocks for another number of groups, and as `PagedSeqState.adopt`; then nothing
        has changed.
        """
        self._use()
        rows = list(blocks)
        if self._len or len(rows) != len(self.kv):
            raise ValueError(
                f"cannot adopt {len(rows)} rows of blocks: there are {len(self.kv)} groups, with {self._len} tokens"
            )
        with all_or_none(self.kv):
            for state, row in zip(self.kv, rows, strict=True):
                state.adopt(row, num_tokens)
        self._len = num_tokens

    def trim(self) -> None:
        """Gives back now what the windows have left, instead of at the next `append`."""
        self._use()
        for state, start in zip(self.kv, self._starts(), strict=True):
            state.drop_before(start)

    def fork(self, label: int | str | None = None) -> HybridSequence:
        """A sequence of its own with the same tokens and a copy of the state; without checkpoints.

        Raises `PoolExhausted` when no slot is free for the state; then nothing has changed.
        """
        self._use()
        child = HybridSequence((), label=self.label if label is None else label, keep=self.keep)
        child.groups = self.groups
        if self.state is not None:
            child.state = self.state.fork()
        try:
            child.kv = [state.fork() for state in self.kv]
        except BaseException:
            child.release()
            raise
        for state in child.kv:
            state.label = child.label
        child._len = self._len
        return child

    def checkpoint(self) -> Checkpoint:
        """A place to roll back to; kept until `discard`, or until the sequence is rolled back behind it.

        Costs a copy of the recurrent state; of the pages nothing, but windows keep their blocks from here on. Where
        there is one already, that is returned. Raises `PoolExhausted` when no slot is free; then nothing has changed.
        """
        self._use()
        if self._checkpoints and self._checkpoints[-1].position == self._len:
            return self._checkpoints[-1]
        found = Checkpoint(self._len, None if self.state is None else self.state.fork())
        self._checkpoints.append(found)
        return found

    def discard(self, checkpoint: Checkpoint) -> None:
        """Gives a checkpoint up, and its slot back. Raises `StaleHandle` when it is none of this sequence's."""
        self._use()
        find(self._checkpoints, checkpoint)
        self._keep_checkpoints([known for known in self._checkpoints if known is not checkpoint])

    def rollback(self, to: int | Checkpoint) -> int:
        """Goes back to a `Checkpoint`, or by n tokens; returns the length that it has then.

        With a recurrent state and n tokens, that is the newest checkpoint at or before them: the tokens from there on
        are to be fed again, as many as the result is short of `len - n`. Checkpoints behind it are given up. Raises
        `ValueError` when a window has given back what it would need there, or the oldest checkpoint comes later (with
        both numbers), `StaleHandle` for a checkpoint that was given up; then nothing has changed.
        """
        self._use()
        if isinstance(to, Checkpoint):
            return self._return_to(find(self._checkpoints, to).position)
        if not 0 <= to <= self._len:
            raise ValueError(f"cannot roll back {to} of {self._len} tokens")
        return self._return_to(self._known_at(self._len - to))

    def truncate(self, len: int) -> None:
        """Keeps the first `len` tokens. Raises `ValueError` when the state there is not known, and as `rollback`."""
        self._use()
        if not 0 <= len <= self._len:
            raise ValueError(f"cannot truncate {self._len} tokens to {len}")
        known = self._known_at(len)
        if known != len:
            raise ValueError(f"cannot truncate to {len} tokens: the state is known after {known}")
        self._return_to(len)

    def release(self) -> None:
        """Gives everything back for good: whoever uses it later gets `StaleHandle`. Twice does nothing."""
        if self._closed:
            return
        self._keep_checkpoints([])
        for state in self.kv:
            state.close()
        self._closed = True
        if self.state is not None and not self._saved:
            self.state.close()

    close = release

    def begin(self) -> None:
        """Begins a transaction on all parts. Raises `PoolExhausted`, `MemoryError`; then nothing has changed."""
        self._use()
        begin_all(self._parts())
        self._saved.append((self._len, self._closed, list(self._checkpoints)))

    def commit(self) -> None:
        """Ends the innermost transaction; what was done stays. `ValueError` when none is open."""
        *_, before = self._last_saved()
        for part in self._parts():
            part.commit()
        release_unneeded(before, self._checkpoints, self._saved)
        if self._closed and not self._saved and self.state is not None:
            self.state.close()

    def abort(self) -> None:
        """Ends the innermost transaction; everything is as it was. `ValueError` when none is open."""
        length, closed, before = self._last_saved()
        for part in self._parts():
            part.abort()
        made, self._checkpoints = self._checkpoints, before
        self._len, self._closed = length, closed
        release_unneeded(made, before, self._saved)

    def check(self) -> None:
        """Audits the parts against each other; raises `PoolError` naming what does not fit."""
        audit(self._len, self.groups, self.kv, [known.position for known in self._checkpoints])

    def stats(self) -> dict[str, int]:
        """Blocks of all groups, slots of states and checkpoints, as a dict."""
        return {
            "len": self._len,
            "blocks": sum(len(state.blocks) for state in self.kv),
            "given_back": sum(state.first_block for state in self.kv),
            "states": (self.state is not None and not self._closed) + len(self._checkpoints) * (self.state is not None),
            "checkpoints": len(self._checkpoints),
        }

    def _parts(self) -> list[Any]:
        return [*self.kv, self.state] if self.state is not None else list(self.kv)

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
        at = [known for known in self._checkpoints if known.position == length]
        with all_or_none(self.kv):
            for state in self.kv:
                state.truncate(length)
            if self.state is not None and at:
                self.state.copy_from(at[0]._state)  # type: ignore[arg-type]
        if self.state is not None and not at:  # the beginning: zeros
            self.state.reset()
        self._len = length
        self._keep_checkpoints([known for known in self._checkpoints if known.position <= length])
        return length

    def _keep_checkpoints(self, kept: list[Checkpoint]) -> None:
        """Gives up the others; those that an abort needs are kept for it."""
        gone, self._checkpoints = self._checkpoints, kept
        release_unneeded(gone, kept, self._saved)

    def _last_saved(self) -> tuple[int, bool, list[Checkpoint]]:
        if not self._saved:
            raise ValueError("the sequence is in no transaction")
        return self._saved.pop()

    def _use(self) -> None:
        if self._closed:
            raise StaleHandle(f"the sequence {self.label!r} was closed: its blocks may be another's by now")

    def __del__(self) -> None:
        if hasattr(self, "_saved"):  # the last thing that __init__ makes
            while self._saved:
                self.commit()
            self.release()
