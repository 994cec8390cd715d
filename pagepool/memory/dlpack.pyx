"""DLPack: shows a buffer to other libraries, and reads their tensors."""

from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from pagepool.memory.page_buffer cimport PageBuffer

import numpy as np

__all__ = ["BFloat16Bits"]


cdef extern from "Python.h":
    int Py_IsInitialized() nogil


cdef struct Exported:
    pp_dl_managed_versioned versioned
    pp_dl_managed legacy
    int64_t shape[1]
    int64_t strides[1]
    void *buffer


cdef void drop_buffer(Exported *exported) noexcept with gil:
    cdef PageBuffer buffer = <PageBuffer>exported.buffer
    buffer.c_return()
    Py_DECREF(buffer)


cdef void drop(Exported *exported) noexcept nogil:
    """Runs on any thread. After the interpreter has ended, the buffer is left as it is."""
    if Py_IsInitialized():
        drop_buffer(exported)
        PyMem_RawFree(exported)


cdef void delete_legacy(pp_dl_managed *managed) noexcept nogil:
    drop(<Exported *>managed.context)


cdef void delete_versioned(pp_dl_managed_versioned *managed) noexcept nogil:
    drop(<Exported *>managed.context)


cdef void destroy_capsule(object capsule) noexcept:
    """A consumer renames the capsule and calls the deleter itself. A capsule with its original name was not
    consumed."""
    if PyCapsule_IsValid(capsule, "dltensor"):
        drop(<Exported *>(<pp_dl_managed *>PyCapsule_GetPointer(capsule, "dltensor")).context)
    elif PyCapsule_IsValid(capsule, "dltensor_versioned"):
        drop(<Exported *>(<pp_dl_managed_versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")).context)


cdef object export_capsule(PageBuffer buffer, int type_code, bint versioned, uint64_t flags):
    cdef Exported *exported = <Exported *>PyMem_RawMalloc(sizeof(Exported))
    cdef pp_dl_tensor *tensor
    if exported == NULL:
        raise MemoryError("no memory for a DLPack capsule")
    if not buffer.c_export():
        PyMem_RawFree(exported)
        raise BufferError("the memory is closed")
    memset(exported, 0, sizeof(Exported))
    exported.shape[0] = buffer.count()
    exported.strides[0] = 1
    exported.buffer = <void *>buffer
    exported.versioned.major = 1
    exported.versioned.flags = flags
    exported.versioned.context = exported.legacy.context = exported
    exported.versioned.deleter = delete_versioned
    exported.legacy.deleter = delete_legacy
    tensor = &exported.versioned.tensor if versioned else &exported.legacy.tensor
    tensor.data = buffer.base
    tensor.device_type = PP_DL_CPU
    tensor.ndim = 1
    tensor.type_code = type_code
    tensor.type_bits = 8 * buffer.item_bytes()
    tensor.type_lanes = 1
    tensor.shape = exported.shape
    tensor.strides = exported.strides
    try:
        if versioned:
            capsule = PyCapsule_New(&exported.versioned, "dltensor_versioned", destroy_capsule)
        else:
            capsule = PyCapsule_New(&exported.legacy, "dltensor", destroy_capsule)
    except BaseException:
        buffer.c_return()
        PyMem_RawFree(exported)
        raise
    Py_INCREF(buffer)
    return capsule


cdef pp_dl_tensor *tensor_in(object capsule, uint64_t *flags) except? NULL:
    """Returns the tensor of a capsule in either form, or NULL for another object. Stores its flags if `flags` is not
    NULL."""
    cdef pp_dl_managed_versioned *managed
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        managed = <pp_dl_managed_versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        if flags != NULL:
            flags[0] = managed.flags
        return &managed.tensor
    if PyCapsule_IsValid(capsule, "dltensor"):
        return &(<pp_dl_managed *>PyCapsule_GetPointer(capsule, "dltensor")).tensor
    return NULL


class BFloat16Bits(np.ndarray):
    """bfloat16 as an array of NumPy, which has no such dtype: uint16, its bits. DLPack shows them as bfloat16.

    `torch.from_dlpack(array)` is a tensor of bfloat16 in the same memory, `array.view(ml_dtypes.bfloat16)` an array.

    >>> from pagepool import KvCachePool
    >>> page = KvCachePool(page_size=2, initial_pages=1, dtype="bfloat16").page(0)
    >>> page[:] = 0x3f80  # 1.0
    >>> page.dtype.name, type(page).__name__
    ('uint16', 'BFloat16Bits')
    """

    def __dlpack__(self, **options):
        """Return NumPy's DLPack capsule with dtype bfloat16. Arguments and errors as for `numpy.ndarray`."""
        capsule = super().__dlpack__(**options)
        if self.dtype == np.uint16:  # an array computed from the bits can have another dtype
            tensor_in(capsule, NULL).type_code = PP_DL_BFLOAT
        return capsule


cdef object import_tensor(object source, pp_dl_tensor *tensor, uint64_t *flags):
    """Raise TypeError if __dlpack__ returns no capsule, ValueError for an object without CPU memory."""
    cdef pp_dl_tensor *shown
    cdef pp_dl_exchange_api *api = exchange_api_of(type(source))
    flags[0] = 0
    if api != NULL:  # takes 0.1 us instead of the 2 us of torch's __dlpack__
        try:
            api.show(<void *>source, tensor)
        except (BufferError, RuntimeError, ValueError) as error:  # torch appends a page of C++ stack frames
            reason = str(error).partition("\n")[0]
            raise ValueError(f"this {type(source).__name__} cannot be read: {reason}") from None
        owner = source
    elif not hasattr(source, "__dlpack__"):
        return None
    else:
        try:
            owner = source.__dlpack__(max_version=(1, 0))
        except TypeError:  # a producer from before DLPack 1.0 does not know the keyword
            owner = source.__dlpack__()
        shown = tensor_in(owner, flags)
        if shown == NULL:
            raise TypeError(f"__dlpack__ of {type(source).__name__} returned no DLPack capsule")
        tensor[0] = shown[0]
    if tensor.device_type != PP_DL_CPU:
        raise ValueError(f"a tensor must be in CPU memory (DLPack device 1), not on device {tensor.device_type}")
    return owner


cdef pp_dl_exchange_api *exchange_api_of(object kind) except? NULL:
    """The table of functions that a type of tensors has, or NULL. It lives as long as the process."""
    cdef pp_dl_exchange_api *api
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    api = <pp_dl_exchange_api *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    return api if api.major == 1 and api.show != NULL else NULL
