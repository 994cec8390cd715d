"""StateHandle: one slot of a pool of recurrent states, as it was lent."""

from __future__ import annotations

from typing import Any

from pagepool.arguments import integer, wrong
from pagepool.errors import StaleHandle, refuse_copy
from pagepool.memory.sequence_state import SequenceSlot

__all__ = ["StateHandle"]


class StateHandle:
    """Slot `index` of a pool until it is released; whoever uses the handle later gets `StaleHandle`.

    It takes part in transactions: `begin` keeps a copy of the state in a free slot of the pool, `abort` puts it back.

    >>> from pagepool import AttentionSequenceState, SsmStatePool
    >>> pool = SsmStatePool(1, lambda i: AttentionSequenceState(8))
    >>> handle = pool.handle(pool.alloc(request_id=7))
    >>> handle.slot.request_id
    7
    >>> handle.release()
    >>> handle.slot
    Traceback (most recent call last):
    pagepool.errors.StaleHandle: the handle to slot 0 is of generation 0, the slot is in generation 1
    """

    __slots__ = ("_saved", "generation", "index", "pool")

    __reduce__ = refuse_copy

    def __init__(self, pool: Any, index: int) -> None:
        self.pool = pool
        self.index = integer("index", index)
        self.generation: int = pool.generation(index)
        # A copy in a slot of its own for the innermost open transaction; the `_saved` of that is for the one around it.
        self._saved: StateHandle | None = None

    @property
    def is_stale(self) -> bool:
        """Whether the slot was released since."""
        return not self.pool.is_generation(self.index, self.generation)

    @property
    def open_transactions(self) -> int:
        """How many transactions have begun and not ended."""
        count, saved = 0, self._saved
        while saved is not None:
            count, saved = count + 1, saved._saved
        return count

    @property
    def slot(self) -> SequenceSlot:
        """The `SequenceSlot`. Raises `StaleHandle` once it was released, whoever has it by now."""
        self._use()
        found: SequenceSlot = self.pool.slot(self.index)
        return found

    def view(self, layer: int, name: str) -> Any:
        """A view (*shape) of the state `name` of a layer, for a pool made from a layout. Raises `StaleHandle`."""
        self._use()
        return self.pool.view(layer, name)[self.index]

    def fork(self) -> StateHandle:
        """A copy of the state in a slot of its own, for the same request. Raises `PoolExhausted`, `StaleHandle`."""
        copy: StateHandle = self.pool.lend(self.slot.request_id)
        try:
            copy.copy_from(self)
        except BaseException:
            copy.close()
            raise
        return copy

    def copy_from(self, other: StateHandle) -> None:
        """Takes over state and position of another handle's slot, of the same pool. Raises `StaleHandle`.

        `ValueError` when that is of another pool; then nothing has changed.
        """
        if not isinstance(other, StateHandle):
            raise wrong("other", "a StateHandle", other)
        if other.pool is not self.pool:
            raise ValueError(f"slot {self.index} cannot become a copy of slot {other.index} of another pool")
        self._use()
        other._use()
        self.pool.copy(self.index, other.index)

    def reset(self) -> None:
        """Returns the state to its beginning; the request keeps the slot. Raises `StaleHandle`."""
        slot = self.slot
        request = slot.request_id
        slot.reset()
        slot.request_id = request

    def release(self) -> None:
        """Gives the slot back, zeroed. Raises `StaleHandle` when it was given back already."""
        self._use()
        self.pool.release(self.index)

    def close(self) -> None:
        """Gives the slot back, unless that was done already."""
        if not self.is_stale:
            self.release()

    def begin(self) -> None:
        """Begins a transaction. Raises `PoolExhausted` when no slot is free for the copy; then nothing has changed."""
        copy = self.fork()
        copy._saved, self._saved = self._saved, copy

    def commit(self) -> None:
        """Ends the innermost transaction; what was done stays. `ValueError` when none is open."""
        self._last_saved().release()

    def abort(self) -> None:
        """Ends the innermost transaction; the state is what it was. `ValueError` when none is open.

        A slot that was released meanwhile stays released: it may be another's.
        """
        saved = self._last_saved()
        try:
            if not self.is_stale:
                self.copy_from(saved)
        finally:
            saved.release()

    def _last_saved(self) -> StateHandle:
        saved = self._saved
        if saved is None:
            raise ValueError(f"slot {self.index} is in no transaction")
        self._saved = saved._saved
        return saved

    def _use(self) -> None:
        if self.is_stale:
            now = self.pool.generation(self.index)
            raise StaleHandle(
                f"the handle to slot {self.index} is of generation {self.generation}, the slot is in generation {now}"
            )
