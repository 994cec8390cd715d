from libc.stdint cimport int32_t

from pagepool.csrc cimport pp_kv_pool, pp_lock, pp_status
from pagepool.memory.audit cimport Audit
from pagepool.memory.ids cimport IdArray


cdef extern from *:
    """
    typedef struct pp_regions pp_regions;
    """
    ctypedef struct pp_regions:
        pass


cdef class BlockAllocator:
    # With the lock held; `taken` ids were handed out at least once:
    #   in_use = taken - num_freed            free = capacity - in_use
    #   ref_counts[b] > 0                     for the in_use blocks
    #   ref_counts[b] == 0                    for those in freed[0:num_freed], each once, and for all b >= taken
    #   peak_in_use = taken                   since fresh ids are taken only when no freed one is left
    cdef pp_lock lock
    cdef readonly int32_t capacity
    cdef int32_t taken
    cdef int32_t num_freed
    cdef int32_t[::1] freed
    cdef int32_t[::1] ref_counts
    cdef pp_regions *regions
    cdef object __weakref__

    # PP_EXHAUSTED when none is free.
    cdef pp_status c_allocate(self, int32_t *block) noexcept nogil
    # All n or PP_EXHAUSTED; PP_INVALID_ARGUMENT for n < 0.
    cdef pp_status c_allocate_n(self, int32_t n, int32_t *blocks) noexcept nogil
    # PP_INVALID_BLOCK for one that is out of range or free.
    cdef pp_status c_free(self, int32_t block) noexcept nogil
    # All or PP_INVALID_BLOCK; `blocks` must not change meanwhile.
    cdef pp_status c_free_n(self, const int32_t *blocks, Py_ssize_t n) noexcept nogil
    # All, PP_INVALID_BLOCK, or PP_OVER_MAXIMUM when a count would pass 2^31 - 1.
    cdef pp_status c_share_n(self, const int32_t *blocks, Py_ssize_t n) noexcept nogil
    # 0 for a free block, -1 for one that is out of range.
    cdef int32_t c_ref_count(self, int32_t block) noexcept nogil
    cdef int32_t c_free_count(self) noexcept nogil
    # Whether a block that the caller holds a reference to has others; true at most too long.
    cdef bint c_is_shared(self, int32_t block) noexcept nogil
    # Copies the page of src onto that of dst in every attached pool; the caller holds references to both.
    cdef void c_copy_page(self, int32_t dst, int32_t src) noexcept nogil
    # `pool` stays where it is until it is detached. PP_NO_MEMORY, PP_INVALID_ARGUMENT: it has fewer pages than ids.
    cdef pp_status c_attach(self, const pp_kv_pool *pool) noexcept nogil
    cdef void c_detach(self, const pp_kv_pool *pool) noexcept nogil
    cdef Audit c_audit(self) noexcept nogil
    cdef object invalid(self, IdArray *array, verb)
