"""StateMemory: the recurrent states of all sequences in one buffer, and one sequence's row of them."""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

from pagepool.memory.page_buffer cimport PageBuffer

import sys
from importlib import import_module
from math import prod

import numpy as np

__all__ = ["StateMemory", "StateRow"]

cdef int64_t ALIGNMENT = 64


cdef object state_dtype(object dtype):
    """NumPy's dtype of a state that `StateLayout` has checked; bfloat16 is ml_dtypes' where installed, else uint16."""
    if dtype == "bfloat16":
        try:
            return np.dtype(import_module("ml_dtypes").bfloat16)
        except ModuleNotFoundError:
            return np.dtype(np.uint16)
    return np.dtype(dtype)


@cython.final
cdef class StateMemory:
    """Zeros for `capacity` rows of the states of a `StateLayout`; each state of a layer is one contiguous array."""

    def __cinit__(self, layout, int32_t capacity):
        cdef int64_t start = 0
        wanted = []
        for layer, states in enumerate(layout.layers):
            for name, (shape, dtype) in states.items():
                found = state_dtype(dtype)
                row = prod(shape) * found.itemsize
                if start + row * capacity >= 1 << 62:
                    raise MemoryError(f"the system has no room for {capacity} times {row} bytes")
                wanted.append((layer, name, shape, found, start, row))
                start += -(-row * capacity // ALIGNMENT) * ALIGNMENT
        self.capacity = capacity
        self.buffer = PageBuffer(start, "B", True)
        self.starts = np.fromiter((begin for *_, begin, _ in wanted), np.int64)
        self.row_bytes = np.fromiter((row for *_, row in wanted), np.int64)
        self.views = [None] * len(layout.layers)
        for layer in range(len(layout.layers)):
            self.views[layer] = {}
        everything = np.frombuffer(self.buffer, np.uint8) if start else np.empty(0, np.uint8)
        for layer, name, shape, found, begin, row in wanted:
            flat = everything[begin : begin + row * capacity]
            self.views[layer][name] = flat.view(found).reshape(capacity, *shape)

    cdef void c_zero(self, int32_t row) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(self.starts.shape[0]):
            memset(self.buffer.base + self.starts[i] + row * self.row_bytes[i], 0, <size_t>self.row_bytes[i])

    cdef void c_copy(self, int32_t dst, int32_t src) noexcept nogil:
        cdef unsigned char *state
        cdef Py_ssize_t i
        if dst == src:
            return
        for i in range(self.starts.shape[0]):
            state = self.buffer.base + self.starts[i]
            memcpy(state + dst * self.row_bytes[i], state + src * self.row_bytes[i], <size_t>self.row_bytes[i])

    cdef int64_t c_row_bytes(self) noexcept nogil:
        cdef int64_t total = 0
        cdef Py_ssize_t i
        for i in range(self.row_bytes.shape[0]):
            total += self.row_bytes[i]
        return total

    def copy(self, int32_t dst, int32_t src):
        """Copies every state of row src to row dst. Raises `IndexError` when one is out of range."""
        if not (0 <= dst < self.capacity and 0 <= src < self.capacity):
            raise IndexError(f"rows {dst} and {src} of {self.capacity}")
        self.c_copy(dst, src)

    def zero(self, int32_t row):
        """Zeros every state of a row. Raises `IndexError` when it is out of range."""
        if not 0 <= row < self.capacity:
            raise IndexError(f"row {row} of {self.capacity}")
        self.c_zero(row)

    def view(self, layer, name):
        """A view (capacity, *shape) of one state of a layer. Raises `ValueError` for a layer or name that is none."""
        if not 0 <= layer < len(self.views):
            raise ValueError(f"layer must be from 0 to {len(self.views) - 1}, not {layer}")
        states = self.views[layer]
        if name not in states:
            raise ValueError(f"layer {layer} has no state {name!r}; it has {', '.join(states) or 'none'}")
        return states[name][:]


class StateRow:
    """One sequence's states in a `StateMemory`, as a `SequenceState`: any number of steps may be taken.

    >>> from pagepool import StateLayout
    >>> row = StateRow(StateMemory(StateLayout(layers=[{"conv": ((4,), "float32")}]), 2), 1)
    >>> row.view(0, "conv")
    array([0., 0., 0., 0.], dtype=float32)
    """

    __slots__ = ("_memory", "_row", "step_position")

    def __init__(self, memory, row):
        self._memory = memory
        self._row = row
        self.step_position = 0

    @property
    def capacity(self):
        """Steps that can be taken: a recurrent state has no last one."""
        return sys.maxsize

    def advance(self):
        """Counts one step."""
        self.step_position += 1

    def reset(self):
        """Returns to position 0 and zeros every state."""
        self._memory.zero(self._row)
        self.step_position = 0

    def copy_from(self, other):
        """Becomes what `other`, a row of the same memory, is: its states and its position."""
        self._memory.copy(self._row, other._row)
        self.step_position = other.step_position

    def view(self, layer, name):
        """A view (*shape) of this sequence's state `name` of a layer."""
        return self._memory.view(layer, name)[self._row]
