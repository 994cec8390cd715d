"""The recurrent state of one sequence: the protocol, two classes that implement it, and its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from pagepool._arguments import integer, wrong
from pagepool.errors import PoolExhausted

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["AttentionSequenceState", "Mamba2SequenceState", "SequenceSlot", "SequenceState"]


@runtime_checkable
class SequenceState(Protocol):
    """The protocol of a sequence's state, which the objects in an `SsmStatePool` must have."""

    @property
    def step_position(self) -> int:
        """Steps taken since the last reset."""

    @property
    def capacity(self) -> int:
        """Steps that can be taken."""

    def advance(self) -> None:
        """Counts one step. Raises `PoolExhausted` at the capacity; then nothing has changed."""

    def reset(self) -> None:
        """Returns to position 0 and zeroes its memory."""


class AttentionSequenceState:
    """The position of a sequence with keys and values in pages. `max_context` is its maximum number of tokens.

    >>> state = AttentionSequenceState(max_context=2)
    >>> state.advance()
    >>> state.step_position, state.capacity
    (1, 2)
    """

    def __init__(self, max_context: int) -> None:
        self._capacity = integer("max_context", max_context, 0)
        self._position = 0

    @property
    def step_position(self) -> int:
        """Steps taken since the last reset."""
        return self._position

    @property
    def capacity(self) -> int:
        """The maximum number of tokens of the sequence."""
        return self._capacity

    def advance(self) -> None:
        """Counts one step. Raises `PoolExhausted`, and changes nothing, when the sequence has all its tokens."""
        if self._position >= self._capacity:
            raise PoolExhausted(f"asked for step {self._position + 1}, the sequence has room for {self._capacity}")
        self._position += 1

    def reset(self) -> None:
        """Returns to position 0."""
        self._position = 0

    def copy_from(self, other: AttentionSequenceState) -> None:
        """Takes over the position of `other`. Raises `ValueError` when that is past the capacity."""
        if not isinstance(other, AttentionSequenceState):
            raise wrong("other", "an AttentionSequenceState", other)
        if other._position > self._capacity:
            raise ValueError(f"position {other._position} exceeds the capacity of this state, {self._capacity} steps")
        self._position = other._position


class Mamba2SequenceState(AttentionSequenceState):
    """The recurrent state of a Mamba-2 model: `h`, float32 (n_layers, d_inner, d_state), zeros at first.

    >>> state = Mamba2SequenceState(n_layers=2, d_state=4, d_inner=8, max_context=16)
    >>> state.h.shape
    (2, 8, 4)
    """

    def __init__(self, n_layers: int, d_state: int, d_inner: int, max_context: int) -> None:
        super().__init__(max_context)
        shape = (integer("n_layers", n_layers, 0), integer("d_inner", d_inner, 0), integer("d_state", d_state, 0))
        self._h = np.zeros(shape, np.float32)

    @property
    def h(self) -> NDArray[np.float32]:
        """The state itself, float32 (n_layers, d_inner, d_state); the model writes into it."""
        return self._h

    def reset(self) -> None:
        """Returns to position 0 and zeros `h` in place."""
        super().reset()
        self._h[...] = 0

    def copy_from(self, other: AttentionSequenceState) -> None:
        """Copies `h` and the position of `other`. Raises `ValueError` when it has another shape."""
        if not isinstance(other, Mamba2SequenceState) or other._h.shape != self._h.shape:
            raise ValueError(f"a state of shape {self._h.shape} cannot become a copy of {type(other).__name__}")
        super().copy_from(other)
        self._h[...] = other._h


class SequenceSlot:
    """A state of a pool, the request that uses it and its position.

    >>> slot = SequenceSlot(AttentionSequenceState(8))
    >>> slot.step()
    >>> slot.position, slot.request_id
    (1, 0)
    """

    __slots__ = ("_copies", "position", "request_id", "state")

    def __init__(self, state: SequenceState) -> None:
        self.state = state
        self._copies = hasattr(state, "copy_from")
        self.position = state.step_position
        self.request_id = 0

    def step(self) -> None:
        """Advances the state and the position by one. If the state raises an exception, the position does not
        change."""
        self.state.advance()
        self.position += 1

    def copy_from(self, other: SequenceSlot) -> None:
        """Takes over the state and the position of `other`; the request stays.

        Uses the state's `copy_from`. Raises `TypeError`, and changes nothing, when it has none.
        """
        state: Any = self.state
        if not self._copies:
            raise TypeError(f"a {type(state).__name__} has no copy_from: it cannot be copied")
        state.copy_from(other.state)
        self.position = other.position

    def forget(self) -> None:
        """Sets the position and the request id to 0, and does not reset the state's memory."""
        state: Any = self.state
        state.step_position = self.position = self.request_id = 0

    def reset(self) -> None:
        """Resets the state, sets the position to the state's position, and sets the request id to 0."""
        self.state.reset()
        self.position = self.state.step_position
        self.request_id = 0
