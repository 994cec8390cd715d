"""Decode attention over pages: the last query tokens of each sequence.

Checks arguments, releases the GIL and hands the work to pagepool/csrc; the arithmetic and its order are written down in
`pagepool.reference.canonical`.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from pagepool.attention.arguments cimport Arguments
from pagepool.attention.cpu cimport c_num_threads
from pagepool.csrc cimport (
    PP_MAX_THREADS,
    PP_OK,
    pp_decode_args,
    pp_status,
)
from pagepool.memory.arrays cimport read_number
from pagepool.memory.kernels cimport c_decode_args
from pagepool.memory.kv_pool cimport KvCachePool

import numpy as np

__all__ = ["decode"]

cdef object FLOAT32 = np.dtype(np.float32)
cdef object empty = np.empty


cdef pp_status c_decode(KvCachePool pool, int32_t layer, const float *q, int32_t num_seqs, int32_t num_qo_heads,
                        const int32_t *block_tables, int64_t block_tables_width, const int32_t *seq_lens,
                        float sm_scale, float *out, float *lse, int num_threads) noexcept nogil:
    cdef pp_decode_args args
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
    return c_decode_args(&args, num_threads)


cdef int read_threads(object num_threads) except -1:
    if num_threads is None:
        return c_num_threads()
    cdef int64_t threads = read_number("num_threads", num_threads)
    if not 1 <= threads <= PP_MAX_THREADS:
        raise ValueError(f"num_threads must be from 1 to {PP_MAX_THREADS}, not {num_threads}")
    return threads


def decode(q, KvCachePool pool not None, layer, block_tables, seq_lens, *, query_start_loc=None, custom_mask=None,
           sm_scale=None, window_left=-1, logits_soft_cap=0.0, alibi_slopes=None, sinks=None, out=None,
           return_lse=False, return_block_scores=False, arithmetic="exact", num_threads=None):
    """Attends with the last query tokens of each sequence, by default one, over the keys and values in its pages.

    q              (n_tokens, num_qo_heads, head_dim), float32; float16 and bfloat16 (or its bits as uint16) are
                   widened. num_qo_heads is a multiple of the pool's num_kv_heads (grouped queries share a KV head)
    pool, layer    a pool made by `KvCachePool.from_layout`, and the number of a layer, from 0
    block_tables   (n_seqs, width), int32: the block ids of each sequence in order; entries past its length are neither
                   read nor checked
    seq_lens       (n_seqs,), int32: tokens whose K and V are in the pages, the query tokens included
    query_start_loc  (n_seqs + 1,), int32: sequence s has the query tokens query_start_loc[s] up to
                   query_start_loc[s + 1] of q. They are the last tokens of the sequence; by default each has one
    custom_mask    which tokens a query token sees, instead of those up to its own (speculative decoding). One bool
                   array (query tokens, width) per sequence covers its last `width` tokens; all query tokens see the
                   tokens before those. `width` is the number of query tokens (a tree) or seq_len. Give a list of
                   arrays, None in it for causal attention; one array for all sequences; all arrays flattened into
                   one; or, for width seq_len, bits in uint8, little-endian, each sequence beginning a new byte
    sm_scale       multiplies the scores; 1 / sqrt(head_dim) by default. Set it for a latent cache, whose keys had
                   fewer dims before they were projected
    window_left    sliding window: a query sees this many tokens to its left, and its own; -1: all. Pages to the left
                   of every window of a sequence are not read, nor are their ids; pages that only a mask hides are
    logits_soft_cap  if not 0, a score becomes cap * tanh(score / cap) (Gemma 2)
    alibi_slopes   (num_qo_heads,): slope * (t - position of the query token) is added to the score of token t, after
                   the cap (ALiBi, Press et al.)
    sinks          (num_qo_heads,): a score per head that takes weight and has no value (attention sinks, gpt-oss);
                   -inf for no sink
    out            an array to write to: float32, C-contiguous, of the result's shape, overlapping no input
    return_lse     also return the natural log of the sum of exp(score) of each row, sinks included
    return_block_scores  also return the weight of each block: the sum of the row's weights over its tokens, for
                   attention-based eviction
    arithmetic     "exact": float32 products and sums of the stored values. "bf16", for bfloat16 pages: rounds q and
                   the softmax's weights to bfloat16 and uses the CPU's bfloat16 dot products (AVX512_BF16), which do
                   twice as much; slower on a CPU without them. All else stays float32
    num_threads    the most threads to use; by default the CPUs that this process may use, or PAGEPOOL_NUM_THREADS

    Returns `out`, float32 (n_tokens, num_qo_heads, v_head_dim). With return_lse or return_block_scores returns a tuple
    of `out`, lse, float32 (n_tokens, num_qo_heads), and scores, float32 (n_tokens, num_qo_heads, width), which are 0
    for blocks that the row does not see. A query token that sees nothing gives zeros and the lse -inf: in an empty
    sequence, or when a sequence has more query tokens than seq_len. The bits depend only on the row's own query and the
    keys and values that it sees: not on the batch, the other query tokens, the order, the threads, the block size or
    the instruction set. Without fma ("baseline") each product is rounded, so its bits differ.

    In exact arithmetic a head's error is below 1e-5 of its largest output while scores stay below about 20; scores are
    float32, and errors grow with their size. With "bf16", rounding changes a score by at most
    E = 2^-8 abs(sm_scale) sum(abs(q * k)), an output by at most (exp(2 E) (1 + 2^-7) - 1) sum(weight * abs(v)) and the
    lse by E + 2^-8; on random numbers outputs were off by up to 9e-3 of a head's largest one.

    NaN and inf follow IEEE 754. A NaN in q or K, a score of inf or a sink of inf makes a head NaN; a NaN in V makes its
    dim NaN. A token whose score is -inf has no weight; if all are, the head is NaN and its lse -inf (with a sink: zeros
    and the sink). Values are summed in float32, with weights of up to 2^8, before the sum is divided by the sum of
    weights, so abs(V) times the number of tokens of about equal weight must stay below 2^120 (1.3e36). Tokens that a
    query token does not see have no influence on it, even if they are NaN.

    Raises `TypeError` for a dtype, `ValueError` for a shape, stride, length or number out of range and `InvalidBlock`
    for an id out of range; then nothing is written. Releases the GIL. Checks block ids for range, not for liveness.

    Sources: online softmax (Milakov & Gimelshein, 2018); paging (vLLM, Kwon et al., SOSP 2023); splitting a sequence
    for threads (Flash-Decoding, Dao et al., 2023), here with borders that do not depend on the threads; tree masks
    (SpecInfer, Miao et al., ASPLOS 2024), flattened as FlashInfer does.

    >>> import numpy as np
    >>> from pagepool import KvCachePool, KvLayout, PagedSeqState, decode
    >>> pool = KvCachePool.from_layout(KvLayout(1, 2, 64, dtype="float32"), num_blocks=4)
    >>> seq = PagedSeqState(pool.allocator, block_size=16)
    >>> keys = values = np.ones((3, 2, 64), np.float32)
    >>> pool.append(0, seq.append(3), keys, values)
    >>> tables, lens = np.asarray(seq.block_table)[None], np.array([seq.len], np.int32)
    >>> decode(np.ones((1, 4, 64), np.float32), pool, 0, tables, lens)[0, 0, :3]
    array([1., 1., 1.], dtype=float32)
    >>> starts = np.array([0, 2], np.int32)  # the last two tokens at once
    >>> out, scores = decode(np.ones((2, 4, 64), np.float32), pool, 0, tables, lens, query_start_loc=starts,
    ...                      return_block_scores=True)
    >>> out.shape, scores[:, 0, 0].tolist()
    ((2, 4, 64), [1.0, 1.0])
    """
    cdef Arguments call = Arguments()
    cdef int threads = read_threads(num_threads)
    cdef pp_status status
    cdef float[:, ::1] lse_rows
    cdef float[:, :, ::1] score_rows
    call.read(q, pool, layer, block_tables, seq_lens, query_start_loc, custom_mask)
    call.read_variant(window_left, logits_soft_cap, alibi_slopes, sinks)
    call.read_scale(sm_scale)
    call.read_arithmetic(arithmetic)
    if out is None:
        out = empty((call.q.shape[0], call.q.shape[1], pool.c_pool.layout.v_head_dim), FLOAT32)
    call.read_out(out)
    lse = scores = None
    if return_lse:
        lse = empty((call.q.shape[0], call.q.shape[1]), FLOAT32)
        lse_rows = lse
        call.args.lse = &lse_rows[0, 0] if lse.size else NULL
    if return_block_scores:
        scores = empty((call.q.shape[0], call.q.shape[1], call.args.block_tables_width), FLOAT32)
        score_rows = scores
        call.args.block_scores = &score_rows[0, 0, 0] if scores.size else NULL
    pool.c_pin()
    try:
        with nogil:
            status = c_decode_args(&call.args, threads)
    finally:
        pool.c_unpin()
    if status != PP_OK:
        raise call.failure(status)
    if not (return_lse or return_block_scores):
        return out
    return tuple([array for array in (out, lse, scores) if array is not None])
