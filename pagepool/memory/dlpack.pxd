from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from pagepool.memory.page_buffer cimport PageBuffer


cdef extern from "dlpack_abi.h" nogil:
    enum:
        PP_DL_CPU
        PP_DL_UINT
        PP_DL_FLOAT
        PP_DL_BFLOAT
        PP_DL_IS_COPIED

    ctypedef struct pp_dl_tensor:
        void *data
        int32_t device_type
        int32_t device_id
        int32_t ndim
        uint8_t type_code
        uint8_t type_bits
        uint16_t type_lanes
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset

    ctypedef struct pp_dl_managed:
        pp_dl_tensor tensor
        void *context
        void (*deleter)(pp_dl_managed *self) noexcept

    ctypedef struct pp_dl_managed_versioned:
        uint32_t major
        uint32_t minor
        void *context
        void (*deleter)(pp_dl_managed_versioned *self) noexcept
        uint64_t flags
        pp_dl_tensor tensor


# A capsule that shows all elements of `buffer` in one dimension, and holds it as an export.
cdef object export_capsule(PageBuffer buffer, int type_code, bint versioned, uint64_t flags)
# The tensor of an object with __dlpack__, on this CPU; valid while the returned capsule lives.
cdef object import_capsule(object source, pp_dl_tensor **tensor)
