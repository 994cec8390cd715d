"""SsmStatePool: recurrent states of a fixed size, one slot for each sequence, zeroed when it is released."""

cimport cython
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_Check
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy, memset, strcmp

from pagepool.csrc cimport (
    PP_EXHAUSTED,
    PP_INVALID_ARGUMENT,
    PP_INVALID_SLOT,
    PP_OK,
    pp_lock_acquire,
    pp_lock_release,
    pp_status,
)
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport (
    Buffer,
    IdArray,
    dtype_of,
    get_buffer,
    has_format,
    read_ids,
    release_buffer,
    release_ids,
)
from pagepool.memory.page_buffer cimport PageBuffer

import sys
from math import prod

import numpy as np

from pagepool.config import StateLayout
from pagepool.errors import InvalidBlock, InvalidSlot, PoolExhausted, refuse_copy
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


cdef bint same_format(const Buffer *own, const Buffer *given) noexcept:
    """Whether an array has the dtype of a state; bfloat16 also comes as its bits, and int64 has two letters."""
    cdef const char *letter = own.view.format
    if has_format(letter, b"EH"):
        return has_format(given.view.format, b"EH")
    if own.view.itemsize == 8 and has_format(letter, b"lq"):
        return has_format(given.view.format, b"lq") and given.view.itemsize == 8
    return letter[0] and given.view.itemsize == own.view.itemsize and strcmp(letter, given.view.format) == 0


cdef int check_states(str name, object source, const Buffer *given, object states, const Buffer *own,
                      Py_ssize_t n) except -1:
    """Checks that an array can hold the states of n slots and does not overlap the memory of the pool."""
    cdef Py_ssize_t axis, step = given.view.itemsize
    cdef bint fits
    cdef size_t begin = <size_t>given.view.buf, own_begin = <size_t>own.view.buf
    if not same_format(own, given):
        raise TypeError(f"{name} must have the dtype of the state, {states.dtype}, not {dtype_of(source)}")
    fits = given.view.ndim == own.view.ndim and given.view.shape[0] == n
    for axis in range(1, own.view.ndim):
        fits = fits and given.view.shape[axis] == own.view.shape[axis]
    if not fits:
        shape, got = (n, *states.shape[1:]), tuple([given.view.shape[axis] for axis in range(given.view.ndim)])
        raise ValueError(f"{name} must have the shape {shape} (slots, then a state), not {got}")
    for axis in range(given.view.ndim - 1, -1, -1):
        if given.view.shape[axis] > 1 and given.view.strides[axis] != step:
            raise ValueError(
                f"{name} must be C-contiguous: axis {axis} steps {given.view.strides[axis]} bytes, not {step}"
            )
        step *= given.view.shape[axis]
    if step and begin < own_begin + <size_t>own.view.len and own_begin < begin + <size_t>step:
        raise ValueError(f"{name} overlaps the states of the pool")
    return 0


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

    cdef pp_status c_alloc(self, int32_t *slot) noexcept nogil:
        return self.ids.c_allocate(slot)

    cdef pp_status c_release(self, int32_t slot) noexcept nogil:
        if self.memory is None:
            return PP_INVALID_ARGUMENT
        if self.ids.c_ref_count(slot) < 1:
            return PP_INVALID_SLOT
        self.memory.c_zero(slot)
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
        """Slot i, which is in range. Needs no memory for a slot that was in use before."""
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
        """Needs no memory if `i` is a slot."""
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

    def alloc(self, request_id):
        """Takes a slot for a request (any integer but 0, which means none); returns its number.

        The state is at its beginning. Raises `PoolExhausted` when no slot is free.
        """
        cdef int32_t slot
        cdef object number
        request = integer("request_id", request_id)
        if self.c_alloc(&slot) != PP_OK:
            raise PoolExhausted(f"asked for 1 slot, 0 of {self.ids.capacity} are free")
        try:
            number = slot
            self.slot_at(slot).request_id = request
        except BaseException:  # no memory for the number or the slot
            self.ids.c_free(slot)
            raise
        return number

    def release(self, i):
        """Frees slot i and resets its state: zeros, position 0, no request.

        Raises `InvalidSlot` when i is out of range or already free. If the state's `reset` raises, the slot stays in
        use.
        """
        cdef int32_t slot = self.read_used(i)
        self.slot_at(slot).reset()
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

    def alloc_run(self, request_ids):
        """Takes neighbouring slots, one for each request; returns them as a range. All or nothing.

        The states of the requests are then one part of `view`, which a layer can compute as a batch in place. Raises
        `PoolExhausted` when there are not enough neighbouring free slots.

        >>> from pagepool import StateLayout
        >>> pool = SsmStatePool.from_layout(StateLayout(layers=[{"h": ((2,), "float32")}]), 4)
        >>> run = pool.alloc_run([7, 8, 9])
        >>> run, pool.view(0, "h")[run.start:run.stop].shape
        (range(0, 3), (3, 2))
        """
        cdef list requests = list(request_ids)
        cdef int32_t first = 0, longest = 0, i
        cdef int32_t n = <int32_t>min(len(requests), INT32_MAX)
        for i in range(n):  # no comprehension, see list_ids
            requests[i] = integer("request_id", requests[i])
        slots = [None] * n
        if self.c_alloc_run(n, &first, &longest) != PP_OK:
            raise PoolExhausted(f"asked for {n} slots side by side, {longest} of the {self.free_count} free ones are")
        try:
            for i in range(n):
                slots[i] = self.slot_at(first + i)
            run = range(first, first + n)
        except BaseException:  # no memory for a slot
            for i in range(n):
                self.ids.c_free(first + i)
            raise
        for i in range(n):
            slots[i].request_id = requests[i]
        return run

    cdef pp_status c_alloc_run(self, int32_t n, int32_t *first, int32_t *longest) noexcept nogil:
        cdef int32_t length
        first[0] = longest[0] = 0
        pp_lock_acquire(&self.ids.lock)
        length = self.ids.c_free_run(first, self.ids.limit, max(n, 1))
        while 0 < length < n:
            longest[0] = max(longest[0], length)
            first[0] += length
            length = self.ids.c_free_run(first, self.ids.limit, n)
        if length >= n:
            self.ids.c_take_run(first[0], n)
        pp_lock_release(&self.ids.lock)
        return PP_OK if length >= n else PP_EXHAUSTED

    def gather(self, layer, name, slots, out=None):
        """Copies the states `name` of a layer out of some slots, in their order, for a batch of sequences.

        layer, name   as for `view`
        slots         slots that are in use: a sequence of ints, or an int32 or int64 array, one dimension
        out           an array to write to, C-contiguous (n, *shape) of the state's dtype, by the buffer protocol or
                      DLPack, for example a tensor of torch; it must not overlap the pool

        Returns `out`, by default a new array. Raises `InvalidSlot` for a slot out of range or free, `TypeError` for a
        dtype, `ValueError` for a shape or stride; then nothing was written. Releases the GIL while it copies.

        >>> from pagepool import StateLayout
        >>> pool = SsmStatePool.from_layout(StateLayout(layers=[{"h": ((2,), "float32")}]), 4)
        >>> for request in (7, 8, 9):
        ...     pool.view(0, "h")[pool.alloc(request)] = request
        >>> states = pool.gather(0, "h", [2, 0])
        >>> states.tolist()
        [[9.0, 9.0], [7.0, 7.0]]
        >>> pool.scatter(0, "h", [2, 0], states + 1)
        >>> pool.view(0, "h")[:3, 0].tolist()
        [8.0, 8.0, 10.0]
        """
        return self.copy_rows(layer, name, slots, "out", out, False)

    def scatter(self, layer, name, slots, states):
        """Copies a batch of states `name` of a layer into their slots: what `gather` undoes.

        states   (n, *shape), C-contiguous, of the state's dtype, by the buffer protocol or DLPack

        All else is as for `gather`. A slot that comes twice keeps the later state.
        """
        self.copy_rows(layer, name, slots, "states", states, True)

    cdef object copy_rows(self, object layer, object name, object slots, str what, object source, bint scatters):
        cdef IdArray rows
        cdef Buffer own, given
        cdef Py_ssize_t i, size
        cdef char *inside
        cdef char *outside
        states = self.view(layer, name)
        try:
            read_ids(slots, &rows)
        except InvalidBlock as error:  # beyond 32 bits
            raise InvalidSlot(f"a slot is out of range: the pool has {self.ids.capacity} slots") from error
        try:
            for i in range(rows.count):
                self.read_used(rows.ids[i])
            if source is None and not scatters:
                source = np.empty((rows.count, *states.shape[1:]), states.dtype).view(type(states))
            get_buffer(states, &own)
            try:
                if not get_buffer(source, &given, what):
                    raise TypeError(f"{what} must be an array of {states.dtype}, not {type(source).__name__}")
                try:
                    check_states(what, source, &given, states, &own, rows.count)
                    if not scatters and given.view.readonly:
                        raise ValueError("out is read-only: it is where the states are written")
                    size = given.view.len // max(rows.count, 1)
                    inside, outside = <char *>own.view.buf, <char *>given.view.buf
                    with nogil:
                        for i in range(rows.count):
                            if scatters:
                                memcpy(inside + rows.ids[i] * size, outside + i * size, <size_t>size)
                            else:
                                memcpy(outside + i * size, inside + rows.ids[i] * size, <size_t>size)
                finally:
                    release_buffer(&given)
            finally:
                release_buffer(&own)
        finally:
            release_ids(&rows)
        return source

    def leaks(self):
        """The slots that are in use, as `BlockAllocator.leaks`: `("state", request_id, [i], [i], slot)`, in order.

        Slots that were taken without the GIL have request id 0. Ask when an engine is idle, or at its end.
        """
        cdef int32_t i
        found = []
        for i in range(self.ids.taken):  # no others were ever used
            if self.ids.c_ref_count(i) > 0:
                slot = self.slot_at(i)
                found.append(Leak("state", slot.request_id, [i], [i], slot))
        return found

    def warn_of_leaks(self):
        """A `ResourceWarning` for each of `leaks`: see `BlockAllocator.warn_of_leaks`. Changes nothing."""
        warn_of(self.leaks(), "states are in use")

    def stats(self):
        """Returns a dict of slots and bytes.

        `peak` is the maximum number of slots in use so far, including slots that `alloc_run` has skipped. `bytes`
        counts the slots in use; it is 0 for states that are Python objects.
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
        """Returns a writable view (capacity, *shape) of the states `name` of a layer, one row per slot.

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
        """Audits the free list. Raises `PoolError` that names a broken equation."""
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
