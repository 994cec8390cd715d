from libc.stdint cimport int32_t, int64_t


cdef struct Use:
    int64_t next  # where the block is used next, or beyond all uses
    int32_t block


cdef void push(Use *heap, int64_t size, Use use) noexcept nogil
cdef void pop(Use *heap, int64_t size) noexcept nogil
cdef int64_t run(
    const int32_t *ids, const int64_t *ends, int64_t num_prompts, int64_t *next_use, int64_t *cached, Use *heap,
    int64_t capacity, int64_t *evicted
) noexcept nogil
