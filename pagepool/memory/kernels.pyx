"""The kernels and worker threads of the C library, for all other modules: they cimport them from here.

So the package carries them once, and there is one choice of the instruction set and one set of threads. Five other
modules repeat only small functions (locks, pages), 13 to 29 each. A shared object for all modules would save little
and take 0.1 ms more to load.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t

from pagepool.csrc cimport (
    pp_decode, pp_decode_args, pp_default_num_threads, pp_dtype, pp_fork_join, pp_isa, pp_isa_available,
    pp_isa_forced_unavailable, pp_kv_append_rows, pp_kv_gather, pp_kv_pool, pp_kv_rows, pp_merge_args, pp_merge_states,
    pp_num_threads_forced_unusable, pp_status, pp_tiles_refused, pp_use_fork_join, pp_widen,
)

__all__ = []


# Declared here and not in a .pxd that other packages cimport: these headers are not shipped.
cdef extern from "draw.h" nogil:
    void pp_weigh(const float *logits, int64_t n, float most, float scale, float *weights, float *sums) noexcept
    void pp_keep_ahead(float *weights, int64_t num_chunks, int64_t place, float *sums) noexcept
    double pp_draw_total(const float *sums, int64_t num_chunks) noexcept
    int64_t pp_draw(const float *weights, const float *sums, int64_t num_chunks, double number) noexcept
    int64_t pp_largest_bf16(const uint16_t *logits, int64_t n) noexcept

cdef extern from "linear.h" nogil:
    int pp_linear_has_few() noexcept
    pp_status pp_linear_few(const uint16_t *x, int64_t rows, int64_t inputs, const void *weight, const uint16_t *bias,
                            int64_t outputs, uint16_t *out, int num_threads) noexcept

cdef extern from "linear_quantised.h" nogil:
    pp_status pp_linear_quantised(const void *x, pp_dtype dtype, int64_t rows, int64_t inputs,
                                  const pp_quantised *weights, int32_t num_weights, void *out,
                                  int num_threads) noexcept

cdef extern from "elementwise.h" nogil:
    void pp_rms_norm(const uint16_t *x, const uint16_t *delta, const uint16_t *weight, float eps, int64_t rows,
                     int64_t n, uint16_t *sum, uint16_t *out, int num_threads) noexcept
    void pp_rotate(uint16_t *x, int64_t stride, const uint16_t *cos, const uint16_t *sin, int64_t rows, int64_t heads,
                   int64_t dim, int num_threads) noexcept
    void pp_lookup_mul(const uint16_t *gate, const uint16_t *up, int64_t stride, const uint16_t *table, int64_t rows,
                       int64_t n, uint16_t *out, int num_threads) noexcept


cdef pp_status c_kv_append_rows(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens,
                                pp_kv_rows k, pp_kv_rows v, pp_dtype src_dtype) noexcept nogil:
    return pp_kv_append_rows(pool, layer, slot_mapping, num_tokens, k, v, src_dtype)


cdef pp_status c_kv_gather(const pp_kv_pool *pool, int32_t layer, const int32_t *blocks, int64_t num_blocks,
                           int64_t seq_len, float *k, float *v) noexcept nogil:
    return pp_kv_gather(pool, layer, blocks, num_blocks, seq_len, k, v)


cdef void c_widen(float *to, const void *source, int64_t n, pp_dtype dtype) noexcept nogil:
    pp_widen(to, source, n, dtype)


cdef pp_status c_decode_args(const pp_decode_args *args, int num_threads) noexcept nogil:
    return pp_decode(args, num_threads)


cdef pp_status c_merge_states(const pp_merge_args *args) noexcept nogil:
    return pp_merge_states(args)


cdef void c_weigh(const float *logits, int64_t n, float most, float scale, float *weights, float *sums) noexcept nogil:
    pp_weigh(logits, n, most, scale, weights, sums)


cdef void c_keep_ahead(float *weights, int64_t num_chunks, int64_t place, float *sums) noexcept nogil:
    pp_keep_ahead(weights, num_chunks, place, sums)


cdef double c_draw_total(const float *sums, int64_t num_chunks) noexcept nogil:
    return pp_draw_total(sums, num_chunks)


cdef int64_t c_draw(const float *weights, const float *sums, int64_t num_chunks, double number) noexcept nogil:
    return pp_draw(weights, sums, num_chunks, number)


cdef int64_t c_largest_bf16(const uint16_t *logits, int64_t n) noexcept nogil:
    return pp_largest_bf16(logits, n)


cdef void c_rms_norm(const uint16_t *x, const uint16_t *delta, const uint16_t *weight, float eps, int64_t rows,
                     int64_t n, uint16_t *sum, uint16_t *out, int num_threads) noexcept nogil:
    pp_rms_norm(x, delta, weight, eps, rows, n, sum, out, num_threads)


cdef void c_rotate(uint16_t *x, int64_t stride, const uint16_t *cos, const uint16_t *sin, int64_t rows, int64_t heads,
                   int64_t dim, int num_threads) noexcept nogil:
    pp_rotate(x, stride, cos, sin, rows, heads, dim, num_threads)


cdef void c_lookup_mul(const uint16_t *gate, const uint16_t *up, int64_t stride, const uint16_t *table, int64_t rows,
                       int64_t n, uint16_t *out, int num_threads) noexcept nogil:
    pp_lookup_mul(gate, up, stride, table, rows, n, out, num_threads)


cdef int c_linear_has_few() noexcept nogil:
    return pp_linear_has_few()


cdef pp_status c_linear_few(const uint16_t *x, int64_t rows, int64_t inputs, const void *weight, const uint16_t *bias,
                            int64_t outputs, uint16_t *out, int num_threads) noexcept nogil:
    return pp_linear_few(x, rows, inputs, weight, bias, outputs, out, num_threads)


cdef pp_status c_linear_quantised(const void *x, pp_dtype dtype, int64_t rows, int64_t inputs,
                                  const pp_quantised *weights, int32_t num_weights, void *out,
                                  int num_threads) noexcept nogil:
    return pp_linear_quantised(x, dtype, rows, inputs, weights, num_weights, out, num_threads)


cdef void c_use_fork_join(size_t fork_join, int team_size) noexcept nogil:
    pp_use_fork_join(<pp_fork_join>fork_join, team_size)


cdef int c_default_num_threads() noexcept nogil:
    return pp_default_num_threads()


cdef int c_num_threads_forced_unusable() noexcept nogil:
    return pp_num_threads_forced_unusable()


cdef const char *c_isa() noexcept nogil:
    return pp_isa()


cdef const char *c_isa_available(int i) noexcept nogil:
    return pp_isa_available(i)


cdef int c_isa_forced_unavailable() noexcept nogil:
    return pp_isa_forced_unavailable()


cdef int c_tiles_refused() noexcept nogil:
    return pp_tiles_refused()
