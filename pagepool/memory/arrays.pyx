"""Arrays as callers give them: ids, int32 tables and float tensors, read in place.

NumPy arrays of common dtypes are read without the buffer protocol, which builds shape and format at each call: 65 ns
for each of the four arrays of `decode`, of 720 ns for the whole call.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_STRIDES,
    Py_buffer,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_Check, PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.number cimport PyIndex_Check, PyNumber_Index
from cpython.ref cimport Py_INCREF, PyObject
from cpython.sequence cimport PySequence_Fast, PySequence_Fast_GET_SIZE, PySequence_Fast_ITEMS
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

cimport numpy as cnp

from pagepool.csrc cimport PP_BF16, PP_F16, PP_F32
from pagepool.memory.dlpack cimport (
    PP_DL_BFLOAT,
    PP_DL_FLOAT,
    PP_DL_INT,
    PP_DL_IS_COPIED,
    PP_DL_IS_READ_ONLY,
    PP_DL_UINT,
    import_tensor,
    pp_dl_tensor,
)

import numpy as np

from pagepool.errors import InvalidBlock

__all__ = []

cnp.import_array()

cdef int MOST_DIMS = 4  # of Buffer.shape and Tensor.shape
cdef const char *BFLOAT16 = b"E"  # as ml_dtypes has it: the buffer protocol has no letter for it
cdef const char *UNKNOWN = b""  # the format of dtypes that no call takes


cdef bint read_plain(cnp.ndarray array, Buffer *buffer) noexcept:
    """Fills in the buffer as NumPy does. False for another dtype or byte order, and for more than 4 dimensions."""
    cdef Py_buffer *view = &buffer.view
    cdef int kind = cnp.PyArray_TYPE(array), flags = cnp.PyArray_FLAGS(array), i
    cdef Py_ssize_t step
    if kind == cnp.NPY_FLOAT32:
        view.format, step = b"f", 4
    elif kind == cnp.NPY_INT32:
        view.format, step = b"i", 4
    elif kind == cnp.NPY_INT64:
        view.format, step = b"q", 8
    elif kind == cnp.NPY_FLOAT16:
        view.format, step = b"e", 2
    elif kind == cnp.NPY_UINT16:
        view.format, step = b"H", 2
    else:
        return False
    if not cnp.PyArray_ISNOTSWAPPED(array) or cnp.PyArray_NDIM(array) > MOST_DIMS:
        return False
    view.buf = cnp.PyArray_DATA(array)
    view.ndim = cnp.PyArray_NDIM(array)
    view.itemsize = step
    view.readonly = not flags & cnp.NPY_ARRAY_WRITEABLE or flags < 0  # the sign: writing warns
    view.shape = buffer.shape
    view.strides = buffer.strides
    view.suboffsets = NULL
    view.internal = NULL
    for i in range(view.ndim - 1, -1, -1):  # a contiguous array may have any stride along an axis of length 1
        buffer.shape[i] = cnp.PyArray_DIM(array, i)
        buffer.strides[i] = step if flags & cnp.NPY_ARRAY_C_CONTIGUOUS else cnp.PyArray_STRIDE(array, i)
        step *= buffer.shape[i]
    view.len = step
    Py_INCREF(array)
    buffer.array = <PyObject *>array
    return True


cdef object new_array(int ndim, cnp.npy_intp *shape, int kind, void **data):
    array = cnp.PyArray_SimpleNew(ndim, shape, kind)
    data[0] = cnp.PyArray_DATA(<cnp.ndarray>array)
    return array


cdef object new_int32(Py_ssize_t n, int32_t **data):
    cdef cnp.npy_intp shape = n
    return new_array(1, &shape, cnp.NPY_INT32, <void **>data)


cdef object new_int64(Py_ssize_t n, int64_t **data):
    cdef cnp.npy_intp shape = n
    return new_array(1, &shape, cnp.NPY_INT64, <void **>data)


cdef object new_float32(Py_ssize_t rows, Py_ssize_t heads, Py_ssize_t dims, float **data):
    cdef cnp.npy_intp[3] shape
    shape[:] = [rows, heads, dims]
    return new_array(3, shape, cnp.NPY_FLOAT32, <void **>data)


cdef int check_dims(str name, int ndim) except -1:
    if not 0 <= ndim <= MOST_DIMS:
        raise ValueError(f"{name} must have at most {MOST_DIMS} dimensions, not {ndim}")
    return 0


cdef int read_without_format(str name, object array, Buffer *buffer) except -1:
    """Fills in the buffer for a NumPy dtype that the buffer protocol lacks: bfloat16 of ml_dtypes, dates and others."""
    if array.dtype.name == "bfloat16":
        check_dims(name, array.ndim)
        read_plain(array.view(np.uint16), buffer)
        buffer.view.format = <char *>BFLOAT16
        return 0
    memset(&buffer.view, 0, sizeof(buffer.view))
    buffer.view.format = <char *>UNKNOWN
    Py_INCREF(array)
    buffer.array = <PyObject *>array
    return 0


cdef const char *format_of(const pp_dl_tensor *tensor) noexcept:
    cdef int code = tensor.type_code, bits = tensor.type_bits
    if tensor.type_lanes != 1:
        return UNKNOWN
    if bits == 32 and code == PP_DL_FLOAT:
        return b"f"
    if bits == 16 and code == PP_DL_FLOAT:
        return b"e"
    if bits == 16 and code == PP_DL_BFLOAT:
        return BFLOAT16
    if bits == 16 and code == PP_DL_UINT:
        return b"H"
    if bits == 32 and code == PP_DL_INT:
        return b"i"
    if bits == 64 and code == PP_DL_INT:
        return b"q"
    return UNKNOWN


cdef bint read_dlpack(str name, object source, Buffer *buffer) except -1:
    """Fills in the buffer from DLPack. Returns false if the object does not support DLPack."""
    cdef Py_buffer *view = &buffer.view
    cdef pp_dl_tensor tensor
    cdef uint64_t flags
    cdef Py_ssize_t step
    cdef int i
    owner = import_tensor(source, &tensor, &flags)
    if owner is None:
        return False
    # DLPack of torch drops the sign of a lazily negated view. Only floats can be such a view (the imaginary part of a
    # conjugate). The check takes 0.07 us.
    if tensor.type_code != PP_DL_INT:
        is_neg = getattr(source, "is_neg", None)
        if is_neg is not None and is_neg():
            raise ValueError(f"{name} has torch's lazy negative bit: pass {name}.resolve_neg()")
    check_dims(name, tensor.ndim)
    view.buf = <char *>tensor.data + tensor.byte_offset
    view.format = <char *>format_of(&tensor)
    view.ndim = tensor.ndim
    view.itemsize = step = (<Py_ssize_t>tensor.type_bits * tensor.type_lanes + 7) // 8
    view.readonly = flags & (PP_DL_IS_READ_ONLY | PP_DL_IS_COPIED) != 0  # writes to a copy would be lost
    view.shape = buffer.shape
    view.strides = buffer.strides
    view.suboffsets = NULL
    view.internal = NULL
    for i in range(tensor.ndim - 1, -1, -1):
        buffer.shape[i] = tensor.shape[i]
        buffer.strides[i] = step if tensor.strides == NULL else tensor.strides[i] * view.itemsize
        step *= tensor.shape[i]
    view.len = step
    if tensor.data == NULL and step:
        raise ValueError(f"{name}: this {type(source).__name__} has no memory to read")
    Py_INCREF(owner)
    buffer.array = <PyObject *>owner
    return True


cdef bint get_buffer(object source, Buffer *buffer, str name="an array") except -1:
    cdef Py_buffer *view = &buffer.view
    if cnp.PyArray_CheckExact(source) and read_plain(<cnp.ndarray>source, buffer):
        return True
    if not PyObject_CheckBuffer(source):
        return read_dlpack(name, source, buffer)
    buffer.array = NULL
    try:
        PyObject_GetBuffer(source, view, PyBUF_FORMAT | PyBUF_STRIDES)
    except (BufferError, ValueError):  # bfloat16, which the protocol lacks
        if cnp.PyArray_Check(source):
            read_without_format(name, source, buffer)
        elif not read_dlpack(name, source, buffer):
            raise
        return True
    # ctypes leaves out the strides even if they are asked for, and other exporters may leave out the format. A
    # memoryview fills in both.
    if view.format != NULL and (view.strides != NULL or view.ndim == 0):
        return True
    PyBuffer_Release(view)
    PyObject_GetBuffer(PyMemoryView_FromObject(source), view, PyBUF_FORMAT | PyBUF_STRIDES)
    return True


cdef object dtype_of(object source):
    """The name of the dtype of an array that was refused, for an error."""
    cdef pp_dl_tensor tensor
    cdef uint64_t flags
    dtype = getattr(source, "dtype", None)
    if dtype is not None:
        return dtype
    if PyObject_CheckBuffer(source):
        return memoryview(source).format
    owner = import_tensor(source, &tensor, &flags)
    name = f"DLPack {tensor.type_code}:{tensor.type_bits}"
    del owner
    return name


cdef Py_ssize_t ROOM = 64  # of IdArray.room
cdef long long MAX_COUNT = <long long>1 << 60


cdef int narrow(long long number, int overflow, object value, int32_t *block) except -1:
    if overflow or number > INT32_MAX or number < INT32_MIN:
        raise InvalidBlock(f"block {value} is out of range: ids have 32 bits, {INT32_MAX} is the largest")
    block[0] = <int32_t>number
    return 0


cdef object index_of(str name, object value):
    """Converts to an int. Raises TypeError with the argument's name, also for an array: its __index__ raises."""
    try:
        return PyNumber_Index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None


cdef int read_id(object value, int32_t *block) except -1:
    """Reads one id. Raises TypeError for another type, InvalidBlock for an id that does not fit in 32 bits."""
    cdef int overflow = 0
    if not PyLong_Check(value):
        value = index_of("a block id", value)
    return narrow(PyLong_AsLongLongAndOverflow(value, &overflow), overflow, value, block)


cdef int64_t read_count(object value) except? -1:
    """Reads a number of tokens in the same way as `read_number`."""
    return read_number("a number of tokens", value)


cdef list read_counts(object values):
    cdef list counts = values if HAS_GIL and type(values) is list else list(values)
    for value in counts:
        if not PyLong_CheckExact(value):
            return [read_count(number) for number in list(counts)]
    return counts


cdef int64_t read_number(str name, object value) except? -1:
    """Reads a number, limited to +-2^60 so that sums fit in 64 bits. Raises TypeError with the argument's name."""
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
    """Whether the format of a buffer is in `codes`, in native byte order."""
    if format[0] == b"@" or format[0] == b"=" or format[0] == b"<":
        format += 1
    while codes[0]:
        if format[0] == codes[0] and format[1] == 0:
            return True
        codes += 1
    return False


cdef int read_buffer(object blocks, IdArray *array) except -1:
    """Reads a 1-D int32 or int64 array. Returns 0 for anything else, which `read_ids` then reads item by item."""
    cdef const Py_buffer *view = &array.buffer.view
    cdef const char *cell
    cdef Py_ssize_t i
    if not get_buffer(blocks, &array.buffer, "an array of block ids"):
        return 0
    array.has_buffer = True
    if view.ndim > 1:
        raise ValueError(f"block ids must have 1 dimension, not {view.ndim}")
    if view.ndim == 0 or view.itemsize < 4 or not has_format(view.format, b"ilq"):
        return 0
    if (<size_t>view.buf | <size_t>view.strides[0]) % <size_t>view.itemsize:
        return 0
    if view.itemsize == 4 and view.strides[0] == 4:
        take_room(array, view.shape[0])  # a copy: NumPy may write to the array without the GIL
        memcpy(array.ids, view.buf, <size_t>array.count * sizeof(int32_t))
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
    with cython.critical_section(sequence):  # without a GIL another thread could free an item that is being read
        for i in range(array.count):
            if PySequence_Fast_GET_SIZE(sequence) != array.count:  # the __index__ of an item may run any code
                raise ValueError(f"the {array.count} block ids changed in number while they were read")
            read_id(<object>PySequence_Fast_ITEMS(sequence)[i], &array.ids[i])
    return 0


cdef int read_ids(object blocks, IdArray *array) except -1:
    """Reads ids into `array`, which stays valid until `release_ids`. After an exception there is nothing to release.

    Raises TypeError for anything but integers, ValueError for several dimensions, InvalidBlock for ids of more than 32
    bits.
    """
    array.has_buffer = False
    array.heap = NULL
    try:
        if isinstance(blocks, (list, tuple)):
            read_items(blocks, array)
        elif PyLong_Check(blocks) or not read_buffer(blocks, array):
            if array.buffer.view.ndim == 0 if array.has_buffer else PyIndex_Check(blocks):
                take_room(array, 1)
                read_id(blocks, array.ids)
            else:
                read_items(blocks, array)
    except BaseException:
        release_ids(array)
        raise
    return 0


cdef list list_ids(const int32_t *ids, Py_ssize_t count):
    """Makes the list at its full length: a comprehension of Cython 3.3 frees an item twice when it cannot grow."""
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


cdef Py_ssize_t int_bytes(const Py_buffer *view) noexcept:
    if (view.itemsize == 4 or view.itemsize == 8) and has_format(view.format, b"ilq"):
        return view.itemsize
    return 0


cdef int narrow_ints(str name, const Py_buffer *view, IntArray *array) except -1:
    """Copies int64 as int32. A table may hold any numbers after the end of a sequence. A number that does not fit
    becomes the largest or smallest int32, and neither is the id of a block.
    """
    cdef Py_ssize_t row, column, rows = array.rows, columns = array.columns
    cdef const int64_t *numbers
    cdef int64_t number
    array.copy = <int32_t *>PyMem_Malloc(<size_t>(rows * columns + 1) * sizeof(int32_t))
    if array.copy == NULL:
        raise MemoryError(f"no memory to convert {name} from int64 to int32: {rows * columns} elements")
    for row in range(rows):
        numbers = <const int64_t *>(<const char *>view.buf + row * view.strides[0])
        for column in range(columns):
            number = numbers[column]
            if view.ndim == 1 and not INT32_MIN <= number <= INT32_MAX:
                raise ValueError(f"{name}[{row}] must be from {INT32_MIN} to {INT32_MAX}, not {number}")
            array.copy[row * columns + column] = <int32_t>max(<int64_t>INT32_MIN, min(number, <int64_t>INT32_MAX))
    array.data = array.copy
    array.stride = columns
    return 0


cdef int read_ints(str name, object source, int ndim, IntArray *array) except -1:
    """Reads `source` into `array`. Raises TypeError for anything but int32 and int64, ValueError for other dimensions
    or strides, and in one dimension for a number of more than 32 bits.
    """
    cdef const Py_buffer *view = &array.buffer.view
    cdef Py_ssize_t item
    array.has_buffer = False
    if not get_buffer(source, &array.buffer, name):
        raise TypeError(f"{name} must be an int32 array, not {type(source).__name__}")
    array.has_buffer = True
    array.copy = NULL
    try:
        item = int_bytes(view)
        if not item:
            raise TypeError(f"{name} must be int32 or int64, not {dtype_of(source)}")
        if view.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimension{'s' if ndim > 1 else ''}, not {view.ndim}")
        array.data = <const int32_t *>view.buf
        array.rows = view.shape[0]
        array.columns = view.shape[1] if ndim == 2 else 1
        array.stride = view.strides[0] // <Py_ssize_t>sizeof(int32_t)
        if view.shape[ndim - 1] > 1 and view.strides[ndim - 1] != item:
            raise ValueError(
                f"the last axis of {name} must be contiguous: {item} bytes a step, not {view.strides[ndim - 1]}"
            )
        if view.strides[0] % item or <size_t>view.buf % <size_t>item:
            raise ValueError(f"{name} must be aligned to {item} bytes")
        if item != sizeof(int32_t):
            narrow_ints(name, view, array)
    except BaseException:
        release_ints(array)
        raise
    return 0


cdef void release_ints(IntArray *array) noexcept:
    if array.has_buffer:
        array.has_buffer = False
        PyMem_Free(array.copy)
        release_buffer(&array.buffer)


cdef int kind_of_format(const char *format) noexcept:
    if format[0] == b"@" or format[0] == b"=" or format[0] == b"<":
        format += 1
    if format[0] == 0 or format[1] != 0:
        return -1
    if format[0] == b"f":
        return PP_F32
    if format[0] == b"e":
        return PP_F16
    if format[0] == b"E":
        return PP_BF16
    return TENSOR_BITS16 if format[0] == b"H" else -1


cdef int read_tensor(str name, object source, Tensor *tensor) except -1:
    """Reads `source` into `tensor`, which stays valid until `release_tensor`.

    Raises TypeError for another dtype or an object that is not a tensor, ValueError for more than four dimensions or a
    tensor outside of CPU memory. After an exception there is nothing to release.
    """
    cdef const Py_buffer *view = &tensor.buffer.view
    cdef int i
    tensor.has_buffer = False
    if not get_buffer(source, &tensor.buffer, name):
        raise TypeError(f"{name} must have the buffer protocol or __dlpack__, {type(source).__name__} has neither")
    tensor.has_buffer = True
    try:
        tensor.kind = kind_of_format(view.format)
        if tensor.kind < 0:
            raise TypeError(
                f"{name} must be float32, float16 or bfloat16 (uint16 bits), not {dtype_of(source)}"
            )
        check_dims(name, view.ndim)
    except BaseException:
        release_tensor(tensor)
        raise
    tensor.data = <char *>view.buf
    tensor.ndim = view.ndim
    tensor.item_bytes = view.itemsize
    for i in range(view.ndim):
        tensor.shape[i] = view.shape[i]
        tensor.strides[i] = view.strides[i]
    return 0


cdef void release_tensor(Tensor *tensor) noexcept:
    if tensor.has_buffer:
        tensor.has_buffer = False
        release_buffer(&tensor.buffer)
