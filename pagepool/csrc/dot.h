/* dot.h: dot products of pairs of bf16, as vdpbf16ps of AVX512_BF16 has them, bit by bit:
 *
 *     dot(sum, a, b) = fma(a.first, b.first, fma(a.second, b.second, sum))
 *
 * with subnormal operands taken for zeros and subnormal results flushed to zeros.  Included once per ISA, in its target
 * region, with one of three ways: PP_DOT_BY_INSTRUCTION; PP_DOT_BY_FMA, x86's, where MXCSR says that subnormals are
 * flushed (PP_FLUSHES), which it does between flush_begin and flush_end: all dots between them must be in functions
 * that are not inlined, or a compiler may move them out; PP_DOT_BY_DOUBLE, wherever there are doubles. */

#if defined(PP_DOT_BY_INSTRUCTION)
#define PP_FLUSHES 0 /* whatever MXCSR says */

static inline pp_v v_dot(pp_v sum, pp_v a, pp_v b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

/* The weights of a tile to nearest even, subnormal ones as zeros, which is what the instruction makes of them. */
static inline void round_weights(float *pairs, const float *p) {
    v_store(pairs, (pp_v)_mm512_cvtne2ps_pbh(v_load(p + PP_LANES), v_load(p)));
}

#else
#if defined(PP_DOT_BY_FMA)
#define PP_FLUSHES 1
enum { FLUSH_RESULTS = 0x8000, FLUSH_OPERANDS = 0x0040 }; /* bits of MXCSR */

static inline unsigned flush_begin(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | FLUSH_RESULTS | FLUSH_OPERANDS);
    return before;
}
static inline void flush_end(unsigned before) { _mm_setcsr(before); }

static inline pp_v fma_flushed(pp_v a, pp_v b, pp_v sum) { return v_fma(a, b, sum); }

#else
#define PP_FLUSHES 0

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
#endif

static inline pp_v first_of_pairs(pp_v pairs) { return (pp_v)((pp_bits)pairs << 16); }
static inline pp_v second_of_pairs(pp_v pairs) { return (pp_v)((pp_bits)pairs & 0xffff0000u); }

static inline pp_v v_dot(pp_v sum, pp_v a, pp_v b) {
    return fma_flushed(first_of_pairs(a), first_of_pairs(b),
                       fma_flushed(second_of_pairs(a), second_of_pairs(b), sum));
}

static inline void round_weights(float *pairs, const float *p) {
    float normal[PP_TILE];
    for (int t = 0; t < PP_TILE; t++) normal[t] = p[t] < 0x1p-126f ? 0.0f : p[t];
    round_to_pairs(pairs, normal, PP_TILE);
}
#endif
