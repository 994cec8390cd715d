from libc.stdint cimport int32_t, int64_t

from pagepool.memory.buffers cimport Buffer


cdef struct IdArray:
    int32_t *ids
    Py_ssize_t count
    Buffer buffer
    bint has_buffer
    int32_t *heap
    int32_t room[64]


# Whether a buffer's format is one of these codes in this machine's byte order.
cdef bint has_format(const char *format, const char *codes) noexcept
cdef int read_id(object value, int32_t *block) except -1
cdef int64_t read_count(object value) except? -1
# Numbers of tokens, each read before anything else is looked at: an __index__ may do anything.
cdef list read_counts(object values)
cdef int64_t read_number(str name, object value) except? -1
cdef int read_ids(object blocks, IdArray *array) except -1
# A new list of ids.
cdef list list_ids(const int32_t *ids, Py_ssize_t count)
cdef void release_ids(IdArray *array) noexcept
