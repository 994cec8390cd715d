"""Recurrent states in plain Python: sequence states, and a pool with one slot per request.

Invariant, verified by `check()`: each slot is in use, or is in the free list exactly once and has request_id 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagepool._arguments import integer
from pagepool.config import StateLayout
from pagepool.errors import InvalidSlot, PoolError, PoolExhausted

__all__ = ["AttentionSequenceState", "Mamba2SequenceState", "SequenceSlot", "SsmStatePool"]


class AttentionSequenceState:
    """The state of a sequence with only KV pages: its position.

    >>> state = AttentionSequenceState(max_context=8)
    >>> state.advance()
    >>> state.step_position, state.capacity
    (1, 8)
    """

    def __init__(self, max_context: int) -> None:
        self.capacity = integer("max_context", max_context, 0)
        self.step_position = 0

    def advance(self) -> None:
        """Advance by one step."""
        self.step_position += 1

    def reset(self) -> None:
        """Return to the start."""
        self.step_position = 0

    def copy_from(self, other: AttentionSequenceState) -> None:
        """Copy the position of `other`."""
        self.step_position = other.step_position


class Mamba2SequenceState(AttentionSequenceState):
    """A recurrent state `h`, float32 `(n_layers, d_inner, d_state)`, zero at the start and after `reset`."""

    def __init__(self, n_layers: int, d_state: int, d_inner: int, max_context: int) -> None:
        super().__init__(max_context)
        self.h = np.zeros((n_layers, d_inner, d_state), dtype=np.float32)

    def reset(self) -> None:
        """Return to the start and zero `h`."""
        super().reset()
        self.h[:] = 0.0

    def copy_from(self, other: Any) -> None:
        """Copy the position and the state of `other`."""
        super().copy_from(other)
        self.h[:] = other.h


class SequenceSlot:
    """The state of one request, its position, and the id of the request (0: none)."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.position = state.step_position
        self.request_id = 0

    def step(self) -> None:
        """Advance the state and the position by one."""
        self.state.advance()
        self.position += 1

    def reset(self) -> None:
        """Reset the state, the position and the request id."""
        self.state.reset()
        self.position = 0
        self.request_id = 0


class _LayoutState:
    """The state of one slot in a pool with a layout: one row of each array."""

    def __init__(self, arrays: list[dict[str, np.ndarray]], slot: int) -> None:
        self.capacity = 0
        self.step_position = 0
        self._rows = [array[slot] for layer in arrays for array in layer.values()]

    def advance(self) -> None:
        self.step_position += 1

    def reset(self) -> None:
        self.step_position = 0
        for row in self._rows:
            row[...] = 0

    def copy_from(self, other: _LayoutState) -> None:
        self.step_position = other.step_position
        for row, source in zip(self._rows, other._rows, strict=True):
            row[...] = source


class SsmStatePool:
    """`capacity` slots; slot i has the state `make_state(i)`. The most recently released slot is allocated first.

    >>> pool = SsmStatePool(2, lambda i: Mamba2SequenceState(1, 2, 2, max_context=8))
    >>> i = pool.alloc(request_id=7)
    >>> pool.slot(i).state.h[:] = 1.0
    >>> pool.release(i)
    >>> i, pool.slot(i).request_id, float(pool.slot(i).state.h.sum()), pool.free_count
    (0, 0, 0.0, 2)
    """

    def __init__(self, capacity: int, make_state: Callable[[int], Any]) -> None:
        self.capacity = integer("capacity", capacity, 0)
        self._slots = [SequenceSlot(make_state(i)) for i in range(self.capacity)]
        self._free = list(range(self.capacity))[::-1]
        self._in_use: set[int] = set()
        self._dirty: set[int] = set()
        self._arrays: list[dict[str, np.ndarray]] = []

    @classmethod
    def from_layout(cls, layout: StateLayout, capacity: int) -> SsmStatePool:
        """Make a pool with the states of `layout`. Each array has the shape `(capacity, *shape)`."""
        arrays = [
            {name: np.zeros((capacity, *shape), dtype=dtype) for name, (shape, dtype) in layer.items()}
            for layer in layout.layers
        ]
        pool = cls(capacity, lambda i: _LayoutState(arrays, i))
        pool._arrays = arrays
        return pool

    @property
    def free_count(self) -> int:
        """Number of slots that can be allocated."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Number of slots in use."""
        return len(self._in_use)

    def alloc(self, request_id: int, zero: bool = True) -> int:
        """Allocate a slot for a request. Raises `PoolExhausted` if no slot is free.

        With `zero=False` the state can be that of a slot that was released with `zero=False`.
        """
        if not self._free:
            raise PoolExhausted(f"asked for 1 slot, 0 of {self.capacity} are free")
        i = self._free.pop()
        self._in_use.add(i)
        if zero and i in self._dirty:
            self._dirty.remove(i)
            self._slots[i].reset()
        self._slots[i].request_id = request_id
        return i

    def release(self, i: int, zero: bool = True) -> None:
        """Zero slot `i` and free it. Raises `InvalidSlot` if it is out of range or free.

        With `zero=False` the next `alloc` zeroes it, unless that has `zero=False` too.
        """
        slot = self.slot(self._used(i))
        if zero:
            self._dirty.discard(i)
            slot.reset()
        else:
            self._dirty.add(i)
            slot.state.step_position = slot.position = slot.request_id = 0
        self._in_use.remove(i)
        self._free.append(i)

    def slot(self, i: int) -> SequenceSlot:
        """Return slot `i`, in use or free. Raises `InvalidSlot` if it is out of range."""
        if not 0 <= i < self.capacity:
            raise InvalidSlot(f"slot {i} is out of range: there are {self.capacity} slots")
        return self._slots[i]

    def copy(self, dst: int, src: int) -> None:
        """Copy state and position from slot `src` to `dst`. Raises `InvalidSlot` unless both are in use."""
        self._used(dst), self._used(src)
        self._slots[dst].state.copy_from(self._slots[src].state)
        self._slots[dst].position = self._slots[src].position

    def view(self, layer: int, name: str) -> np.ndarray:
        """Return state `name` of `layer` for all slots, `(capacity, *shape)`. Raises `ValueError` if it is unknown."""
        if not 0 <= layer < len(self._arrays) or name not in self._arrays[layer]:
            raise ValueError(f"layer {layer} has no state {name!r}")
        return self._arrays[layer][name]

    def _used(self, i: int) -> int:
        self.slot(i)
        if i not in self._in_use:
            raise InvalidSlot(f"slot {i} is not allocated")
        return i

    def check(self) -> None:
        """Raise `PoolError` if the invariant above is broken."""
        if sorted(self._free + list(self._in_use)) != list(range(self.capacity)):
            raise PoolError(f"{len(self._free)} free + {len(self._in_use)} in use are not {self.capacity} slots")
        for i in self._free:
            if self._slots[i].request_id:
                raise PoolError(f"slot {i} is free but belongs to request {self._slots[i].request_id}")
