"""HybridTransactions: a hybrid sequence as it was when a transaction began, and back to that.

Ending a transaction must not fail, so that what it needs is made when it begins.
"""

from __future__ import annotations

from pagepool.errors import refuse_copy
from pagepool.memory.hybrid_parts import NO_CHECKPOINTS, Checkpoints, Parts
from pagepool.memory.state_handle import StateHandle

__all__ = ["HybridTransactions"]


class Saved:
    """What a transaction must keep of a sequence so that it can be put back; `outer` is that of the one around it."""

    __slots__ = ("checkpoints", "closed", "len", "outer")

    def __init__(self, length: int, closed: bool, checkpoints: Checkpoints, outer: Saved | None) -> None:
        self.len = length
        self.closed = closed
        self.checkpoints = Checkpoints(checkpoints.items)
        self.outer = outer


class HybridTransactions:
    """What a transaction moves of a `HybridSequence`, its parts apart. Internal: its base."""

    state: StateHandle | None
    _parts: Parts

    __reduce__ = refuse_copy

    def __init__(self) -> None:
        self._len = 0
        self._closed = False
        self._checkpoints = NO_CHECKPOINTS  # positions rise
        self._saved: Saved | None = None  # of the innermost open transaction

    @property
    def open_transactions(self) -> int:
        """How many transactions have begun and not ended."""
        count, saved = 0, self._saved
        while saved is not None:
            count, saved = count + 1, saved.outer
        return count

    def begin(self) -> None:
        """Begins a transaction on all parts. Raises `PoolExhausted`, `MemoryError`; then nothing has changed."""
        self._use()
        saved = Saved(self._len, self._closed, self._checkpoints, self._saved)
        try:
            self._parts.begin()
        except BaseException:
            saved.checkpoints.drop()
            raise
        self._saved = saved

    def commit(self) -> None:
        """Ends the innermost transaction; what was done stays. `ValueError` when none is open."""
        saved = self._last_saved()
        self._parts.commit()
        saved.checkpoints.drop()
        if self._closed and self._saved is None and self.state is not None:
            self.state.close()

    def abort(self) -> None:
        """Ends the innermost transaction; everything is as it was. `ValueError` when none is open."""
        saved = self._last_saved()
        made, self._checkpoints = self._checkpoints, saved.checkpoints
        self._len, self._closed = saved.len, saved.closed
        try:
            self._parts.abort()
        finally:
            made.drop()

    def release(self) -> None:
        """Gives everything back for good."""
        raise NotImplementedError

    def _use(self) -> None:
        """Raises `StaleHandle` when the sequence was released."""
        raise NotImplementedError

    def _last_saved(self) -> Saved:
        saved = self._saved
        if saved is None:
            raise ValueError("the sequence is in no transaction")
        self._saved = saved.outer
        return saved

    def __del__(self) -> None:
        if hasattr(self, "_parts"):  # the last thing that it is given
            while self._saved is not None:
                self.commit()
            self.release()
