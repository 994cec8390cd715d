"""SsmStatePool: recurrent states of a fixed size, one slot for each sequence, zeroed when it is released."""

cimport cython
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_Check
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy, memset

from pagepool.csrc cimport (
    PP_INVALID_ARGUMENT,
    PP_INVALID_SLOT,
    PP_OK,
    pp_status,
)
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.page_buffer cimport PageBuffer

import sys
from math import prod

import numpy as np

from pagepool.config import StateLayout
from pagepool.errors import InvalidSlot, PoolExhausted, refuse_copy
from pagepool._arguments import integer
from pagepool.memory.dlpack import BFloat16Bits
from pagepool.memory.owners import Leak, warn_of
from pagepool.memory.state import SequenceSlot

__all__ = ["SsmStatePool", "StateMemory", "StateRow"]

# SequenceSlot objects per list. A list is made when one of its slots is first used.
cdef int32_t SLOTS = 1024
cdef int64_t ALIGNMENT = 64


cdef object state_dtype(object dtype):
    """The NumPy dtype of a state that `StateLayout` has checked; uint16 for bfloat16."""
    return np.dtype(np.uint16 if isinstance(dtype, str) and dtype == "bfloat16" else dtype)


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
                kind = BFloat16Bits if isinstance(dtype, str) and dtype == "bfloat16" else np.ndarray
                wanted.append((layer, name, shape, found, kind, start, row))
                start += -(-row * capacity // ALIGNMENT) * ALIGNMENT
        self.capacity = capacity
        self.buffer = PageBuffer(start, "B", True)
        self.starts = np.fromiter((begin for *_, begin, _ in wanted), np.int64)
        self.row_bytes = np.fromiter((row for *_, row in wanted), np.int64)
        self.views = [None] * len(layout.layers)
        for layer in range(len(layout.layers)):
            self.views[layer] = {}
        everything = np.frombuffer(self.buffer, np.uint8) if start else np.empty(0, np.uint8)
        for layer, name, shape, found, kind, begin, row in wanted:
            flat = everything[begin : begin + row * capacity]
            self.views[layer][name] = flat.view(found).reshape(capacity, *shape).view(kind)

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
        """A view (capacity, *shape) of one state of a layer. Raises `ValueError` for an unknown layer or name."""
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
        """Number of steps that can be taken: unlimited for a recurrent state."""
        return sys.maxsize

    def advance(self):
        """Counts one step."""
        self.step_position += 1

    def reset(self):
        """Returns to position 0 and zeros every state."""
        self._memory.zero(self._row)
        self.step_position = 0

    def copy_from(self, other):
        """Copies the states and the position of `other`, a row of the same memory."""
        self._memory.copy(self._row, other._row)
        self.step_position = other.step_position

    def view(self, layer, name):
        """A view (*shape) of this sequence's state `name` of a layer."""
        return self._memory.view(layer, name)[self._row]


cdef object read_capacity(object capacity):
    return integer("capacity", capacity, 0, INT32_MAX)


cdef object slot_made_by(object make_state, object i):
    state = make_state(i)
    if not hasattr(state, "step_position"):
        raise TypeError(f"make_state({i}) must return a SequenceState, not {type(state).__name__}")
    return SequenceSlot(state)


@cython.final
cdef class SsmStatePool:
    """SsmStatePool(capacity, make_state)\n--\n
    A pool of `capacity` recurrent states, each made by `make_state(i)`, or by a layout: see `from_layout`.

    A fresh pool allocates 0, 1, 2, ...; later the most recently released slot first. The pool is thread-safe, a slot
    is not. Raises `ValueError` for a capacity out of range, `TypeError` when
    `make_state` is not callable.

    >>> from pagepool import Mamba2SequenceState
    >>> pool = SsmStatePool(2, lambda i: Mamba2SequenceState(n_layers=1, d_state=4, d_inner=8, max_context=16))
    >>> i = pool.alloc(request_id=7)
    >>> pool.slot(i).request_id, pool.free_count
    (7, 1)
    """

    def __cinit__(self, capacity, make_state):
        number = read_capacity(capacity)
        # a StateMemory comes from from_layout
        is_memory = isinstance(make_state, StateMemory) and make_state.capacity == number
        if not is_memory and not callable(make_state):
            raise TypeError(f"make_state must be callable, not {type(make_state).__name__}")
        self.ids = BlockAllocator(number)
        self.dirty = np.zeros(number, np.uint8)
        if is_memory:
            self.memory = make_state
            self.slots = [None] * -(-number // SLOTS)
        else:
            made = [slot_made_by(make_state, i) for i in range(number)]
            self.slots = [made[i : i + SLOTS] for i in range(0, number, SLOTS)]

    @staticmethod
    def from_layout(layout, capacity):
        """Makes a pool with all states in one aligned buffer, described by a `StateLayout`. See `view`.

        A slot takes memory when it is first used.

        >>> from pagepool import StateLayout
        >>> layout = StateLayout(layers=[{"conv_states": ((16, 4), "float32")}, {}])
        >>> SsmStatePool.from_layout(layout, 3).view(0, "conv_states").shape
        (3, 16, 4)
        """
        if not isinstance(layout, StateLayout):
            raise TypeError(f"layout must be a StateLayout, not {type(layout).__name__}")
        memory = StateMemory(layout, read_capacity(capacity))
        return SsmStatePool(memory.capacity, memory)

    cdef pp_status c_take(self, int32_t *slot, bint zero) noexcept nogil:
        cdef pp_status status = self.ids.c_allocate(slot)
        if status == PP_OK and zero and self.dirty[slot[0]]:
            self.memory.c_zero(slot[0])
            self.dirty[slot[0]] = False
        return status

    cdef pp_status c_alloc(self, int32_t *slot) noexcept nogil:
        return self.c_take(slot, True)

    cdef pp_status c_release(self, int32_t slot) noexcept nogil:
        if self.memory is None:
            return PP_INVALID_ARGUMENT
        if self.ids.c_ref_count(slot) < 1:
            return PP_INVALID_SLOT
        self.memory.c_zero(slot)
        self.dirty[slot] = False
        self.ids.c_free(slot)
        return PP_OK

    cdef pp_status c_copy(self, int32_t dst, int32_t src) noexcept nogil:
        if self.memory is None:
            return PP_INVALID_ARGUMENT
        if self.ids.c_ref_count(dst) < 1 or self.ids.c_ref_count(src) < 1:
            return PP_INVALID_SLOT
        self.memory.c_copy(dst, src)
        return PP_OK

    cdef object slot_at(self, int32_t i):
        """Returns slot i, which must be in range. Allocates nothing for a slot that was used before."""
        cdef list some = self.slots[i // SLOTS]
        cdef int32_t at = i % SLOTS
        if some is None or some[at] is None:
            with cython.critical_section(self):
                if self.slots[i // SLOTS] is None:
                    self.slots[i // SLOTS] = [None] * min(SLOTS, self.ids.c_capacity() - (i - at))
                some = self.slots[i // SLOTS]
                made = SequenceSlot(StateRow(self.memory, i))
                if some[at] is None:  # no other thread was faster
                    some[at] = made
        return some[at]

    cdef int32_t read_slot(self, object i) except -1:
        """Allocates nothing if slot `i` exists."""
        cdef int overflow = 0
        cdef long long number
        if not PyLong_Check(i):
            i = integer("a slot", i)
        number = PyLong_AsLongLongAndOverflow(i, &overflow)
        if overflow or not 0 <= number < self.ids.c_capacity():
            raise InvalidSlot(f"slot {i} is out of range: the pool has {self.ids.capacity} slots")
        return <int32_t>number

    cdef int32_t read_used(self, object i) except -1:
        cdef int32_t slot = self.read_slot(i)
        if self.ids.c_ref_count(slot) == 0:
            raise InvalidSlot(f"slot {slot} is free: {self.used_count} of {self.ids.capacity} slots are used")
        return slot

    def alloc(self, request_id, bint zero=True):
        """Takes a slot for a request (any integer but 0, which means none); returns its number.

        The state is at its beginning. With `zero=False` its memory may hold another state, for a caller that writes it
        before it reads it. Raises `PoolExhausted` when no slot is free.
        """
        cdef int32_t slot
        cdef object number
        request = integer("request_id", request_id)
        if self.c_take(&slot, zero) != PP_OK:
            raise PoolExhausted(f"asked for 1 slot, 0 of {self.ids.capacity} are free")
        try:
            number = slot
            self.slot_at(slot).request_id = request
        except BaseException:  # no memory for the number or the slot
            self.ids.c_free(slot)
            raise
        return number

    def release(self, i, bint zero=True):
        """Frees slot i and resets its state: zeros, position 0, no request.

        With `zero=False` the memory of a layout is zeroed by the next `alloc` instead, unless that has `zero=False`
        too. Raises `InvalidSlot` when i is out of range or already free. If the state's `reset` raises, the slot stays
        in use.
        """
        cdef int32_t slot = self.read_used(i)
        if zero or self.memory is None:
            self.slot_at(slot).reset()
        else:
            self.slot_at(slot).forget()
        self.dirty[slot] = not zero and self.memory is not None
        self.ids.c_free(slot)

    def copy(self, dst, src):
        """Copies the state and the position of slot src to slot dst; both keep their requests.

        States of a layout are copied in C, others by their `copy_from`. Raises `InvalidSlot` when a slot is out of
        range or free, `TypeError` for states that cannot be copied; then nothing has changed.

        >>> from pagepool import StateLayout
        >>> pool = SsmStatePool.from_layout(StateLayout(layers=[{"h": ((2,), "float32")}]), 2)
        >>> a, b = pool.alloc(7), pool.alloc(8)
        >>> pool.view(0, "h")[a] = 5
        >>> pool.copy(b, a)
        >>> pool.view(0, "h")[b]
        array([5., 5.], dtype=float32)
        """
        cdef int32_t target = self.read_used(dst), source = self.read_used(src)
        self.slot_at(target).copy_from(self.slot_at(source))

    def leaks(self):
        """The slots that are in use, as `BlockAllocator.leaks`: `("state", request_id, [i], [i], slot)`, in order.

        Slots that were taken without the GIL have request id 0. Ask when an engine is idle, or at its end.
        """
        cdef int32_t i
        found = []
        for i in range(self.ids.taken):  # slots after this one were never used
            if self.ids.c_ref_count(i) > 0:
                slot = self.slot_at(i)
                found.append(Leak("state", slot.request_id, [i], [i], slot))
        return found

    def warn_of_leaks(self):
        """A `ResourceWarning` for each of `leaks`: see `BlockAllocator.warn_of_leaks`. Changes nothing."""
        warn_of(self.leaks(), "states are in use")

    def stats(self):
        """Returns a dict of slots and bytes.

        `peak` is the maximum number of slots in use so far. `bytes` counts the slots in use; it is 0 for states that
        are Python objects.
        """
        per_state = 0 if self.memory is None else self.memory.c_row_bytes()
        used = self.used_count
        return {
            "capacity": self.ids.capacity,
            "used": used,
            "free": self.ids.capacity - used,
            "peak": self.ids.peak_in_use,
            "bytes": used * per_state,
            "capacity_bytes": self.ids.capacity * per_state,
        }

    def slot(self, i):
        """The `SequenceSlot` number i, free or not (request_id 0 when it is). Raises `InvalidSlot` out of range."""
        return self.slot_at(self.read_slot(i))

    def view(self, layer, name):
        """Returns a writable view `(capacity, *shape)` of the states `name` of a layer, one row per slot.

        It keeps the memory. bfloat16 comes as uint16, its bits; DLPack shows it as bfloat16 (`torch.from_dlpack`).
        Raises `ValueError` for a layer or name that the layout lacks, or without a layout.
        """
        if self.memory is None:
            raise ValueError("the pool has no layout: make it with SsmStatePool.from_layout")
        return self.memory.view(integer("layer", layer), name)

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        return f"<{type(self).__name__}: {self.used_count} of {self.ids.capacity} slots used>"

    def check(self):
        """Audits the free list. Raises `PoolError` with the name of a broken invariant."""
        self.ids.check()

    @property
    def capacity(self):
        """Slots of the pool."""
        return self.ids.capacity

    @property
    def free_count(self):
        """Slots that are free."""
        return self.ids.free_count

    @property
    def used_count(self):
        """Slots that are in use."""
        return self.ids.in_use
