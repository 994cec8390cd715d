"""Handles that go stale when what they stand for is released."""

from __future__ import annotations

from typing import Any

from pagepool.errors import StaleHandle

__all__ = ["SequenceHandle", "StateHandle"]


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
    """A handle to a slot of a pool of recurrent states."""

    def __init__(self, pool: Any, index: int) -> None:
        self.pool = pool
        self.index = index
        self.generation = pool.generation(index)

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
