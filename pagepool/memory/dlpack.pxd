from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from pagepool.memory.page_buffer cimport PageBuffer


cdef extern from "dlpack_abi.h" nogil:
    enum:
        PP_DL_CPU
        PP_DL_INT
        PP_DL_UINT
        PP_DL_FLOAT
        PP_DL_BFLOAT
        PP_DL_IS_READ_ONLY
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

    ctypedef struct pp_dl_exchange_api:
        uint32_t major
        int (*show)(void *object, pp_dl_tensor *tensor) except -1


# Returns a capsule with all elements of `buffer` in one dimension. The capsule holds an export of the buffer.
cdef object export_capsule(PageBuffer buffer, int type_code, bint versioned, uint64_t flags)
# Reads the tensor of an object that supports DLPack and is in CPU memory. It is valid while the returned object lives.
# Returns None for an object without DLPack. Stores DLPack's flags in `flags`.
cdef object import_tensor(object source, pp_dl_tensor *tensor, uint64_t *flags)
