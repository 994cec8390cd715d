"""The kernels and worker threads of the C library, for all other modules: they cimport these pointers to them.

So the package carries them once, and there is one choice of the instruction set and one set of threads. Five other
modules repeat only small functions (locks, pages), 13 to 29 each. A shared object for all modules would save little
and take 0.1 ms more to load.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t

from pagepool.csrc cimport (
    pp_decode, pp_default_num_threads, pp_dtype, pp_fork_join, pp_isa, pp_isa_available, pp_isa_forced_unavailable,
    pp_kv_append_rows, pp_kv_gather, pp_merge_states, pp_num_threads_forced_unusable, pp_status, pp_tiles_refused,
    pp_use_fork_join, pp_widen,
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

cdef extern from "step.h" nogil:
    pp_status pp_step_run(const pp_step *step) noexcept

cdef extern from "elementwise.h" nogil:
    void pp_rms_norm(const uint16_t *x, const uint16_t *delta, const uint16_t *weight, float eps, int64_t rows,
                     int64_t n, uint16_t *sum, uint16_t *out, int num_threads) noexcept
    void pp_rotate(uint16_t *x, int64_t stride, const uint16_t *cos, const uint16_t *sin, int64_t rows, int64_t heads,
                   int64_t dim, int num_threads) noexcept
    void pp_lookup_mul(const uint16_t *gate, const uint16_t *up, int64_t stride, const uint16_t *table, int64_t rows,
                       int64_t n, uint16_t *out, int num_threads) noexcept


c_kv_append_rows = pp_kv_append_rows
c_kv_gather = pp_kv_gather
c_widen = pp_widen
c_decode_args = pp_decode
c_merge_states = pp_merge_states
c_weigh = pp_weigh
c_keep_ahead = pp_keep_ahead
c_draw_total = pp_draw_total
c_draw = pp_draw
c_largest_bf16 = pp_largest_bf16
c_rms_norm = pp_rms_norm
c_step_run = pp_step_run
c_rotate = pp_rotate
c_lookup_mul = pp_lookup_mul
c_linear_has_few = pp_linear_has_few
c_linear_few = pp_linear_few
c_linear_quantised = pp_linear_quantised
c_default_num_threads = pp_default_num_threads
c_num_threads_forced_unusable = pp_num_threads_forced_unusable
c_isa = pp_isa
c_isa_available = pp_isa_available
c_isa_forced_unavailable = pp_isa_forced_unavailable
c_tiles_refused = pp_tiles_refused


cdef void c_use_fork_join(size_t fork_join, int team_size) noexcept nogil:
    pp_use_fork_join(<pp_fork_join>fork_join, team_size)
