"""DLPack: shows a buffer to other libraries, and reads their tensors."""

from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from pagepool.memory.page_buffer cimport PageBuffer

__all__ = []


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
    """A consumer renames the capsule and calls the deleter itself; one with its first name was never consumed."""
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


cdef object import_capsule(object source, pp_dl_tensor **tensor):
    """Raises TypeError when `source` gives no capsule, ValueError when its memory is not this CPU's."""
    try:
        capsule = source.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0 does not know the keyword
        capsule = source.__dlpack__()
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        tensor[0] = &(<pp_dl_managed_versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")).tensor
    elif PyCapsule_IsValid(capsule, "dltensor"):
        tensor[0] = &(<pp_dl_managed *>PyCapsule_GetPointer(capsule, "dltensor")).tensor
    else:
        raise TypeError(f"__dlpack__ of {type(source).__name__} returned no DLPack capsule")
    if tensor[0].device_type != PP_DL_CPU:
        raise ValueError(f"a tensor must be in CPU memory (DLPack device 1), not on device {tensor[0].device_type}")
    return capsule
