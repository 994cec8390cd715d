/* simd_avx512.h: the vector functions of the kernels for AVX-512 F, BW, DQ, VL: 16 lanes.  Included inside a target
 * region. */
#define PP_LANES 16
#define PP_MAX_HEADS 8 /* query heads that share a load */
#define PP_PANEL 12 /* rows of a panel of prefill; with the next two constants, sums use 24 of 32 registers */
#define PP_PANEL_SCORES 2
#define PP_PANEL_VALUES 4
#define PP_STEPS 1      /* the main loop computes two tiles together if possible */
#define PP_16_REGISTERS 0

typedef __m512 pp_v;

static inline pp_v v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, pp_v a) { _mm512_storeu_ps(p, a); }
static inline pp_v v_set1(float a) { return _mm512_set1_ps(a); }
static inline pp_v v_add(pp_v a, pp_v b) { return _mm512_add_ps(a, b); }
static inline pp_v v_sub(pp_v a, pp_v b) { return _mm512_sub_ps(a, b); }
static inline pp_v v_mul(pp_v a, pp_v b) { return _mm512_mul_ps(a, b); }
static inline pp_v v_div(pp_v a, pp_v b) { return _mm512_div_ps(a, b); }
static inline pp_v v_fma(pp_v a, pp_v b, pp_v c) { return _mm512_fmadd_ps(a, b, c); }
static inline pp_v v_fma_once(pp_v a, pp_v b, pp_v c) { return v_fma(a, b, c); }
/* A factor that several vectors are multiplied by: *b in all lanes. v_fma_broadcast computes a * b + c.
 *
 * Wide units start two fma and two loads in a cycle.  Each fma with a broadcast operand uses a load slot that the other
 * factor needs.  On Zen 5 this form reached 0.76 to 0.83 of the peak rate of fma; with
 * *b in a register for two vectors it was 0.95 to 1.  On Zen 4 an fma takes as long as two of its loads.  The broadcast
 * operand is free there and saves a register, while a separate load for each *b took up to a quarter of the rate. */
#if PP_WIDE
typedef pp_v pp_broadcast;
PP_INLINE pp_broadcast v_broadcast(const float *b) {
    pp_v x = _mm512_set1_ps(*b);
    __asm__("" : "+v"(x)); /* otherwise compilers load it again for each fma */
    return x;
}
PP_INLINE pp_v v_fma_broadcast(pp_v a, pp_broadcast b, pp_v c) { return _mm512_fmadd_ps(a, b, c); }
#else
typedef const float *pp_broadcast;
PP_INLINE pp_broadcast v_broadcast(const float *b) { return b; }
PP_INLINE pp_v v_fma_broadcast(pp_v a, pp_broadcast b, pp_v c) {
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(*b));
    return c;
}
#endif
/* A NaN in b is kept. */
static inline pp_v v_max(pp_v a, pp_v b) { return _mm512_max_ps(a, b); }
/* 2^n for a float that holds n * 8 in its last bits. n is at least -127; the result at -127 is 0.  Inlining is forced:
 * gcc would call the function where softmax is computed between products, because that code is not in a loop of its
 * own, and S5 in bf16 took 1 % longer. */
PP_INLINE pp_v v_pow2_eighths(pp_v biased) {
    const __m512i bits = _mm512_castps_si512(biased);
    const __m512i table = _mm512_broadcast_i32x8(_mm256_load_si256((const __m256i *)pp_eighths));
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_permutexvar_epi32(bits, table), _mm512_slli_epi32(bits, 20)));
}
/* a where x >= limit or x is NaN, else 0. */
static inline pp_v v_zero_below(pp_v a, pp_v x, pp_v limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
}
/* Sums lanes i and i + n / 2 until one is left. */
static inline float v_sum(pp_v a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
/* Returns 1 if a lane is above `limit`. */
static inline int v_any_above(pp_v a, float limit) {
    return _mm512_cmp_ps_mask(a, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}
static inline float v_highest(pp_v a) { return _mm512_reduce_max_ps(a); }

/* Transposes a square of 8 rows of 8 pairs of lanes, in place. */
static inline void v_transpose_pairs(pp_v *a) {
    __m512d two[8], four[8];
    PP_UNROLL for (int i = 0; i < 8; i += 2) { /* rows i and i + 1, pairs 0 2 4 6 and 1 3 5 7 */
        const __m512d upper = _mm512_castps_pd(a[i]), lower = _mm512_castps_pd(a[i + 1]);
        two[i] = _mm512_unpacklo_pd(upper, lower);
        two[i + 1] = _mm512_unpackhi_pd(upper, lower);
    }
    PP_UNROLL for (int i = 0; i < 4; i++) { /* rows 0 to 3 or 4 to 7 of two pairs, p and p + 4, or p + 2 and p + 6 */
        const int at = i / 2 * 4 + i % 2;
        four[at] = _mm512_shuffle_f64x2(two[at], two[at + 2], 0x88);
        four[at + 2] = _mm512_shuffle_f64x2(two[at], two[at + 2], 0xdd);
    }
    PP_UNROLL for (int p = 0; p < 4; p++) {
        a[p] = _mm512_castpd_ps(_mm512_shuffle_f64x2(four[p], four[p + 4], 0x88));
        a[p + 4] = _mm512_castpd_ps(_mm512_shuffle_f64x2(four[p], four[p + 4], 0xdd));
    }
}

/* Two neighbouring rows of `width` columns as f32: columns [column, column + 16) of each. */
PP_INLINE void v_load2_f32(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    *a = _mm512_loadu_ps((const float *)rows + column);
    *b = _mm512_loadu_ps((const float *)rows + width + column);
}
PP_INLINE void v_load2_f16(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    *a = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(rows + 2 * column)));
    *b = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(rows + 2 * (width + column))));
}
PP_INLINE void v_load2_bf16(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    (void)width;
    __m512i words = _mm512_loadu_si512(rows + 4 * column);
    *a = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    *b = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000u)));
}

/* The same for the last 8 columns of a row.  The upper lanes become 0, and nothing after the rows is read. */
#define PP_HALF_TAIL 1
PP_INLINE void v_load2_half_f32(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    *a = _mm512_maskz_loadu_ps(0xff, (const float *)rows + column);
    *b = _mm512_maskz_loadu_ps(0xff, (const float *)rows + width + column);
}
PP_INLINE void v_load2_half_f16(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    __m128i x = _mm_loadu_si128((const __m128i *)(rows + 2 * column));
    __m128i y = _mm_loadu_si128((const __m128i *)(rows + 2 * (width + column)));
    *a = _mm512_cvtph_ps(_mm256_zextsi128_si256(x));
    *b = _mm512_cvtph_ps(_mm256_zextsi128_si256(y));
}
PP_INLINE void v_load2_half_bf16(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    (void)width;
    __m512i words = _mm512_maskz_loadu_epi32(0xff, rows + 4 * column);
    *a = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    *b = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000u)));
}

/* Conversions of 16 adjacent elements between f32 and f16. */
static inline void v_store_f16(uint16_t *to, pp_v a) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline pp_v v_load_f16(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

/* Writes 16 elements of 16 bits into 16 pairs: as the first or, if `odd`, as the second element of each pair.  The
 * other elements are not written, because they may belong to another thread.  With a store for each element, a decode
 * step over pages of bf16 in the CPU caches took 1.9 to 2.5 times as long (Zen 4). */
#define PP_MASKED_STORES 1
PP_INLINE void store_in_pairs(unsigned char *pairs, int odd, const unsigned char *from) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    _mm512_mask_storeu_epi16(pairs, odd ? 0xaaaaaaaa : 0x55555555, odd ? _mm512_slli_epi32(words, 16) : words);
}

/* For each number of heads, the accumulators that fit into 32 registers: heads and vectors in one pass over the scores,
 * whether its two chains run one after the other, and vectors in one pass over the values. */
static inline int score_heads(int heads) { return heads; }
static inline int score_vectors(int heads) { return heads <= 6 || PP_WIDE ? 2 : 1; }
static inline int chains_apart(int heads) { return heads > 6 && PP_WIDE; }
static inline int value_vectors(int heads) { return heads <= 6 ? 4 : 2; }
