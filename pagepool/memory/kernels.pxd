from libc.stdint cimport int32_t, int64_t, uint16_t

from pagepool.csrc cimport pp_decode_args, pp_dtype, pp_kv_pool, pp_kv_rows, pp_merge_args, pp_status


cdef extern from "linear_quantised.h" nogil:
    ctypedef struct pp_quantised:
        int32_t format
        int64_t outputs
        const unsigned char *data
        const float *bias


cdef extern from "step.h" nogil:
    enum:
        PP_STEP_LINEARS

    ctypedef struct pp_step_linear:
        int64_t outputs
        const pp_quantised *quantised
        int32_t num_quantised
        const void *packed
        const uint16_t *bias
        int64_t few_rows

    ctypedef struct pp_step_norm:
        const uint16_t *weight
        float eps

    ctypedef struct pp_step_layer:
        pp_step_linear *linears
        pp_step_norm norm
        pp_step_norm mlp_norm
        pp_step_norm query_norm
        pp_step_norm key_norm
        const uint16_t *activation
        float sm_scale
        int32_t group
        int32_t pool_layer

    ctypedef struct pp_step_group:
        pp_decode_args attention
        const int64_t *slot_mapping

    ctypedef struct pp_step:
        const pp_step_layer *layers
        int32_t num_layers
        pp_step_norm norm
        int64_t rows
        int64_t hidden_size
        int32_t num_qo_heads
        int32_t num_kv_heads
        int32_t head_dim
        const uint16_t *cos
        const uint16_t *sin
        const pp_step_group *groups
        int num_threads
        uint16_t *(*multiply)(void *context, int32_t layer, int32_t place) noexcept
        void *context
        uint16_t *x
        uint16_t *normed
        uint16_t *attended
        uint16_t *activated
        uint16_t *qkv
        uint16_t *added
        uint16_t *gate_and_up


# As pp_... of the same name in include/pagepool and in pagepool/csrc/draw.h, elementwise.h, linear.h,
# linear_quantised.h and step.h.
cdef pp_status (*c_kv_append_rows)(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping,
                                   int64_t num_tokens, pp_kv_rows k, pp_kv_rows v, pp_dtype src_dtype) noexcept nogil
cdef pp_status (*c_kv_gather)(const pp_kv_pool *pool, int32_t layer, const int32_t *blocks, int64_t num_blocks,
                              int64_t seq_len, float *k, float *v) noexcept nogil
cdef void (*c_widen)(float *to, const void *source, int64_t n, pp_dtype dtype) noexcept nogil
cdef pp_status (*c_decode_args)(const pp_decode_args *args, int num_threads) noexcept nogil
cdef pp_status (*c_merge_states)(const pp_merge_args *args) noexcept nogil
cdef void (*c_weigh)(const float *logits, int64_t n, float most, float scale, float *weights,
                     float *sums) noexcept nogil
cdef void (*c_keep_ahead)(float *weights, int64_t num_chunks, int64_t place, float *sums) noexcept nogil
cdef double (*c_draw_total)(const float *sums, int64_t num_chunks) noexcept nogil
cdef int64_t (*c_draw)(const float *weights, const float *sums, int64_t num_chunks, double number) noexcept nogil
cdef int64_t (*c_largest_bf16)(const uint16_t *logits, int64_t n) noexcept nogil
cdef void (*c_rms_norm)(const uint16_t *x, const uint16_t *delta, const uint16_t *weight, float eps, int64_t rows,
                        int64_t n, uint16_t *sum, uint16_t *out, int num_threads) noexcept nogil
cdef pp_status (*c_step_run)(const pp_step *step) noexcept nogil
cdef void (*c_rotate)(uint16_t *x, int64_t stride, const uint16_t *cos, const uint16_t *sin, int64_t rows,
                      int64_t heads, int64_t dim, int num_threads) noexcept nogil
cdef void (*c_lookup_mul)(const uint16_t *gate, const uint16_t *up, int64_t stride, const uint16_t *table, int64_t rows,
                          int64_t n, uint16_t *out, int num_threads) noexcept nogil
cdef int (*c_linear_has_few)() noexcept nogil
cdef pp_status (*c_linear_few)(const uint16_t *x, int64_t rows, int64_t inputs, const void *weight,
                               const uint16_t *bias, int64_t outputs, uint16_t *out, int num_threads) noexcept nogil
cdef pp_status (*c_linear_quantised)(const void *x, pp_dtype dtype, int64_t rows, int64_t inputs,
                                     const pp_quantised *weights, int32_t num_weights, void *out,
                                     int num_threads) noexcept nogil
cdef void c_use_fork_join(size_t fork_join, int team_size) noexcept nogil
cdef int (*c_default_num_threads)() noexcept nogil
cdef int (*c_num_threads_forced_unusable)() noexcept nogil
cdef const char *(*c_isa)() noexcept nogil
cdef const char *(*c_isa_available)(int i) noexcept nogil
cdef int (*c_isa_forced_unavailable)() noexcept nogil
cdef int (*c_tiles_refused)() noexcept nogil
