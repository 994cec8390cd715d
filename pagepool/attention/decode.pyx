"""Attention over pages: the last query tokens of each sequence, one (decode) or many (prefill).

Checks arguments before anything is written, releases the GIL and calls pagepool/csrc. `pagepool.reference.canonical`
specifies the arithmetic and its order.
"""

cimport cython
from cpython.buffer cimport Py_buffer
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.math cimport sqrt
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t
from libc.string cimport memcpy, memset

from pagepool.attention.cpu cimport c_num_threads
from pagepool.attention.masks cimport MaskBits
from pagepool.csrc cimport (
    PP_BF16,
    PP_BF16X2,
    PP_EXACT,
    PP_F32,
    PP_INVALID_BLOCK,
    PP_MAX_THREADS,
    PP_NO_MEMORY,
    PP_OK,
    PP_ROUNDED_BF16,
    pp_decode_args,
    pp_dtype,
    pp_status,
)
from pagepool.memory.arrays cimport (
    TENSOR_BITS16,
    Buffer,
    IntArray,
    Tensor,
    dtype_of,
    get_buffer,
    kind_of_format,
    read_ints,
    read_number,
    read_tensor,
    release_buffer,
    release_ints,
    release_tensor,
)
from pagepool.memory.block_tables cimport BlockTables
from pagepool.memory.kernels cimport c_decode_args, c_isa, c_widen
from pagepool.memory.kv_pool cimport KvCachePool

import numpy as np

from pagepool._arguments import dtype_name
from pagepool.errors import InvalidBlock

__all__ = ["auto_arithmetic", "decode", "prefill"]

cdef object FLOAT32 = np.dtype(np.float32)
cdef object empty = np.empty
cdef int64_t MOST_ROWS = <int64_t>1 << 40  # limits sizes so that their bytes fit in 64 bits


cdef pp_dtype kind_of(int kind) noexcept:
    return PP_BF16 if kind == TENSOR_BITS16 else <pp_dtype>kind


cdef str choose_arithmetic(bint q_in_16_bits, bint pages_in_bf16):
    return "bf16x2" if q_in_16_bits and pages_in_bf16 and <bytes>c_isa() == b"amx" else "exact"


def auto_arithmetic(q_dtype, page_dtype):
    """Return the arithmetic that "auto" of `decode` selects on this CPU.

    Parameters
    ----------
    q_dtype, page_dtype
        The dtypes of the queries and of the pages, such as "bfloat16".

    Returns
    -------
    str
        "bf16x2" or "exact".

    Examples
    --------
    >>> auto_arithmetic("float32", "bfloat16")
    'exact'
    """
    q_in_16_bits = dtype_name("q_dtype", q_dtype) != "float32"
    return choose_arithmetic(q_in_16_bits, dtype_name("page_dtype", page_dtype) == "bfloat16")


cdef double read_float(str name, object number) except? -1.0:
    try:
        return number
    except TypeError:
        raise TypeError(f"{name} must be a number, not {type(number).__name__}") from None
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float holds, up to 1.8e308") from None


cdef int64_t first_block(const pp_decode_args *args, int32_t seq) noexcept nogil:
    """The first block that any query token of the sequence sees."""
    cdef const int32_t *starts = args.query_start_loc
    cdef int64_t queries = 1 if starts == NULL else starts[seq + 1] - starts[seq]
    cdef int64_t first = args.seq_lens[seq] - queries + 1 - args.window
    return first // args.pool.layout.block_size if args.window and first > 0 else 0


cdef bint c_finds_free(KvCachePool pool, const pp_decode_args *args, int32_t *seq, int64_t *index) noexcept nogil:
    cdef int64_t size = pool.c_pool.layout.block_size, blocks
    cdef int32_t block
    if not pool.allocator.checked:
        return False
    for seq[0] in range(args.num_seqs):
        blocks = min((args.seq_lens[seq[0]] + size - 1) // size, args.block_tables_width)
        for index[0] in range(first_block(args, seq[0]), blocks):
            block = args.block_tables[seq[0] * args.block_tables_stride + index[0]]
            if 0 <= block < pool.c_pool.num_blocks and pool.allocator.c_ref_count(block) < 1:
                return True
    return False


@cython.final
@cython.no_gc
@cython.freelist(4)
cdef class Arguments:
    """Internal: the arguments of a call, read and checked. Holds the memory of all arrays while it lives."""

    cdef pp_decode_args args
    cdef KvCachePool pool
    cdef Tensor q
    cdef IntArray tables
    cdef IntArray lengths
    cdef IntArray starts
    cdef MaskBits mask
    cdef Buffer out
    cdef bint has_out
    cdef int32_t *own_starts
    cdef float *widened
    cdef float *slopes
    cdef float *sinks

    def __dealloc__(self):
        release_tensor(&self.q)
        release_ints(&self.tables)
        release_ints(&self.lengths)
        release_ints(&self.starts)
        if self.has_out:
            release_buffer(&self.out)
        PyMem_Free(self.own_starts)
        PyMem_Free(self.widened)
        PyMem_Free(self.slopes)
        PyMem_Free(self.sinks)

    cdef int read(self, object q, KvCachePool pool, object layer, object block_tables, object seq_lens,
                  object query_start_loc, object custom_mask) except -1:
        cdef int32_t kv_heads
        cdef BlockTables batch
        pool.check_open()
        if pool.layout is None:
            raise ValueError("decode needs a pool with a layout: KvCachePool.from_layout makes one")
        self.pool = pool
        self.args.pool = &pool.c_pool
        self.args.layer = pool.read_layer(layer)
        if type(block_tables) is BlockTables:
            batch = <BlockTables>block_tables
            if seq_lens is not None or query_start_loc is not None:
                name = "query_start_loc" if seq_lens is None else "seq_lens"
                raise TypeError(f"{name} must be None when block_tables is a BlockTables")
            if batch.allocator is not None and batch.allocator is not pool.allocator:
                raise ValueError("block_tables must be filled with sequences of the pool's allocator, not of another")
            block_tables, seq_lens, query_start_loc = batch.block_tables, batch.seq_lens, batch.query_start_loc
        read_tensor("q", q, &self.q)
        read_ints("block_tables", block_tables, 2, &self.tables)
        read_ints("seq_lens", seq_lens, 1, &self.lengths)
        if self.q.ndim != 3:
            raise ValueError(f"q must be (n_tokens, num_qo_heads, head_dim), not of {self.q.ndim} dimensions")
        if self.q.shape[2] != pool.c_pool.layout.head_dim:
            raise ValueError(f"q has head_dim {self.q.shape[2]}, the pool {pool.c_pool.layout.head_dim}")
        kv_heads = pool.c_pool.layout.num_kv_heads
        if self.q.shape[1] < 1 or self.q.shape[1] % kv_heads:
            raise ValueError(f"q must have a multiple of {kv_heads} heads (the pool's KV heads), not {self.q.shape[1]}")
        if self.tables.rows != self.lengths.rows or (query_start_loc is None and self.q.shape[0] != self.tables.rows):
            raise ValueError(
                f"q has {self.q.shape[0]} query tokens, block_tables {self.tables.rows} sequences, "
                f"seq_lens {self.lengths.rows}"
            )
        if self.q.shape[0] > INT32_MAX or self.q.shape[1] > INT32_MAX:
            raise ValueError(f"q has {max(self.q.shape[0], self.q.shape[1])} rows, the maximum is {INT32_MAX}")
        if self.tables.rows > INT32_MAX:
            raise ValueError(f"block_tables has {self.tables.rows} sequences, the maximum is {INT32_MAX}")
        if self.q.shape[0] * self.q.shape[1] > MOST_ROWS:  # a tensor with strides of 0 may have any size
            raise ValueError(f"q has {self.q.shape[0]} query tokens of {self.q.shape[1]} heads, the most is "
                             f"{MOST_ROWS} in all")
        self.args.num_seqs = <int32_t>self.tables.rows
        self.args.num_qo_heads = <int32_t>self.q.shape[1]
        self.args.block_tables = self.tables.data
        self.args.block_tables_stride = self.tables.stride
        self.args.block_tables_width = self.tables.columns
        self.args.seq_lens = self.lengths.data
        if query_start_loc is not None:
            self.read_starts(query_start_loc)
        if custom_mask is not None:
            self.read_mask(custom_mask)
        return self.read_queries()

    cdef int read_starts(self, object query_start_loc) except -1:
        """Reads query_start_loc: where the query tokens of each sequence begin in q, and the end of the last ones.

        Makes a copy: the library must not read numbers that were changed after they were checked.
        """
        cdef Py_ssize_t s, num_seqs = self.tables.rows
        cdef int32_t *starts
        read_ints("query_start_loc", query_start_loc, 1, &self.starts)
        if self.starts.rows != num_seqs + 1:
            raise ValueError(f"query_start_loc must have {num_seqs + 1} entries for {num_seqs} sequences, "
                             f"not {self.starts.rows}")
        self.own_starts = starts = <int32_t *>PyMem_Malloc(<size_t>(num_seqs + 1) * sizeof(int32_t))
        if starts == NULL:
            raise MemoryError(f"no memory for the query_start_loc of {num_seqs} sequences")
        memcpy(starts, self.starts.data, <size_t>(num_seqs + 1) * sizeof(int32_t))
        if starts[0] != 0 or starts[num_seqs] != self.q.shape[0]:
            raise ValueError(f"query_start_loc must go from 0 to the {self.q.shape[0]} query tokens of q, "
                             f"not from {starts[0]} to {starts[num_seqs]}")
        for s in range(num_seqs):
            if starts[s + 1] < starts[s]:
                raise ValueError(f"query_start_loc falls from {starts[s]} to {starts[s + 1]} at entry {s + 1}")
        self.args.query_start_loc = starts
        return 0

    cdef int read_mask(self, object custom_mask) except -1:
        cdef MaskBits mask = MaskBits.__new__(MaskBits)
        mask.read(custom_mask, self.args.query_start_loc, self.args.seq_lens, self.tables.rows)
        self.mask = mask
        self.args.custom_mask = mask.bits
        self.args.mask_indptr = mask.indptr
        self.args.mask_widths = mask.widths
        self.args.seq_lens = mask.seq_lens
        self.args.query_start_loc = mask.query_starts
        return 0

    cdef int read_queries(self) except -1:
        """Reads q in place if its strides are whole elements, else makes a copy in f32."""
        cdef Py_ssize_t item = self.q.item_bytes, seq, head, dim = self.q.shape[2]
        cdef pp_dtype dtype = kind_of(self.q.kind)
        cdef float *to
        if dim > 1 and self.q.strides[2] != item:
            raise ValueError(f"the last axis of q must be contiguous: {item} bytes a step, not {self.q.strides[2]}")
        if (self.q.strides[0] % item == 0 and self.q.strides[1] % item == 0
                and <size_t>self.q.data % <size_t>item == 0):
            self.args.q = self.q.data
            self.args.q_dtype = dtype
            self.args.q_stride_seq = self.q.strides[0] // item
            self.args.q_stride_head = self.q.strides[1] // item
            return 0
        self.widened = to = <float *>PyMem_Malloc(
            <size_t>(self.q.shape[0] * self.q.shape[1] * dim + 1) * sizeof(float))
        if to == NULL:
            raise MemoryError(f"no memory for a copy of q of {self.q.shape[0]} query tokens")
        for seq in range(self.q.shape[0]):
            for head in range(self.q.shape[1]):
                c_widen(to, self.q.data + seq * self.q.strides[0] + head * self.q.strides[1], dim, dtype)
                to += dim
        self.args.q = self.widened
        self.args.q_dtype = PP_F32
        self.args.q_stride_seq = self.q.shape[1] * dim
        self.args.q_stride_head = dim
        return 0

    cdef int read_scale(self, object sm_scale) except -1:
        cdef double scale = 1.0 / sqrt(self.q.shape[2]) if sm_scale is None else read_float("sm_scale", sm_scale)
        if not -2e38 <= scale <= 2e38:  # times log2(e) it is a float32
            raise ValueError(f"sm_scale must be from -2e38 to 2e38, not {sm_scale}")
        self.args.sm_scale = <float>scale
        return 0

    cdef int read_variant(self, object window_left, object logits_soft_cap, object alibi_slopes,
                          object sinks) except -1:
        cdef int64_t window = -1 if window_left is None else read_number("window_left", window_left)
        cdef double cap = 0.0 if logits_soft_cap is None else read_float("logits_soft_cap", logits_soft_cap)
        if window < -1:
            raise ValueError(f"window_left must be -1 (no window) or more, not {window_left}")
        if cap != 0.0 and not 1e-30 <= cap <= 1e30:  # its inverse is taken in float32
            raise ValueError(f"logits_soft_cap must be 0 (no cap) or from 1e-30 to 1e30, not {logits_soft_cap}")
        if alibi_slopes is not None:
            self.slopes = self.read_heads("alibi_slopes", alibi_slopes)
        if sinks is not None:
            self.sinks = self.read_heads("sinks", sinks)
        self.args.window = min(window, INT32_MAX) + 1  # no sequence is longer
        self.args.logits_soft_cap = <float>cap
        self.args.alibi_slopes = self.slopes
        self.args.sinks = self.sinks
        return 0

    cdef int read_arithmetic(self, object arithmetic) except -1:
        if not isinstance(arithmetic, str) or arithmetic not in ("exact", "bf16x2", "bf16", "auto"):
            raise ValueError(f"arithmetic must be 'exact', 'bf16x2', 'bf16' or 'auto', not {arithmetic!r}")
        if arithmetic == "auto":
            in_bf16 = self.pool.dtype == self.pool.v_dtype == "bfloat16"
            arithmetic = choose_arithmetic(self.args.q_dtype != PP_F32, in_bf16)
        if arithmetic == "exact":
            self.args.arithmetic = PP_EXACT
            return 0
        names = {self.pool.dtype, self.pool.v_dtype}
        if names not in ({"bfloat16"}, {"float16"}):
            given = " and ".join(sorted(names))
            raise ValueError(f"arithmetic {arithmetic!r} is for pages of bfloat16 or float16, and the pool has {given}")
        self.args.arithmetic = PP_ROUNDED_BF16 if arithmetic == "bf16" else PP_BF16X2
        return 0

    cdef float *read_heads(self, str name, object source) except NULL:
        """Copies an array with one number for each query head. The caller frees the copy with PyMem_Free."""
        cdef Tensor tensor
        cdef Py_ssize_t i, heads = self.q.shape[1]
        cdef float *numbers = NULL
        read_tensor(name, source, &tensor)
        try:
            if tensor.ndim != 1 or tensor.shape[0] != heads:
                shape = tuple([tensor.shape[i] for i in range(tensor.ndim)])
                raise ValueError(f"{name} must hold a number for each of the {heads} query heads, not {shape}")
            numbers = <float *>PyMem_Malloc(<size_t>heads * sizeof(float))
            if numbers == NULL:
                raise MemoryError(f"no memory for {heads} {name}")
            for i in range(heads):
                c_widen(numbers + i, tensor.data + i * tensor.strides[0], 1, kind_of(tensor.kind))
        finally:
            release_tensor(&tensor)
        return numbers

    cdef int read_out(self, object out) except -1:
        """Holds `out`, which must be writable, C-contiguous, of the result's shape, and overlap no input."""
        cdef Py_ssize_t axis, step, one = 1
        cdef int kind
        cdef const Py_buffer *view = &self.out.view
        if not get_buffer(out, &self.out, "out"):
            raise TypeError(f"out must be an array of float32, float16 or bfloat16, not {type(out).__name__}")
        self.has_out = True
        if view.readonly:
            raise ValueError("out is read-only, but the result is written to it")
        kind = kind_of_format(view.format)
        if kind < 0:
            raise TypeError(f"out must be float32, float16 or bfloat16 (uint16 bits), not {dtype_of(out)}")
        step = view.itemsize
        if (view.ndim != 3 or view.shape[0] != self.q.shape[0] or view.shape[1] != self.q.shape[1]
                or view.shape[2] != self.pool.c_pool.layout.v_head_dim):
            shape = self.q.shape[0], self.q.shape[1], self.pool.c_pool.layout.v_head_dim
            got = tuple([view.shape[axis] for axis in range(view.ndim)])
            raise ValueError(f"out must have the shape {shape}, not {got}")
        for axis in range(2, -1, -1):
            if view.shape[axis] > 1 and view.strides[axis] != step:
                raise ValueError(
                    f"out must be C-contiguous: axis {axis} steps {view.strides[axis]} bytes, not {step}"
                )
            step *= view.shape[axis]
        if <size_t>view.buf % <size_t>view.itemsize:
            raise ValueError(f"out must be aligned to {view.itemsize} bytes")
        self.check_apart("q", self.q.data, self.q.shape, self.q.strides, 3, self.q.item_bytes)
        self.check_ints_apart("block_tables", &self.tables)
        self.check_ints_apart("seq_lens", &self.lengths)
        if self.starts.has_buffer:
            self.check_ints_apart("query_start_loc", &self.starts)
        if self.mask is not None:
            self.check_apart("custom_mask", <const char *>self.mask.bits, &self.mask.num_bytes, &one, 1, 1)
        cdef Py_ssize_t pool_bytes = self.pool.c_pool.num_blocks * self.pool.c_pool.layout.block_bytes
        self.check_apart("the pool's pages", <const char *>self.pool.c_pool.base, &pool_bytes, &one, 1, 1)
        self.args.out = view.buf
        self.args.out_dtype = kind_of(kind)
        return 0

    cdef int check_ints_apart(self, str name, const IntArray *array) except -1:
        cdef const Py_buffer *view = &array.buffer.view
        return self.check_apart(name, <const char *>view.buf, view.shape, view.strides, view.ndim, view.itemsize)

    cdef int check_apart(self, str name, const char *data, const Py_ssize_t *shape, const Py_ssize_t *strides,
                         int ndim, Py_ssize_t item) except -1:
        cdef const char *low = data
        cdef const char *high = data + item
        cdef const char *begin = <const char *>self.out.view.buf
        cdef int axis
        for axis in range(ndim):
            if shape[axis] == 0:
                return 0
            if strides[axis] < 0:
                low += (shape[axis] - 1) * strides[axis]
            else:
                high += (shape[axis] - 1) * strides[axis]
        if self.out.view.len and begin < high and low < begin + self.out.view.len:
            raise ValueError(f"out overlaps {name}, which is read while out is written")
        return 0

    cdef int check_live(self) except -1:
        """In checked mode: raises InvalidBlock for a free block among those that will be read."""
        cdef int32_t seq = 0
        cdef int64_t index = 0
        if c_finds_free(self.pool, &self.args, &seq, &index):
            block = self.args.block_tables[seq * self.args.block_tables_stride + index]
            raise InvalidBlock(f"block_tables[{seq}, {index}] is {block}, which is free")
        return 0

    cdef object failure(self, pp_status status):
        """Raises the exception for a status. The message has the position, the given number and the allowed number."""
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
            blocks = (self.args.seq_lens[seq] + size - 1) // size  # another thread may have changed it since
            for index in range(first_block(&self.args, seq), min(blocks, self.args.block_tables_width)):
                block = self.args.block_tables[seq * self.args.block_tables_stride + index]
                if not 0 <= block < self.pool.c_pool.num_blocks:
                    hint = ": this query sees tokens of a block that was freed" if block == -1 else ""
                    beyond = {INT32_MAX: " or more", INT32_MIN: " or less"}.get(block, "")  # see narrow_ints
                    return InvalidBlock(
                        f"block_tables[{seq}, {index}] is {block}{beyond}, "
                        f"and the pool has {self.pool.c_pool.num_blocks} blocks{hint}"
                    )
        return ValueError(f"{self.args.num_seqs} sequences of these lengths need more memory than can be addressed")


cdef pp_status c_decode(KvCachePool pool, int32_t layer, const float *q, int32_t num_seqs, int32_t num_qo_heads,
                        const int32_t *block_tables, int64_t block_tables_width, const int32_t *seq_lens,
                        float sm_scale, float *out, float *lse, int num_threads) noexcept nogil:
    cdef pp_decode_args args
    cdef int32_t seq
    cdef int64_t index
    cdef int64_t head_dim = pool.c_pool.layout.head_dim
    memset(&args, 0, sizeof(args))
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
    if c_finds_free(pool, &args, &seq, &index):
        return PP_INVALID_BLOCK
    return c_decode_args(&args, num_threads)


cdef int read_threads(object num_threads) except -1:
    if num_threads is None:
        return c_num_threads()
    cdef int64_t threads = read_number("num_threads", num_threads)
    if not 1 <= threads <= PP_MAX_THREADS:
        raise ValueError(f"num_threads must be from 1 to {PP_MAX_THREADS}, not {num_threads}")
    return threads


def decode(q, KvCachePool pool not None, layer, block_tables, seq_lens=None, *, query_start_loc=None, custom_mask=None,
           sm_scale=None, window_left=-1, logits_soft_cap=0.0, alibi_slopes=None, sinks=None, out=None,
           return_lse=False, arithmetic="exact", cascade=True, num_threads=None):
    """Compute attention of the last query tokens of each sequence, by default one, over the K and V in its pages.

    Arrays are read and written in place, by the buffer protocol or DLPack, for example arrays of NumPy and tensors of
    torch. Gradients are not recorded. Releases the GIL.

    Parameters
    ----------
    q : float32, float16 or bfloat16, shape (n_tokens, num_qo_heads, head_dim)
        The queries. 16-bit queries are widened exactly; bfloat16 may come as its bits in uint16. num_qo_heads is a
        multiple of the pool's num_kv_heads (grouped queries share a KV head).
    pool : KvCachePool
        A pool made by `KvCachePool.from_layout`.
    layer : int
        The number of the layer, from 0.
    block_tables : int32, shape (n_seqs, width), or BlockTables
        The block ids of each sequence in order; int64 is copied. Entries past the length of a sequence are neither
        read nor checked. A filled `BlockTables` replaces block_tables, seq_lens and query_start_loc.
    seq_lens : int32 or int64, shape (n_seqs,)
        Number of tokens with K and V in the pages, including the query tokens.
    query_start_loc : int32 or int64, shape (n_seqs + 1,)
        The query tokens of sequence s are q[query_start_loc[s]:query_start_loc[s + 1]]. They are the last tokens of
        the sequence. Default: one for each sequence.
    custom_mask : bool or uint8
        The tokens that a query token sees. Default: all up to its own. A bool array (query tokens, width) covers the
        last `width` tokens of a sequence; all query tokens see the tokens before those. `width` is the number of query
        tokens (a tree of drafts) or seq_len. Pass a list of arrays, with None for causal attention; one array for all
        sequences; all arrays flattened into one; or, for width seq_len, bits in uint8, little-endian, where each
        sequence begins a new byte.
    sm_scale : float
        Factor of the scores. Default: 1 / sqrt(head_dim). Required for a latent cache, because its keys had fewer dims
        before the projection.
    window_left : int
        Sliding window: a query sees this many tokens to its left, and its own. -1 or None: no window. Pages left of all
        windows of a sequence are not read, and their ids are not checked. Pages that only a mask hides are read.
    logits_soft_cap : float
        If neither 0 nor None, a score becomes cap * tanh(score / cap) (Gemma 2).
    alibi_slopes : float, shape (num_qo_heads,)
        slope * (t - position of the query token) is added to the score of token t after the cap.
    sinks : float, shape (num_qo_heads,)
        A score per head that takes weight and has no value (attention sinks, gpt-oss). -inf: no sink.
    out : float32, float16 or bfloat16, shape (n_tokens, num_qo_heads, v_head_dim)
        The array to write to, rounded to nearest even; bfloat16 may be uint16. C-contiguous, overlaps no input.
        Default: a new array of float32.
    return_lse : bool
        Also return the natural log of the sum of exp(score) of each row, sinks included.
    arithmetic : {"exact", "bf16x2", "bf16", "auto"}
        "exact": float32 products and sums of the stored values. The next two are for bfloat16 and float16 pages. They
        compute products like AMX; a CPU without AMX computes the same bits with vectors. "bf16x2": a weight is the sum
        of two bfloat16 numbers, q of one, two or three (bfloat16, float16, float32), and K and V of one or two. "bf16":
        q and the weights are rounded to bfloat16, K and V are not. "auto": "bf16x2" if the CPU has AMX, q has 16 bits
        and the pages are bfloat16, otherwise "exact".
    cascade : bool
        Read chunks of 512 tokens that several sequences begin with (a system prompt, parallel samples) once for all of
        them. Changes no bit.
    num_threads : int
        The maximum number of threads. Default: PAGEPOOL_NUM_THREADS, or the CPUs that this process may use.

    Returns
    -------
    out : ndarray
        The result. Zeros for a query token that sees no token: in an empty sequence, or if a sequence has more query
        tokens than seq_len.
    lse : ndarray of float32, shape (n_tokens, num_qo_heads)
        If return_lse is set. -inf for a query token that sees no token.

    Raises
    ------
    TypeError
        A wrong dtype, or seq_lens or query_start_loc together with a `BlockTables`. Nothing is written.
    ValueError
        A wrong shape or stride, a number out of range, or a `BlockTables` of another allocator. Nothing is written.
    InvalidBlock
        A block id is out of range, or the block is free (in checked mode, see `KvCachePool.checked`). Nothing is
        written.

    Notes
    -----
    Bits. The bits of a row depend only on its own query and on the keys and values that it sees: not on the batch, the
    other query tokens, their order, the threads, the block size or the instruction set. Without fma ("baseline") each
    product is rounded, so the bits differ.

    Error. In "exact", and on normally distributed numbers in "bf16x2", a head's error is below 1e-5 of its largest
    output while scores stay below about 20. Scores are float32, so the error grows with them. In "bf16", rounding
    changes a score by at most E = 2^-8 abs(sm_scale) sum(abs(q * k)), an output by at most
    (exp(2 E) (1 + 2^-7) - 1) sum(weight * abs(v)), and the lse by E + 2^-8. On random numbers the error was at most
    9e-3 of a head's largest output.

    Special values follow IEEE 754. A NaN in q or K, a score of inf or a sink of inf makes a head NaN; a NaN in V makes
    its dim NaN. A token with the score -inf has no weight. If all scores are -inf, the head is NaN and its lse is -inf;
    with a sink, zeros and the sink. Tokens that a query token does not see do not change its result, even if they are
    NaN. With "bf16x2" an infinity in K, V or q may make a head NaN. Values are summed in float32 with weights of up to
    2^8 and then divided by the sum of the weights, so abs(V) times the number of tokens of about equal weight must stay
    below 2^120 (1.3e36).

    References
    ----------
    Online softmax: Milakov and Gimelshein, 2018. Paging: vLLM, Kwon et al., SOSP 2023. Splitting a sequence for
    threads: Flash-Decoding, Dao et al., 2023; here the borders do not depend on the threads. Tree masks: SpecInfer,
    Miao et al., ASPLOS 2024, flattened as in FlashInfer. ALiBi: Press et al., 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from pagepool import BlockTables, KvCachePool, KvLayout, PagedSeqState, decode
    >>> pool = KvCachePool.from_layout(KvLayout(1, 2, 64, dtype="float32"), num_blocks=4)
    >>> seq = PagedSeqState(pool.allocator, block_size=16)
    >>> keys = values = np.ones((3, 2, 64), np.float32)
    >>> pool.append(0, seq.append(3), keys, values)
    >>> tables = BlockTables(max_seqs=1, max_blocks_per_seq=4).fill([seq])
    >>> decode(np.ones((1, 4, 64), np.float32), pool, 0, tables)[0, 0, :3]
    array([1., 1., 1.], dtype=float32)
    >>> tables, lens = np.asarray(seq.block_table)[None], np.array([seq.len], np.int32)
    >>> starts = np.array([0, 2], np.int32)  # the last two tokens at once
    >>> decode(np.ones((2, 4, 64), np.float32), pool, 0, tables, lens, query_start_loc=starts).shape
    (2, 4, 64)
    """
    return attend(q, pool, layer, block_tables, seq_lens, query_start_loc, custom_mask, sm_scale, window_left,
                  logits_soft_cap, alibi_slopes, sinks, out, return_lse, arithmetic, cascade, num_threads)


def prefill(q, KvCachePool pool not None, layer, block_tables, seq_lens=None, query_start_loc=None, *,
            custom_mask=None, sm_scale=None, window_left=-1, logits_soft_cap=0.0, alibi_slopes=None, sinks=None,
            out=None, return_lse=False, arithmetic="exact", cascade=True, num_threads=None):
    """Compute attention of the new tokens of each sequence over its pages: a whole prompt, or a chunk of it.

    Append the K and V of the new tokens first: `seq_lens` counts them. Earlier tokens are read from the pages. They can
    come from an earlier chunk, another sequence or a prefix cache. Sequences that decode one token may be in the same
    call. Releases the GIL.

    Parameters
    ----------
    q : float32, float16 or bfloat16, shape (n_tokens, num_qo_heads, head_dim)
        The queries of the new tokens of all sequences, concatenated. bfloat16 may come as its bits in uint16.
    query_start_loc : int32 or int64, shape (n_seqs + 1,)
        The new tokens of sequence s are q[query_start_loc[s]:query_start_loc[s + 1]].
    pool, layer, block_tables, seq_lens, custom_mask, sm_scale, window_left, logits_soft_cap
        As in `decode`.
    alibi_slopes, sinks, out, return_lse, arithmetic, cascade, num_threads
        As in `decode`.

    Returns
    -------
    out, lse
        As in `decode`. A token's result always has the same bits: with the prompt in one call, in chunks of any size,
        after a hit in a prefix cache, or token by token through `decode`.

    Raises
    ------
    TypeError, ValueError, InvalidBlock
        As in `decode`.

    Notes
    -----
    If a KV head has at least 24 rows (query heads of its group times query tokens), scores and values are computed as
    tiles of many rows, at the rate of the CPU's multiply-adds. Each thread needs about 1 MB of scratch, whatever the
    number of tokens.

    References
    ----------
    Chunked prefill: Sarathi-Serve, Agrawal et al., OSDI 2024. Online softmax over tiles: FlashAttention, Dao et al.,
    2022.

    Examples
    --------
    >>> import numpy as np
    >>> from pagepool import BlockTables, KvCachePool, KvLayout, PagedSeqState, decode, prefill
    >>> pool = KvCachePool.from_layout(KvLayout(1, 2, 64, dtype="float32"), num_blocks=4)
    >>> seq = PagedSeqState(pool.allocator, block_size=16)
    >>> keys = values = np.random.default_rng(1).standard_normal((40, 2, 64), np.float32)
    >>> pool.append(0, seq.append(40), keys, values)
    >>> tables, queries = BlockTables(max_seqs=1, max_blocks_per_seq=4), np.ones((40, 4, 64), np.float32)
    >>> out = prefill(queries, pool, 0, tables.fill([seq], [40]))
    >>> last = decode(queries[39:], pool, 0, tables.fill([seq]))
    >>> out.shape, bool((out[39:] == last).all())
    ((40, 4, 64), True)
    """
    if query_start_loc is None and type(block_tables) is not BlockTables:
        raise TypeError("query_start_loc must be an array: it says where each sequence's tokens begin in q")
    return attend(q, pool, layer, block_tables, seq_lens, query_start_loc, custom_mask, sm_scale, window_left,
                  logits_soft_cap, alibi_slopes, sinks, out, return_lse, arithmetic, cascade, num_threads)


cdef object attend(object q, KvCachePool pool, object layer, object block_tables, object seq_lens,
                   object query_start_loc, object custom_mask, object sm_scale, object window_left,
                   object logits_soft_cap, object alibi_slopes, object sinks, object out, bint return_lse,
                   object arithmetic, bint cascade, object num_threads):
    cdef Arguments call = Arguments()
    cdef int threads = read_threads(num_threads)
    cdef pp_status status
    cdef float[:, ::1] lse_rows
    call.read(q, pool, layer, block_tables, seq_lens, query_start_loc, custom_mask)
    call.read_variant(window_left, logits_soft_cap, alibi_slopes, sinks)
    call.read_scale(sm_scale)
    call.read_arithmetic(arithmetic)
    call.args.no_cascade = not cascade
    if out is None:
        out = empty((call.q.shape[0], call.q.shape[1], pool.c_pool.layout.v_head_dim), FLOAT32)
    call.read_out(out)
    if return_lse:
        lse = empty((call.q.shape[0], call.q.shape[1]), FLOAT32)
        lse_rows = lse
        call.args.lse = &lse_rows[0, 0] if lse.size else NULL
    call.check_live()
    pool.pin()
    try:
        with nogil:
            status = c_decode_args(&call.args, threads)
    finally:
        pool.unpin()
    if status != PP_OK:
        raise call.failure(status)
    return (out, lse) if return_lse else out
