"""The allocator as a table of C functions, in the capsule pagepool.memory.allocator._C_API."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport PP_ABI_VERSION, PP_INVALID_ARGUMENT, pp_status
from pagepool.memory.allocator cimport BlockAllocator

from pagepool.memory import allocator as allocator_module

__all__ = []


cdef extern from "pagepool/allocator_api.h":
    const char *PP_ALLOCATOR_API

    ctypedef struct pp_allocator:
        pass

    ctypedef struct pp_allocator_api:
        int32_t abi_version
        pp_allocator *(*from_object)(void *) noexcept
        pp_status (*allocate)(pp_allocator *, int32_t *) noexcept nogil
        pp_status (*allocate_n)(pp_allocator *, int32_t, int32_t *) noexcept nogil
        pp_status (*free_n)(pp_allocator *, const int32_t *, int64_t) noexcept nogil
        pp_status (*share_n)(pp_allocator *, const int32_t *, int64_t) noexcept nogil
        int32_t (*ref_count)(pp_allocator *, int32_t) noexcept nogil
        int32_t (*free_count)(pp_allocator *) noexcept nogil


cdef pp_allocator *from_object(void *candidate) noexcept:
    return <pp_allocator *>candidate if isinstance(<object>candidate, BlockAllocator) else NULL


cdef pp_status allocate(pp_allocator *allocator, int32_t *block) noexcept nogil:
    return (<BlockAllocator>allocator).c_allocate(block)


cdef pp_status allocate_n(pp_allocator *allocator, int32_t n, int32_t *blocks) noexcept nogil:
    return (<BlockAllocator>allocator).c_allocate_n(n, blocks)


cdef pp_status free_n(pp_allocator *allocator, const int32_t *blocks, int64_t n) noexcept nogil:
    return PP_INVALID_ARGUMENT if n < 0 else (<BlockAllocator>allocator).c_free_n(blocks, n)


cdef pp_status share_n(pp_allocator *allocator, const int32_t *blocks, int64_t n) noexcept nogil:
    return PP_INVALID_ARGUMENT if n < 0 else (<BlockAllocator>allocator).c_share_n(blocks, n)


cdef int32_t ref_count(pp_allocator *allocator, int32_t block) noexcept nogil:
    return (<BlockAllocator>allocator).c_ref_count(block)


cdef int32_t free_count(pp_allocator *allocator) noexcept nogil:
    return (<BlockAllocator>allocator).c_free_count()


cdef pp_allocator_api TABLE = pp_allocator_api(
    PP_ABI_VERSION, from_object, allocate, allocate_n, free_n, share_n, ref_count, free_count
)

# PyCapsule_Import finds the attribute by the name of the capsule.
allocator_module._C_API = PyCapsule_New(&TABLE, PP_ALLOCATOR_API, NULL)
