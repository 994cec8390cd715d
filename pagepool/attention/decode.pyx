"""Decode attention over pages: one query token per sequence.

Checks arguments, releases the GIL and hands the work to pagepool/csrc; the arithmetic and its order are written down in
`pagepool.reference.canonical`.
"""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.math cimport isfinite, sqrt
from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagepool.attention.int_array cimport IntArray, read_ints, release_ints
from pagepool.csrc cimport (
    PP_BF16,
    PP_F32,
    PP_MAX_THREADS,
    PP_NO_MEMORY,
    PP_OK,
    pp_decode,
    pp_decode_args,
    pp_default_num_threads,
    pp_dtype,
    pp_status,
    pp_widen,
)
from pagepool.memory.kv_pool cimport KvCachePool
from pagepool.memory.tensor cimport TENSOR_BITS16, Tensor, read_tensor, release_tensor

import operator

import numpy as np

from pagepool.errors import InvalidBlock

__all__ = ["decode"]

cdef object FLOAT32 = np.dtype(np.float32)
cdef object empty = np.empty


cdef pp_status c_decode(KvCachePool pool, int32_t layer, const float *q, int32_t num_seqs, int32_t num_qo_heads,
                        const int32_t *block_tables, int64_t block_tables_width, const int32_t *seq_lens,
                        float sm_scale, float *out, float *lse, int num_threads) noexcept nogil:
    cdef pp_decode_args args
    cdef int64_t head_dim = pool.c_pool.layout.head_dim
    args.pool = &pool.c_pool
    args.layer = layer
    args.num_seqs = num_seqs
    args.num_qo_heads = num_qo_heads
    args.q = q
    args.q_stride_seq = num_qo_heads * head_dim
    args.q_stride_head = head_dim
    args.block_tables = block_tables
    args.block_tables_stride = block_tables_width
    args.block_tables_width = block_tables_width
    args.seq_lens = seq_lens
    args.sm_scale = sm_scale
    args.num_threads = num_threads
    args.out = out
    args.lse = lse
    return pp_decode(&args, num_threads)


cdef bint is_float32(const Py_buffer *view) noexcept:
    cdef const char *format = view.format
    if format == NULL or view.itemsize != sizeof(float):
        return False
    if format[0] == b"@" or format[0] == b"=" or format[0] == b"<":
        format += 1
    return format[0] == b"f" and format[1] == 0


@cython.final
@cython.no_gc
@cython.freelist(4)
cdef class Arguments:
    """Internal: the arguments of a call, read and checked; what they point to is held until the object goes."""

    cdef pp_decode_args args
    cdef KvCachePool pool
    cdef Tensor q
    cdef object q_owner
    cdef IntArray tables
    cdef IntArray lengths
    cdef Py_buffer out
    cdef bint has_out
    cdef float *widened

    def __dealloc__(self):
        release_tensor(&self.q)
        release_ints(&self.tables)
        release_ints(&self.lengths)
        if self.has_out:
            PyBuffer_Release(&self.out)
        PyMem_Free(self.widened)

    cdef int read(self, object q, KvCachePool pool, object layer, object block_tables, object seq_lens) except -1:
        cdef int32_t kv_heads
        pool.check_open()
        if pool.layout is None:
            raise ValueError("decode needs a pool with a layout: KvCachePool.from_layout makes one")
        self.pool = pool
        self.args.pool = &pool.c_pool
        self.args.layer = pool.read_layer(layer)
        self.q_owner = read_tensor("q", q, &self.q)
        read_ints("block_tables", block_tables, 2, &self.tables)
        read_ints("seq_lens", seq_lens, 1, &self.lengths)
        if self.q.ndim != 3:
            raise ValueError(f"q must be (n_seqs, num_qo_heads, head_dim), not of {self.q.ndim} dimensions")
        if self.q.shape[2] != pool.c_pool.layout.head_dim:
            raise ValueError(f"q has head_dim {self.q.shape[2]}, the pool {pool.c_pool.layout.head_dim}")
        kv_heads = pool.c_pool.layout.num_kv_heads
        if self.q.shape[1] < 1 or self.q.shape[1] % kv_heads:
            raise ValueError(f"q has {self.q.shape[1]} heads, which is no multiple of the pool's {kv_heads}")
        if self.q.shape[0] != self.tables.rows or self.q.shape[0] != self.lengths.rows:
            raise ValueError(
                f"q has {self.q.shape[0]} sequences, block_tables {self.tables.rows}, seq_lens {self.lengths.rows}"
            )
        if self.q.shape[0] > INT32_MAX or self.q.shape[1] > INT32_MAX:
            raise ValueError(f"q has {max(self.q.shape[0], self.q.shape[1])} rows, the most is {INT32_MAX}")
        self.args.num_seqs = <int32_t>self.q.shape[0]
        self.args.num_qo_heads = <int32_t>self.q.shape[1]
        self.args.block_tables = self.tables.data
        self.args.block_tables_stride = self.tables.stride
        self.args.block_tables_width = self.tables.columns
        self.args.seq_lens = self.lengths.data
        return self.read_queries()

    cdef int read_queries(self) except -1:
        """Takes q in place when it is f32 with whole strides, and a copy widened to f32 when it is not."""
        cdef Py_ssize_t item = self.q.item_bytes, seq, head, dim = self.q.shape[2]
        cdef pp_dtype dtype = PP_BF16 if self.q.kind == TENSOR_BITS16 else <pp_dtype>self.q.kind
        cdef float *to
        if dim > 1 and self.q.strides[2] != item:
            raise ValueError(f"the last axis of q must be contiguous: {item} bytes a step, not {self.q.strides[2]}")
        if (dtype == PP_F32 and self.q.strides[0] % item == 0 and self.q.strides[1] % item == 0
                and <size_t>self.q.data % sizeof(float) == 0):
            self.args.q = <const float *>self.q.data
            self.args.q_stride_seq = self.q.strides[0] // item
            self.args.q_stride_head = self.q.strides[1] // item
            return 0
        self.widened = to = <float *>PyMem_Malloc(
            <size_t>(self.q.shape[0] * self.q.shape[1] * dim + 1) * sizeof(float))
        if to == NULL:
            raise MemoryError(f"no memory to widen q of {self.q.shape[0]} sequences")
        for seq in range(self.q.shape[0]):
            for head in range(self.q.shape[1]):
                pp_widen(to, self.q.data + seq * self.q.strides[0] + head * self.q.strides[1], dim, dtype)
                to += dim
        self.args.q = self.widened
        self.args.q_stride_seq = self.q.shape[1] * dim
        self.args.q_stride_head = dim
        return 0

    cdef int read_out(self, object out) except -1:
        """Holds `out`: writable C-contiguous f32 of q's shape that overlaps nothing that is read."""
        cdef Py_ssize_t axis, step = sizeof(float)
        PyObject_GetBuffer(out, &self.out, PyBUF_FORMAT | PyBUF_STRIDES | PyBUF_WRITABLE)
        self.has_out = True
        if not is_float32(&self.out):
            raise TypeError(f"out must be float32, not {getattr(out, 'dtype', memoryview(out).format)}")
        shape = tuple([self.q.shape[axis] for axis in range(3)])
        got = tuple([self.out.shape[axis] for axis in range(self.out.ndim)])
        if got != shape:
            raise ValueError(f"out must have q's shape {shape}, not {got}")
        for axis in range(2, -1, -1):
            if self.out.shape[axis] > 1 and self.out.strides[axis] != step:
                raise ValueError(
                    f"out must be C-contiguous: axis {axis} steps {self.out.strides[axis]} bytes, not {step}"
                )
            step *= self.out.shape[axis]
        if <size_t>self.out.buf % sizeof(float):
            raise ValueError(f"out must be aligned to {sizeof(float)} bytes")
        self.check_apart("q", self.q.data, self.q.shape, self.q.strides, 3, self.q.item_bytes)
        self.check_apart("block_tables", <const char *>self.tables.data, self.tables.view.shape,
                         self.tables.view.strides, 2, sizeof(int32_t))
        self.check_apart("seq_lens", <const char *>self.lengths.data, self.lengths.view.shape,
                         self.lengths.view.strides, 1, sizeof(int32_t))
        cdef Py_ssize_t pool_bytes = self.pool.c_pool.num_blocks * self.pool.c_pool.layout.block_bytes, one = 1
        self.check_apart("the pool's pages", <const char *>self.pool.c_pool.base, &pool_bytes, &one, 1, 1)
        self.args.out = <float *>self.out.buf
        return 0

    cdef int check_apart(self, str name, const char *data, const Py_ssize_t *shape, const Py_ssize_t *strides,
                         int ndim, Py_ssize_t item) except -1:
        cdef const char *low = data
        cdef const char *high = data + item
        cdef const char *begin = <const char *>self.out.buf
        cdef int axis
        for axis in range(ndim):
            if shape[axis] == 0:
                return 0
            if strides[axis] < 0:
                low += (shape[axis] - 1) * strides[axis]
            else:
                high += (shape[axis] - 1) * strides[axis]
        if self.out.len and begin < high and low < begin + self.out.len:
            raise ValueError(f"out overlaps {name}: it is written while that is read")
        return 0

    cdef object failure(self, pp_status status):
        """The exception for a status, with the place and both numbers."""
        cdef Py_ssize_t seq, index
        cdef int64_t length, blocks, size = self.pool.c_pool.layout.block_size
        cdef int32_t block
        if status == PP_NO_MEMORY:
            return MemoryError(f"no memory for the partial results of {self.args.num_seqs} sequences")
        for seq in range(self.lengths.rows):
            length = self.args.seq_lens[seq]
            blocks = (length + size - 1) // size
            if length < 0:
                return ValueError(f"seq_lens[{seq}] is {length}, below 0")
            if blocks > self.args.block_tables_width:
                return ValueError(
                    f"seq_lens[{seq}] is {length}: that is {blocks} blocks of {size} tokens, and block_tables has "
                    f"{self.args.block_tables_width} columns"
                )
        for seq in range(self.lengths.rows):
            for index in range((self.args.seq_lens[seq] + size - 1) // size):
                block = self.args.block_tables[seq * self.args.block_tables_stride + index]
                if not 0 <= block < self.pool.c_pool.num_blocks:
                    return InvalidBlock(
                        f"block_tables[{seq}, {index}] is {block}, "
                        f"and the pool has {self.pool.c_pool.num_blocks} blocks"
                    )
        return ValueError(f"{self.args.num_seqs} sequences of these lengths need more memory than can be addressed")


cdef float read_scale(object sm_scale, int head_dim) except? -1:
    cdef double scale = 1.0 / sqrt(head_dim) if sm_scale is None else sm_scale
    if not isfinite(<float>scale):
        raise ValueError(f"sm_scale must be a finite float32, not {sm_scale}")
    return <float>scale


cdef int read_threads(object num_threads) except -1:
    if num_threads is None:
        return pp_default_num_threads()
    threads = operator.index(num_threads)
    if not 1 <= threads <= PP_MAX_THREADS:
        raise ValueError(f"num_threads must be from 1 to {PP_MAX_THREADS}, not {threads}")
    return threads


cdef int refuse(str name, object value) except -1:
    raise NotImplementedError(f"{name}={value!r} is not implemented yet")


def decode(q, KvCachePool pool not None, layer, block_tables, seq_lens, *, sm_scale=None, window_left=-1,
           logits_soft_cap=0.0, alibi_slopes=None, sinks=None, out=None, return_lse=False, num_threads=None):
    """Attends with one query token per sequence over the keys and values in its pages.

    q              (n_seqs, num_qo_heads, head_dim), float32; float16 and bfloat16 (or its bits as uint16) are widened.
                   num_qo_heads is a multiple of the pool's num_kv_heads (grouped queries share a head)
    pool, layer    a pool made by `KvCachePool.from_layout`, and the layer in it
    block_tables   (n_seqs, width), int32: the block ids of each sequence in order; entries past its length are neither
                   read nor checked
    seq_lens       (n_seqs,), int32: tokens whose K and V are in the pages
    sm_scale       what scores are multiplied by; 1 / sqrt(head_dim) by default
    out            where to write: float32, C-contiguous, of q's shape, apart from all that is read
    return_lse     also return the natural log of the sum of exp(score) of each row
    num_threads    at most so many threads; by default the CPUs this process may use, or PAGEPOOL_NUM_THREADS

    Returns `out`, float32 (n_seqs, num_qo_heads, head_dim), and with return_lse the pair (out, lse), lse float32
    (n_seqs, num_qo_heads). An empty sequence gives zeros and -inf. The bits depend on nothing but the sequence's own
    query, keys and values: not on the batch, the order, the threads or the block size.

    Raises `TypeError` for a dtype, `ValueError` for a shape, stride or length, `InvalidBlock` for an id out of range
    and `NotImplementedError` for window_left, logits_soft_cap, alibi_slopes and sinks other than neutral; nothing is
    written then. The GIL is released. Block ids are checked for range, not for liveness.

    The online softmax is Milakov & Gimelshein's (2018), paging vLLM's (Kwon et al., SOSP 2023), splitting a sequence
    for threads that of Flash-Decoding (Dao et al., 2023), with fixed borders instead of thread-dependent ones.

    >>> import numpy as np
    >>> from pagepool import KvCachePool, KvLayout, PagedSeqState, decode
    >>> pool = KvCachePool.from_layout(KvLayout(1, 2, 64, dtype="float32"), num_blocks=4)
    >>> seq = PagedSeqState(pool.allocator, block_size=16)
    >>> keys = values = np.ones((3, 2, 64), np.float32)
    >>> pool.append(0, seq.append(3), keys, values)
    >>> tables, lens = np.asarray(seq.block_table)[None], np.array([seq.len], np.int32)
    >>> decode(np.ones((1, 4, 64), np.float32), pool, 0, tables, lens)[0, 0, :3]
    array([1., 1., 1.], dtype=float32)
    """
    if window_left != -1:
        refuse("window_left", window_left)
    if logits_soft_cap != 0.0:
        refuse("logits_soft_cap", logits_soft_cap)
    if alibi_slopes is not None:
        refuse("alibi_slopes", alibi_slopes)
    if sinks is not None:
        refuse("sinks", sinks)
    cdef Arguments call = Arguments()
    cdef int threads = read_threads(num_threads)
    cdef pp_status status
    call.read(q, pool, layer, block_tables, seq_lens)
    call.args.sm_scale = read_scale(sm_scale, pool.c_pool.layout.head_dim)
    if out is None:
        out = empty((call.q.shape[0], call.q.shape[1], call.q.shape[2]), FLOAT32)
    call.read_out(out)
    lse = None
    cdef float[:, ::1] lse_rows
    if return_lse:
        lse = empty((call.q.shape[0], call.q.shape[1]), FLOAT32)
        lse_rows = lse
        call.args.lse = &lse_rows[0, 0] if call.q.shape[0] else NULL
    pool.c_pin()
    try:
        with nogil:
            status = pp_decode(&call.args, threads)
    finally:
        pool.c_unpin()
    if status != PP_OK:
        raise call.failure(status)
    return (out, lse) if return_lse else out
