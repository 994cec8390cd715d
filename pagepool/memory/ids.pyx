"""Block ids as callers give them: an int, a sequence of ints, an array. Contiguous int32 arrays are read in place."""

from cpython.buffer cimport Py_buffer, PyObject_CheckBuffer
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_Check, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.number cimport PyIndex_Check, PyNumber_Index
from cpython.sequence cimport PySequence_Fast, PySequence_Fast_GET_SIZE, PySequence_Fast_ITEMS
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t

from pagepool.memory.buffers cimport get_buffer, release_buffer

from pagepool.errors import InvalidBlock

__all__ = []

cdef Py_ssize_t ROOM = 64  # of IdArray.room
cdef long long MAX_COUNT = <long long>1 << 60


cdef int narrow(long long number, int overflow, object value, int32_t *block) except -1:
    if overflow or number > INT32_MAX or number < INT32_MIN:
        raise InvalidBlock(f"block {value} is out of range: ids have 32 bits, {INT32_MAX} is the largest")
    block[0] = <int32_t>number
    return 0


cdef object index_of(str name, object value):
    """What is no int, as one. TypeError, which names it, for no integer: an array has an __index__, which fails."""
    try:
        return PyNumber_Index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None


cdef int read_id(object value, int32_t *block) except -1:
    """One id. Raises TypeError for what is no integer, InvalidBlock for one that 32 bits do not hold."""
    cdef int overflow = 0
    if not PyLong_Check(value):
        value = index_of("a block id", value)
    return narrow(PyLong_AsLongLongAndOverflow(value, &overflow), overflow, value, block)


cdef int64_t read_count(object value) except? -1:
    """A number of tokens, see `read_number`."""
    return read_number("a number of tokens", value)


cdef list read_counts(object values):
    cdef list counts = values if type(values) is list else list(values)
    for value in counts:
        if not PyLong_CheckExact(value):
            return [read_count(number) for number in list(counts)]
    return counts


cdef int64_t read_number(str name, object value) except? -1:
    """A number; one beyond +-2^60 becomes that, so that sums fit in 64 bits. TypeError, which names it, for no integer.
    """
    cdef int overflow = 0
    cdef long long number
    if not PyLong_Check(value):
        value = index_of(name, value)
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow > 0 or number > MAX_COUNT:
        return MAX_COUNT
    return -MAX_COUNT if overflow < 0 or number < -MAX_COUNT else number


cdef int take_room(IdArray *array, Py_ssize_t count) except -1:
    array.count = count
    array.ids = array.room
    if count > ROOM:
        array.heap = <int32_t *>PyMem_Malloc(<size_t>count * sizeof(int32_t))
        if array.heap == NULL:
            raise MemoryError(f"no memory to read {count} block ids")
        array.ids = array.heap
    return 0


cdef bint has_format(const char *format, const char *codes) noexcept:
    """Whether a buffer's format is one of these codes in this machine's byte order."""
    if format[0] == b"@" or format[0] == b"=" or format[0] == b"<":
        format += 1
    while codes[0]:
        if format[0] == codes[0] and format[1] == 0:
            return True
        codes += 1
    return False


cdef int read_buffer(object blocks, IdArray *array) except -1:
    """Reads a 1-D int32 or int64 array; 0 when it is anything else, for the general way to read."""
    cdef const Py_buffer *view = &array.buffer.view
    cdef const char *cell
    cdef Py_ssize_t i
    get_buffer(blocks, &array.buffer)
    array.has_buffer = True
    if view.ndim > 1:
        raise ValueError(f"block ids must have 1 dimension, not {view.ndim}")
    if view.ndim == 0 or view.itemsize < 4 or not has_format(view.format, b"ilq"):
        return 0
    if (<size_t>view.buf | <size_t>view.strides[0]) % <size_t>view.itemsize:
        return 0
    if view.itemsize == 4 and view.strides[0] == 4:
        array.ids = <int32_t *>view.buf
        array.count = view.shape[0]
        return 1
    take_room(array, view.shape[0])
    cell = <const char *>view.buf
    for i in range(array.count):
        if view.itemsize == 4:
            array.ids[i] = (<const int32_t *>cell)[0]
        else:
            narrow((<const int64_t *>cell)[0], 0, (<const int64_t *>cell)[0], &array.ids[i])
        cell += view.strides[0]
    return 1


cdef int read_items(object blocks, IdArray *array) except -1:
    cdef Py_ssize_t i
    sequence = PySequence_Fast(blocks, "block ids must be an integer, a sequence of integers or an array of them")
    take_room(array, PySequence_Fast_GET_SIZE(sequence))
    for i in range(array.count):
        if PySequence_Fast_GET_SIZE(sequence) != array.count:  # an item's __index__ may do anything
            raise ValueError(f"the {array.count} block ids changed in number while they were read")
        read_id(<object>PySequence_Fast_ITEMS(sequence)[i], &array.ids[i])
    return 0


cdef int read_ids(object blocks, IdArray *array) except -1:
    """Reads ids into `array`, which stays valid until `release_ids`; on an exception there is nothing to release.

    Raises TypeError for what is no integer, ValueError for several dimensions, InvalidBlock for ids beyond 32 bits.
    """
    array.has_buffer = False
    array.heap = NULL
    try:
        if isinstance(blocks, (list, tuple)):
            read_items(blocks, array)
        elif PyLong_Check(blocks) or not PyObject_CheckBuffer(blocks):
            if PyIndex_Check(blocks):
                take_room(array, 1)
                read_id(blocks, array.ids)
            else:
                read_items(blocks, array)
        elif not read_buffer(blocks, array):
            if array.buffer.view.ndim == 0:
                take_room(array, 1)
                read_id(blocks, array.ids)
            else:
                read_items(blocks, array)
    except BaseException:
        release_ids(array)
        raise
    return 0


cdef list list_ids(const int32_t *ids, Py_ssize_t count):
    """Made at its full length: a comprehension of Cython 3.3 frees an item twice when its list cannot grow."""
    cdef Py_ssize_t i
    cdef list items = [None] * count
    for i in range(count):
        items[i] = ids[i]
    return items


cdef void release_ids(IdArray *array) noexcept:
    if array.has_buffer:
        release_buffer(&array.buffer)
        array.has_buffer = False
    PyMem_Free(array.heap)
    array.heap = NULL
