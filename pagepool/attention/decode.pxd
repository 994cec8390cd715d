from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_decode_args, pp_status
from pagepool.memory.kv_pool cimport KvCachePool


# pp_decode (pagepool/attention.h) over a pool, for callers without the GIL that hold the pool: q is C-contiguous
# (num_seqs, num_qo_heads, head_dim), out (num_seqs, num_qo_heads, v_head_dim), lse NULL or (num_seqs, num_qo_heads).
cdef pp_status c_decode(KvCachePool pool, int32_t layer, const float *q, int32_t num_seqs, int32_t num_qo_heads,
                        const int32_t *block_tables, int64_t block_tables_width, const int32_t *seq_lens,
                        float sm_scale, float *out, float *lse, int num_threads) noexcept nogil

# In checked mode (`KvCachePool.checked`): true if a block that will be read is free. It is entry (seq, index) of the
# block tables.
cdef bint c_finds_free(KvCachePool pool, const pp_decode_args *args, int32_t *seq, int64_t *index) noexcept nogil
