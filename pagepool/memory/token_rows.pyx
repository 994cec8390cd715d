"""TokenRows: reads and checks the arguments of KvCachePool.append."""

cimport cython
from cpython.buffer cimport Py_buffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport (
    PP_BF16,
    PP_F16,
    PP_F32,
    PP_INT4,
    PP_INT8,
    pp_dtype,
    pp_kv_layout,
    pp_kv_pool,
    pp_kv_rows,
)
from pagepool.memory.arrays cimport (
    TENSOR_BITS16,
    Tensor,
    dtype_of,
    get_buffer,
    int_bytes,
    read_tensor,
    release_buffer,
    release_tensor,
)

__all__ = []

cdef dict NAMES = {
    PP_F32: "float32", PP_F16: "float16", PP_BF16: "bfloat16", PP_INT8: "int8", PP_INT4: "int4",
    TENSOR_BITS16: "uint16",
}


cdef int accepted_dtype(str name, const Tensor *tensor, int pool_dtype) except -1:
    cdef int kind = tensor.kind
    if kind == TENSOR_BITS16 and (pool_dtype == PP_BF16 or pool_dtype >= PP_INT8):
        kind = PP_BF16
    if kind == PP_F32 or kind == pool_dtype or pool_dtype >= PP_INT8 or (kind == PP_F16 and pool_dtype == PP_BF16):
        return kind
    own = "" if pool_dtype == PP_F32 else f" or {NAMES[pool_dtype]}"
    raise TypeError(f"{name} must be float32{own} for this pool, not {NAMES[tensor.kind]}")


cdef int check_apart(str name, const void *data, Py_ssize_t num_bytes, const pp_kv_pool *pool) except -1:
    cdef size_t base = <size_t>pool.base, end = base + <size_t>(pool.num_blocks * pool.layout.block_bytes)
    if num_bytes and <size_t>data < end and base < <size_t>data + <size_t>num_bytes:
        raise ValueError(f"{name} overlaps the pages of the pool, which this call writes")
    return 0


@cython.final
@cython.no_gc
@cython.freelist(4)
cdef class TokenRows:
    """The arguments of `KvCachePool.append`, read and checked. Holds the memory of all arrays while it lives."""

    def __dealloc__(self):
        if self.has_slots:
            release_buffer(&self.slots_buffer)
        release_tensor(&self.k)
        release_tensor(&self.v)
        PyMem_Free(self.wide_slots)

    cdef int read(self, object slot_mapping, object k, object v, const pp_kv_pool *pool) except -1:
        """Raises TypeError for a dtype, ValueError for a shape or stride, and for arrays that overlap the pages."""
        cdef const pp_kv_layout *layout = &pool.layout
        read_tensor("k", k, &self.k)
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
        read_tensor("v", v, &self.v)
        if accepted_dtype("v", &self.v, layout.v_dtype) != self.dtype:
            raise TypeError(f"k and v must have one dtype, not {NAMES[self.k.kind]} and {NAMES[self.v.kind]}")
        self.v_rows = self.rows_of("v", &self.v, layout.v_head_dim, pool)
        return 0

    cdef int read_slots(self, object slot_mapping) except -1:
        cdef const Py_buffer *view = &self.slots_buffer.view
        cdef Py_ssize_t i, item
        if not get_buffer(slot_mapping, &self.slots_buffer, "slot_mapping"):
            raise TypeError(f"slot_mapping must be an int64 array, not {type(slot_mapping).__name__}")
        self.has_slots = True
        item = int_bytes(view)
        if not item:
            raise TypeError(f"slot_mapping must be int64 or int32, not {dtype_of(slot_mapping)}")
        if <size_t>view.buf % <size_t>item:
            raise ValueError(f"slot_mapping must be aligned to {item} bytes")
        if view.ndim != 1:
            raise ValueError(f"slot_mapping must have 1 dimension, not {view.ndim}")
        if view.shape[0] > 1 and view.strides[0] != item:
            raise ValueError(f"slot_mapping must be contiguous: its stride is {view.strides[0]} bytes, not {item}")
        self.slots = <const int64_t *>view.buf
        self.num_tokens = view.shape[0]
        if item == sizeof(int64_t):
            return 0
        self.slots = self.wide_slots = <int64_t *>PyMem_Malloc(<size_t>(self.num_tokens + 1) * sizeof(int64_t))
        if self.wide_slots == NULL:
            raise MemoryError(f"no memory for {self.num_tokens} slots as int64")
        for i in range(self.num_tokens):
            self.wide_slots[i] = (<const int32_t *>view.buf)[i]
        return 0

    cdef pp_kv_rows rows_of(self, str name, Tensor *tensor, int32_t head_dim, const pp_kv_pool *pool) except *:
        """The rows of a tensor (n_tokens, num_kv_heads, head_dim). Its last axis must be contiguous."""
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
            raise ValueError(
                f"the last axis of {name} must be contiguous: its stride is {tensor.strides[2]} bytes, "
                f"not {tensor.item_bytes}"
            )
        # The stride of an axis of length 0 or 1 is never used. It is replaced by the stride of packed rows.
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
