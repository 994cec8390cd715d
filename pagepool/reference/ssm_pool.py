"""Recurrent states in plain Python: sequence states, and the pool that hands out one per request.

Invariant, which `check()` verifies: every slot is either in the free list, once, with request_id 0, or in use.
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
    """The state of a sequence that has only KV pages: its position.

    >>> state = AttentionSequenceState(max_context=8)
    >>> state.advance()
    >>> state.step_position, state.capacity
    (1, 8)
    """

    def __init__(self, max_context: int) -> None:
        self.capacity = integer("max_context", max_context, 0)
        self.step_position = 0

    def advance(self) -> None:
        """One step further."""
        self.step_position += 1

    def reset(self) -> None:
        """Back to the start."""
        self.step_position = 0

    def copy_from(self, other: AttentionSequenceState) -> None:
        """Takes over the position of `other`."""
        self.step_position = other.step_position


class Mamba2SequenceState(AttentionSequenceState):
    """A recurrent state `h`, float32 `(n_layers, d_inner, d_state)`, zero at the start and after `reset`."""

    def __init__(self, n_layers: int, d_state: int, d_inner: int, max_context: int) -> None:
        super().__init__(max_context)
        self.h = np.zeros((n_layers, d_inner, d_state), dtype=np.float32)

    def reset(self) -> None:
        """Back to the start, with `h` zero."""
        super().reset()
        self.h[:] = 0.0

    def copy_from(self, other: Any) -> None:
        """Becomes a copy of `other`."""
        super().copy_from(other)
        self.h[:] = other.h


class SequenceSlot:
    """A place for one request's state: its position and the request that holds it (0: none)."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.position = state.step_position
        self.request_id = 0

    def step(self) -> None:
        """Advances the state and the position by one."""
        self.state.advance()
        self.position += 1

    def reset(self) -> None:
        """The state at its start, position 0, and no request."""
        self.state.reset()
        self.position = 0
        self.request_id = 0


class _LayoutState:
    """One slot of a pool made from a layout: rows of the pool's arrays."""

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
    """`capacity` slots, slot i with the state `make_state(i)`; the most recently released one is handed out first.

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
        self._arrays: list[dict[str, np.ndarray]] = []

    @classmethod
    def from_layout(cls, layout: StateLayout, capacity: int) -> SsmStatePool:
        """A pool of the states that `layout` describes, each array `(capacity, *shape)`."""
        arrays = [
            {name: np.zeros((capacity, *shape), dtype=dtype) for name, (shape, dtype) in layer.items()}
            for layer in layout.layers
        ]
        pool = cls(capacity, lambda i: _LayoutState(arrays, i))
        pool._arrays = arrays
        return pool

    @property
    def free_count(self) -> int:
        """Slots that can be allocated."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Slots in use."""
        return len(self._in_use)

    def alloc(self, request_id: int) -> int:
        """Gives the request a slot. Raises `PoolExhausted` when none is free."""
        if not self._free:
            raise PoolExhausted(f"asked for 1 slot, 0 of {self.capacity} are free")
        i = self._free.pop()
        self._in_use.add(i)
        self._slots[i].request_id = request_id
        return i

    def release(self, i: int) -> None:
        """Zeroes slot `i` and gives it back. Raises `InvalidSlot` when it is out of range or free."""
        self.slot(self._used(i)).reset()
        self._in_use.remove(i)
        self._free.append(i)

    def slot(self, i: int) -> SequenceSlot:
        """Slot `i`, also when it is free. Raises `InvalidSlot` when it is out of range."""
        if not 0 <= i < self.capacity:
            raise InvalidSlot(f"slot {i} is out of range: there are {self.capacity} slots")
        return self._slots[i]

    def copy(self, dst: int, src: int) -> None:
        """Copies state and position from slot `src` to `dst`. Raises `InvalidSlot` unless both are in use."""
        self._used(dst), self._used(src)
        self._slots[dst].state.copy_from(self._slots[src].state)
        self._slots[dst].position = self._slots[src].position

    def view(self, layer: int, name: str) -> np.ndarray:
        """State `name` of `layer` for all slots, `(capacity, *shape)`. `ValueError` for an unknown state."""
        if not 0 <= layer < len(self._arrays) or name not in self._arrays[layer]:
            raise ValueError(f"layer {layer} has no state {name!r}")
        return self._arrays[layer][name]

    def _used(self, i: int) -> int:
        self.slot(i)
        if i not in self._in_use:
            raise InvalidSlot(f"slot {i} is not allocated")
        return i

    def check(self) -> None:
        """Raises `PoolError` when the invariant above is broken."""
        if sorted(self._free + list(self._in_use)) != list(range(self.capacity)):
            raise PoolError(f"{len(self._free)} free + {len(self._in_use)} in use are not {self.capacity} slots")
        for i in self._free:
            if self._slots[i].request_id:
                raise PoolError(f"slot {i} is free but belongs to request {self._slots[i].request_id}")
