"""What a sequence was when a transaction on it began, and handles that go stale when it is released."""

from __future__ import annotations

from typing import Any

from pagepool.errors import StaleHandle

__all__ = ["SequenceHandle", "StateHandle", "TableSnapshot"]


class TableSnapshot:
    """A sequence as it was when a transaction began. `owned`: the places whose blocks it has a reference to.

    A place that is not kept has its block in the sequence's own table, with the table's reference.
    """

    def __init__(self, state: Any) -> None:
        self.blocks = list(state._blocks)
        self.first_block = state.first_block
        self.len = state.len
        self.generation = state.generation
        self.owned: set[int] = set()

    def needs(self, place: int, block: int) -> bool:
        """Whether an abort needs the block that the table has at a place, and nothing but the table keeps it."""
        return self.first_block <= place < len(self.blocks) and self.blocks[place] == block and place not in self.owned

    def takes(self, place: int, block: int) -> bool:
        """Takes over the table's reference, if an abort needs it."""
        needed = self.needs(place, block)
        if needed:
            self.owned.add(place)
        return needed


class SequenceHandle:
    """A handle to a sequence: `state` raises `StaleHandle` once it was released."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.generation = state.generation

    @property
    def is_stale(self) -> bool:
        """Whether `state` would raise."""
        return bool(self._state.closed or self._state.generation != self.generation)

    @property
    def state(self) -> Any:
        """The sequence."""
        if self.is_stale:
            raise StaleHandle(f"generation {self.generation} is over, it is {self._state.generation} now")
        return self._state


class StateHandle:
    """A handle to a slot of a pool of recurrent states; transactions keep copies in slots of their own."""

    def __init__(self, pool: Any, index: int) -> None:
        self.pool = pool
        self.index = index
        self.generation = pool.generation(index)
        self._saved: list[int] = []

    @property
    def is_stale(self) -> bool:
        """Whether the slot was released since."""
        return bool(self.pool.generation(self.index) != self.generation)

    @property
    def slot(self) -> Any:
        """The slot; `StaleHandle` once it was released."""
        if self.is_stale:
            raise StaleHandle(f"slot {self.index} was released")
        return self.pool.slot(self.index)

    @property
    def open_transactions(self) -> int:
        """The number of open transactions."""
        return len(self._saved)

    def view(self, layer: int, name: str) -> Any:
        """The state `name` of a layer, `(*shape)`; `StaleHandle` once it was released."""
        return self.slot is not None and self.pool.view(layer, name)[self.index]

    def fork(self) -> StateHandle:
        """A copy of the state in a slot of its own. Raises `PoolExhausted` when none is free."""
        copy = self.pool.alloc(self.slot.request_id)
        self.pool.copy(copy, self.index)
        return StateHandle(self.pool, copy)

    def copy_from(self, other: StateHandle) -> None:
        """Takes over state and position of another's slot."""
        if self.slot is not None and other.slot is not None:
            self.pool.copy(self.index, other.index)

    def reset(self) -> None:
        """The state is at its beginning; the request keeps the slot."""
        slot, request = self.slot, self.slot.request_id
        slot.reset()
        slot.request_id = request

    def release(self) -> None:
        """Gives the slot back, zeroed."""
        if self.slot is not None:
            self.pool.release(self.index)

    def close(self) -> None:
        """Gives the slot back. A second call does nothing."""
        if not self.is_stale:
            self.release()

    def begin(self) -> None:
        """Begins a transaction: a copy of the state in a free slot."""
        self._saved.append(self.fork().index)

    def commit(self) -> None:
        """Ends the innermost transaction."""
        self.pool.release(self._saved.pop())

    def abort(self) -> None:
        """Ends the innermost transaction and puts the state back, if the slot was not released."""
        copy = self._saved.pop()
        if not self.is_stale:
            self.pool.copy(self.index, copy)
        self.pool.release(copy)
