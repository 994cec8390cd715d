/* dot_by_instruction.h: dot products of pairs of bf16 by AVX512_BF16.  Included inside a target region that has it.
 *
 * vdpbf16ps: two fma in turn, second elements first, subnormals flushed, whatever MXCSR says. */

enum { FLUSHES_by_instruction = 0 }; /* needs no mode */

static inline unsigned flush_begin_by_instruction(void) { return 0; }
static inline void flush_end_by_instruction(unsigned before) { (void)before; }

static inline pp_v v_dot_by_instruction(pp_v sum, pp_v a, pp_v b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* The weights of a tile to nearest even, subnormal ones as zeros, which is what the instruction makes of them. */
static inline void round_weights_by_instruction(float *pairs, const float *p) {
    v_store(pairs, (pp_v)_mm512_cvtne2ps_pbh(v_load(p + PP_LANES), v_load(p)));
}
