/* dot_by_fma.h: dot products of pairs of bf16 where there is fma and no instruction for them.  Included once per ISA,
 * in its target region and after its vocabulary.
 *
 *     dot(sum, a, b) = fma(a.first, b.first, fma(a.second, b.second, sum))
 *
 * with subnormal operands taken for zeros and subnormal results flushed to zeros: what AVX512_BF16's vdpbf16ps does,
 * bit by bit.  x86 flushes in the same way when MXCSR says so, which it does between flush_begin and flush_end; all
 * dots between them must be in functions that are not inlined, or a compiler may move them out. */
#include "dot_pairs.h"

enum { FLUSHES_by_fma = 1, FLUSH_RESULTS = 0x8000, FLUSH_OPERANDS = 0x0040 }; /* bits of MXCSR */

static inline unsigned flush_begin_by_fma(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSH_RESULTS | FLUSH_OPERANDS);
    return before;
}
static inline void flush_end_by_fma(unsigned before) { _mm_setcsr(before); }

static inline pp_v v_dot_by_fma(pp_v sum, pp_v a, pp_v b) {
    return v_fma(first_of_pairs(a), first_of_pairs(b), v_fma(second_of_pairs(a), second_of_pairs(b), sum));
}

static inline void round_weights_by_fma(float *pairs, const float *p) { round_weights(pairs, p); }
