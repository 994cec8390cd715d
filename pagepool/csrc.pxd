"""The C interface of include/pagepool/*.h for Cython. Compile with pagepool.get_include() on the include path and link
libpagepool.a from pagepool.get_library_dir(). What each function does is said in the headers."""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t


cdef extern from "pagepool/version.h" nogil:
    enum:
        PP_ABI_VERSION
    int pp_abi_version() noexcept


cdef extern from "pagepool/status.h" nogil:
    ctypedef enum pp_status:
        PP_OK
        PP_EXHAUSTED
        PP_INVALID_BLOCK
        PP_INVALID_SLOT
        PP_OVER_MAXIMUM
        PP_NO_MEMORY
        PP_INVALID_ARGUMENT


cdef extern from "pagepool/layout.h" nogil:
    enum:
        PP_GROUP
        PP_V_RUN
        PP_MAX_BLOCK_SIZE
        PP_MAX_HEAD_DIM

    ctypedef enum pp_dtype:
        PP_F32
        PP_F16
        PP_BF16
        PP_INT8
        PP_INT4

    ctypedef struct pp_kv_layout:
        int32_t num_layers
        int32_t num_kv_heads
        int32_t head_dim
        int32_t v_head_dim
        int32_t v_in_k
        int32_t block_size
        int32_t dtype
        int32_t v_dtype
        int32_t tiled
        int64_t item_bytes
        int64_t k_bytes
        int64_t v_bytes
        int64_t head_bytes
        int64_t group_bytes
        int64_t layer_bytes
        int64_t block_bytes

    ctypedef struct pp_kv_pool:
        pp_kv_layout layout
        unsigned char *base
        int64_t num_blocks
        const float *k_channel_scale

    pp_status pp_kv_layout_init(
        pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
        pp_dtype dtype) noexcept
    pp_status pp_kv_layout_init_v(
        pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t v_head_dim,
        int v_in_k, int32_t block_size, pp_dtype dtype) noexcept
    pp_status pp_kv_layout_init_dtypes(
        pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t v_head_dim,
        int32_t block_size, pp_dtype dtype, pp_dtype v_dtype) noexcept
    int64_t pp_dtype_bytes(pp_dtype dtype) noexcept
    pp_status pp_kv_append(
        const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens, const void *k,
        const void *v, pp_dtype src_dtype, int64_t token_stride, int64_t head_stride) noexcept

    ctypedef struct pp_kv_rows:
        const void *data
        int64_t token_stride
        int64_t head_stride

    pp_status pp_kv_append_rows(
        const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens, pp_kv_rows k,
        pp_kv_rows v, pp_dtype src_dtype) noexcept
    pp_status pp_kv_gather(
        const pp_kv_pool *pool, int32_t layer, const int32_t *blocks, int64_t num_blocks, int64_t seq_len, float *k,
        float *v) noexcept
    void pp_widen(float *to, const void *source, int64_t n, pp_dtype dtype) noexcept
    pp_status pp_kv_copy_block(const pp_kv_pool *pool, int32_t dst, int32_t src) noexcept


cdef extern from "pagepool/lock.h" nogil:
    ctypedef struct pp_lock:
        pass

    bint pp_lock_try(pp_lock *lock) noexcept
    void pp_lock_acquire(pp_lock *lock) noexcept
    void pp_lock_wait(pp_lock *lock) noexcept
    void pp_lock_release(pp_lock *lock) noexcept
    pp_status pp_lock_register(pp_lock *lock) noexcept
    void pp_lock_unregister(pp_lock *lock) noexcept


cdef extern from "pagepool/attention.h" nogil:
    enum:
        PP_CHUNK
        PP_TILE

    ctypedef enum pp_arithmetic:
        PP_EXACT
        PP_ROUNDED_BF16
        PP_BF16X2

    ctypedef struct pp_decode_args:
        const pp_kv_pool *pool
        int32_t layer
        int32_t num_seqs
        int32_t num_qo_heads
        const void *q
        int64_t q_stride_seq
        int64_t q_stride_head
        const int32_t *query_start_loc
        const uint8_t *custom_mask
        const int64_t *mask_indptr
        const int32_t *mask_widths
        const int32_t *block_tables
        int64_t block_tables_stride
        int64_t block_tables_width
        const int32_t *seq_lens
        float sm_scale
        int64_t window
        float logits_soft_cap
        const float *alibi_slopes
        const float *sinks
        int32_t num_threads
        void *out
        float *lse
        int32_t arithmetic
        int32_t q_dtype
        int32_t out_dtype
        int32_t no_cascade

    ctypedef struct pp_decode_plan:
        pp_decode_args args
        int64_t num_units

    pp_status pp_decode_workspace(const pp_decode_args *args, size_t *bytes) noexcept
    pp_status pp_decode_plan_init(
        pp_decode_plan *plan, const pp_decode_args *args, void *workspace, size_t bytes) noexcept
    void pp_decode_run(pp_decode_plan *plan, int64_t begin, int64_t end) noexcept
    pp_status pp_decode(const pp_decode_args *args, int num_threads) noexcept
    pp_status pp_prefill(const pp_decode_args *args, int num_threads) noexcept

    ctypedef struct pp_merge_args:
        int64_t num_rows
        int64_t num_parts
        int64_t head_dim
        const float *v
        int64_t v_stride_row
        int64_t v_stride_part
        const float *s
        int64_t s_stride_row
        int64_t s_stride_part
        float *out
        float *lse

    pp_status pp_merge_states(const pp_merge_args *args) noexcept


cdef extern from "pagepool/cpu.h" nogil:
    const char *pp_isa() noexcept
    int pp_isa_forced_unavailable() noexcept
    int pp_tiles_refused() noexcept
    const char *pp_isa_available(int i) noexcept


cdef extern from "pagepool/threads.h" nogil:
    enum:
        PP_MAX_THREADS
    ctypedef void (*pp_range_body)(void *context, int64_t begin, int64_t end) noexcept nogil
    void pp_parallel_for(int num_threads, int64_t num_units, pp_range_body body, void *context) noexcept
    ctypedef void (*pp_fork_join)(void (*task)(void *) noexcept nogil, void *argument, unsigned num_threads,
                                  unsigned flags) noexcept nogil
    void pp_use_fork_join(pp_fork_join fork_join, int team_size) noexcept
    int pp_default_num_threads() noexcept
    int pp_num_threads_forced_unusable() noexcept
    void pp_threads_quiesce() noexcept
