/* decode_dot.h: what decode_tile.h does to a pair of dims and to a pair of tokens, in arithmetic of bf16: nothing is
 * widened, since pages hold what a dot product of pairs takes.  Included from decode_kernel.h.
 *
 *   scores   pairs of dims one after another; queries come rounded and packed as pairs: a float holds two dims
 *   softmax  as ever, in f32; then the weights are rounded, pairs of tokens side by side
 *   sums     of the rounded weights: 16 side by side, each a chain over its pair of every tile
 *
 * A dot product has the bits of vdpbf16ps of AVX512_BF16,
 *
 *     dot(sum, a, b) = fma(a.first, b.first, fma(a.second, b.second, sum))
 *
 * with subnormal operands taken for zeros and subnormal results flushed to zeros, in one of three ways:
 *
 *   PP_DOT_BY_INSTRUCTION
 *   PP_DOT_BY_FMA      x86's, while MXCSR says that subnormals are flushed (PP_FLUSHES), from flush_begin to flush_end:
 *                      all dots between them must be in functions that are not inlined, or a compiler may move them out
 *   PP_DOT_BY_DOUBLE   wherever there are doubles.  A product of two bf16 is exact in f64, and where its sum with an
 *                      f32 is not, it lies next to one of the two, far from the middle between two f32: rounding it
 *                      twice does no harm */

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

enum { PP_NAME(QUERY_PAIR) = 1 }; /* numbers in packed queries for a pair of dims, in weights for a pair of tokens */

/* As in decode_exact.h.  A dot takes 6 cycles on Zen 4, and one begins in each: up to 3 heads have too few chains under
 * way in two vectors. */
enum { PP_NAME(TOGETHER) = 3, PP_NAME(BEFORE) = 5 };

#define SCORE_VECTORS PP_NAME(score_vectors)
#define CHAINS_APART(heads) 0
#define WEIGH PP_NAME(weigh)
#define ADD_TO_BLOCKS PP_NAME(add_to_blocks)

PP_INLINE void PP_NAME(load_dims)(const unsigned char *rows, int column, pp_v *a, pp_v *b) {
    (void)b;
    *a = v_load((const float *)rows + column);
}

PP_INLINE void PP_NAME(add_dims)(const int NV, const int EVEN, const int ODD, const pp_v *a, const pp_v *b,
                                 const float *q, pp_v *sum, pp_v *none) {
    const pp_v pair = v_set1(*q);
    (void)EVEN, (void)ODD, (void)b, (void)none;
    PP_UNROLL for (int j = 0; j < NV; j++) sum[j] = v_dot(sum[j], a[j], pair);
}

/* Where subnormals are flushed by a mode, which is none of the scale's, not scaled yet. */
PP_INLINE void PP_NAME(store_scores)(const int EVEN, const int ODD, const pp_tile *tile, float *to, pp_v sum,
                                     pp_v none) {
    (void)EVEN, (void)ODD, (void)none;
    v_store(to, PP_FLUSHES ? sum : v_mul(sum, v_set1(tile->scale)));
}

/* What is not seen may be NaN: the halves of a token that is not, are zeros. */
PP_INLINE void PP_NAME(load_tokens)(const int HALF, const int FIRST, const int SECOND, const unsigned char *rows,
                                    int width, int column, pp_v *a, pp_v *b) {
    (void)width, (void)b;
    if (HALF) {
        float lanes[PP_LANES] = {0};
        memcpy(lanes, rows, sizeof lanes / 2);
        *a = v_load(lanes);
    } else {
        *a = v_load((const float *)rows + column);
    }
    if (!FIRST || !SECOND) *a = keep_bits(*a, FIRST ? 0x0000ffffu : 0xffff0000u);
}

PP_INLINE void PP_NAME(add_token)(const int NV, const int FIRST, const pp_v *x, const float *weights, pp_v *sum) {
    const pp_v pair = v_set1(*weights);
    (void)FIRST; /* and the second one */
    PP_UNROLL for (int j = 0; j < NV; j++) sum[j] = v_dot(sum[j], x[j], pair);
}

/* Adds a head's rounded weights to its running sums. */
PP_INLINE void PP_NAME(sum_weights)(const float *pairs, float *sums) {
    const pp_v ones = (pp_v)((pp_bits)v_set1(0.0f) | 0x3f803f80u);
    PP_UNROLL for (int i = 0; i < PP_TILE / 2; i += PP_LANES)
        v_store(sums + i, v_dot(v_load(sums + i), v_load(pairs + i), ones));
}

/* Makes a head's scores s of a tile weights and rounds these, pairs of tokens side by side, in the same place; adds
 * them to its running sums, unless that has to wait for the mode that flushes subnormals. */
PP_INLINE void WEIGH(float *s, float shift, float *sums) {
    PP_UNROLL for (int t = 0; t < PP_TILE; t += PP_LANES) v_store(s + t, v_exp2(v_sub(v_load(s + t), v_set1(shift))));
    round_weights(s, s);
    if (!PP_FLUSHES) PP_NAME(sum_weights)(s, sums);
}

/* Adds the rounded weights of a tile to the sums of its blocks. */
static __attribute__((noinline)) void ADD_TO_BLOCKS(const pp_tile *tile, int heads, const float *pairs,
                                                    const float *rescale) {
    float p[PP_MAX_HEADS * PP_TILE];
    for (int g = 0; g < heads; g++) widen_pairs(p + g * PP_TILE, pairs + g * PP_TILE, PP_TILE);
    add_to_blocks(tile, heads, p, rescale);
}

/* Vectors of tokens of a pass over the scores: one chain takes half as many registers as two.  4 at most. */
PP_INLINE int SCORE_VECTORS(int heads) {
    const int room = 2 * score_vectors(heads), most = PP_TILE / PP_LANES < 4 ? PP_TILE / PP_LANES : 4;
    return room < most ? room : most;
}
