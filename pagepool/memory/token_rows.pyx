"""TokenRows: the slots, keys and values of an append, checked before anything is written."""

cimport cython
from cpython.buffer cimport Py_buffer, PyObject_CheckBuffer
from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport PP_BF16, PP_F16, PP_F32, pp_dtype, pp_kv_layout, pp_kv_pool, pp_kv_rows
from pagepool.memory.buffers cimport get_buffer, release_buffer
from pagepool.memory.ids cimport has_format
from pagepool.memory.tensor cimport TENSOR_BITS16, Tensor, read_tensor, release_tensor

import numpy as np

__all__ = []

cdef dict NAMES = {PP_F32: "float32", PP_F16: "float16", PP_BF16: "bfloat16", TENSOR_BITS16: "uint16"}


cdef int accepted_dtype(str name, const Tensor *tensor, int pool_dtype) except -1:
    if tensor.kind == PP_F32 or tensor.kind == pool_dtype:
        return tensor.kind
    if tensor.kind == TENSOR_BITS16 and pool_dtype == PP_BF16:
        return PP_BF16
    own = "" if pool_dtype == PP_F32 else f" or {NAMES[pool_dtype]}"
    raise TypeError(f"{name} must be float32{own} for this pool, not {NAMES[tensor.kind]}")


cdef int check_apart(str name, const void *data, Py_ssize_t num_bytes, const pp_kv_pool *pool) except -1:
    cdef size_t base = <size_t>pool.base, end = base + <size_t>(pool.num_blocks * pool.layout.block_bytes)
    if num_bytes and <size_t>data < end and base < <size_t>data + <size_t>num_bytes:
        raise ValueError(f"{name} lies in the pool's pages: it is read while they are written")
    return 0


@cython.final
@cython.no_gc
@cython.freelist(4)
cdef class TokenRows:
    """Internal: the checked arguments of `KvCachePool.append`."""

    def __dealloc__(self):
        if self.has_slots:
            release_buffer(&self.slots_buffer)
        release_tensor(&self.k)
        release_tensor(&self.v)

    cdef int read(self, object slot_mapping, object k, object v, const pp_kv_pool *pool) except -1:
        """TypeError for a dtype; ValueError for a shape or stride that append cannot take, or what it would write to.
        """
        cdef const pp_kv_layout *layout = &pool.layout
        self.k_owner = read_tensor("k", k, &self.k)
        self.dtype = <pp_dtype>accepted_dtype("k", &self.k, layout.dtype)
        self.read_slots(slot_mapping)
        check_apart("slot_mapping", self.slots, self.num_tokens * 8, pool)
        self.k_rows = self.rows_of("k", &self.k, layout.head_dim, pool)
        if layout.v_in_k:
            if v is not None:
                raise ValueError(f"v is the first {layout.v_head_dim} of the {layout.head_dim} dims of k in this pool")
            self.v_rows = self.k_rows
            return 0
        if v is None:
            raise ValueError("v is missing: this pool stores it apart from k")
        self.v_owner = read_tensor("v", v, &self.v)
        if accepted_dtype("v", &self.v, layout.dtype) != self.dtype:
            raise TypeError(f"k and v must have one dtype, not {NAMES[self.k.kind]} and {NAMES[self.v.kind]}")
        self.v_rows = self.rows_of("v", &self.v, layout.v_head_dim, pool)
        return 0

    cdef int read_slots(self, object slot_mapping) except -1:
        cdef const Py_buffer *view = &self.slots_buffer.view
        if not PyObject_CheckBuffer(slot_mapping):
            if not hasattr(slot_mapping, "__dlpack__"):
                raise TypeError(f"slot_mapping must be an int64 array, not {type(slot_mapping).__name__}")
            slot_mapping = np.from_dlpack(slot_mapping)
        get_buffer(slot_mapping, &self.slots_buffer)
        self.has_slots = True
        if view.itemsize == 8 and <size_t>view.buf % 8:
            raise ValueError("slot_mapping must be aligned to 8 bytes")
        if view.itemsize != 8 or not has_format(view.format, b"lq"):
            raise TypeError(f"slot_mapping must be int64, not {getattr(slot_mapping, 'dtype', view.format.decode())}")
        if view.ndim != 1:
            raise ValueError(f"slot_mapping must have 1 dimension, not {view.ndim}")
        if view.shape[0] > 1 and view.strides[0] != 8:
            raise ValueError(f"slot_mapping must be contiguous: its stride is {view.strides[0]} bytes, not 8")
        self.slots = <const int64_t *>view.buf
        self.num_tokens = view.shape[0]
        return 0

    cdef pp_kv_rows rows_of(self, str name, Tensor *tensor, int32_t head_dim, const pp_kv_pool *pool) except *:
        """The rows of a tensor (n_tokens, num_kv_heads, head_dim) whose last axis is contiguous."""
        cdef int32_t num_kv_heads = pool.layout.num_kv_heads
        cdef Py_ssize_t item = tensor.item_bytes
        cdef pp_kv_rows rows
        cdef Py_ssize_t last
        cdef int i
        if (
            tensor.ndim != 3 or tensor.shape[0] != self.num_tokens or tensor.shape[1] != num_kv_heads
            or tensor.shape[2] != head_dim
        ):
            shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
            wanted = (self.num_tokens, num_kv_heads, head_dim)
            raise ValueError(f"{name} must have shape {wanted} (slots, num_kv_heads, head_dim), not {shape}")
        if tensor.strides[2] != item:
            raise ValueError(f"the last axis of {name} must be contiguous: its stride is {tensor.strides[2]} bytes")
        # No step is ever taken along an axis of length 0 or 1: whatever stride it has becomes that of packed rows.
        if tensor.shape[1] <= 1:
            tensor.strides[1] = tensor.shape[2] * item
        if tensor.shape[0] <= 1:
            tensor.strides[0] = tensor.shape[1] * tensor.shape[2] * item
        for i in range(2):
            if tensor.strides[i] <= 0 or tensor.strides[i] % item:
                raise ValueError(
                    f"axis {i} of {name} must have a positive stride that is a multiple of {item} bytes, "
                    f"not {tensor.strides[i]}"
                )
        if <size_t>tensor.data % <size_t>item:
            raise ValueError(f"{name} must be aligned to {item} bytes")
        if self.num_tokens:
            last = (self.num_tokens - 1) * tensor.strides[0] + (num_kv_heads - 1) * tensor.strides[1]
            check_apart(name, tensor.data, last + head_dim * item, pool)
        rows.data = tensor.data
        rows.token_stride = tensor.strides[0] // item
        rows.head_stride = tensor.strides[1] // item
        return rows
