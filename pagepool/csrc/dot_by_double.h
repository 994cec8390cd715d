/* dot_by_double.h: dot products of pairs of bf16 in f64, for any CPU.  Included once per ISA, after its vocabulary.
 *
 * The bits are those of dot_by_fma.h.  A product of two bf16 is exact in f64, and where its sum with an f32 is not, it
 * lies next to one of the two, far from the middle between two f32: rounding it twice does no harm. */
#include "dot_pairs.h"

enum { FLUSHES_by_double = 0 }; /* needs no mode */

static inline unsigned flush_begin_by_double(void) { return 0; }
static inline void flush_end_by_double(unsigned before) { (void)before; }

/* Zero with the sign of x where x is subnormal, else x. */
static inline pp_v flush_subnormal(pp_v x) {
    const pp_bits bits = (pp_bits)x, normal = (pp_bits)((bits & 0x7f800000u) != 0u);
    return (pp_v)(bits & (normal | 0x80000000u));
}

/* a * b + sum, rounded once; what is subnormal even after rounding becomes zero. */
static inline pp_v fma_flushed(pp_v a, pp_v b, pp_v sum) {
    typedef double doubles __attribute__((vector_size(2 * sizeof(pp_v))));
    typedef uint64_t longs __attribute__((vector_size(2 * sizeof(pp_v))));
    const double lowest = 0x1p-126 - 0x1p-151;
    const doubles x = __builtin_convertvector(flush_subnormal(a), doubles);
    const doubles y = __builtin_convertvector(flush_subnormal(b), doubles);
    const doubles z = __builtin_convertvector(flush_subnormal(sum), doubles), total = x * y + z;
    const longs tiny = (longs)((total < lowest) & (total > -lowest));
    return __builtin_convertvector((doubles)((longs)total & (~tiny | 0x8000000000000000u)), pp_v);
}

static inline pp_v v_dot_by_double(pp_v sum, pp_v a, pp_v b) {
    return fma_flushed(first_of_pairs(a), first_of_pairs(b),
                       fma_flushed(second_of_pairs(a), second_of_pairs(b), sum));
}

static inline void round_weights_by_double(float *pairs, const float *p) { round_weights(pairs, p); }
