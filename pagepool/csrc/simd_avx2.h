/* simd_avx2.h: the vector functions of the kernels for AVX2, FMA and F16C: 8 lanes.  Included inside a target
 * region. */
#define PP_LANES 8
#define PP_MAX_HEADS 6 /* query heads that share a load */
#define PP_PANEL 6 /* rows of a panel of prefill; with the next two constants, sums use 12 of 16 registers */
#define PP_PANEL_SCORES 2
#define PP_PANEL_VALUES 2
#define PP_STEPS 0
#define PP_HALF_TAIL 0 /* 8 divides every head_dim */
#define PP_16_REGISTERS 1 /* decode_avx2.h */

typedef __m256 pp_v;

static inline pp_v v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, pp_v a) { _mm256_storeu_ps(p, a); }
static inline pp_v v_set1(float a) { return _mm256_set1_ps(a); }
static inline pp_v v_add(pp_v a, pp_v b) { return _mm256_add_ps(a, b); }
static inline pp_v v_sub(pp_v a, pp_v b) { return _mm256_sub_ps(a, b); }
static inline pp_v v_mul(pp_v a, pp_v b) { return _mm256_mul_ps(a, b); }
static inline pp_v v_div(pp_v a, pp_v b) { return _mm256_div_ps(a, b); }
static inline pp_v v_fma(pp_v a, pp_v b, pp_v c) { return _mm256_fmadd_ps(a, b, c); }
static inline pp_v v_fma_once(pp_v a, pp_v b, pp_v c) { return v_fma(a, b, c); }
/* *sum += a * b, accumulated in the register of the sum.  Compilers prefer the form of fma that overwrites a factor,
 * and then run out of registers. */
static inline void v_add_product(pp_v *sum, pp_v a, pp_v b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
}
/* A factor that several vectors are multiplied by: *b in all lanes. v_fma_broadcast computes a * b + c. */
typedef pp_v pp_broadcast;
static inline pp_broadcast v_broadcast(const float *b) { return _mm256_set1_ps(*b); }
static inline pp_v v_fma_broadcast(pp_v a, pp_broadcast b, pp_v c) {
    v_add_product(&c, a, b);
    return c;
}
/* sum[i] += x[i] * *b for three sums.  One asm statement, because compilers otherwise do not find registers for 12 sums
 * and 4 operands. */
static inline void v_add_products_3(pp_v *sum, const pp_v *x, const float *b) {
    pp_v all;
    __asm__("vbroadcastss %7, %3\n\tvfmadd231ps %3, %4, %0\n\tvfmadd231ps %3, %5, %1\n\tvfmadd231ps %3, %6, %2"
            : "+x"(sum[0]), "+x"(sum[1]), "+x"(sum[2]), "=&x"(all)
            : "x"(x[0]), "x"(x[1]), "x"(x[2]), "m"(*b));
}
/* Keeps a in a register.  Compilers would load it again for each use. */
static inline pp_v v_pinned(pp_v a) {
    __asm__("" : "+x"(a));
    return a;
}
/* The same for 12 vectors. */
static inline void v_pinned_12(pp_v *a) {
    __asm__("" : "+x"(a[0]), "+x"(a[1]), "+x"(a[2]), "+x"(a[3]), "+x"(a[4]), "+x"(a[5]), "+x"(a[6]), "+x"(a[7]),
            "+x"(a[8]), "+x"(a[9]), "+x"(a[10]), "+x"(a[11]));
}
/* A NaN in b is kept. */
static inline pp_v v_max(pp_v a, pp_v b) { return _mm256_max_ps(a, b); }
/* 2^n for a float that holds n * 8 in its last bits. n is at least -127; the result at -127 is 0. */
static inline pp_v v_pow2_eighths(pp_v biased) {
    const __m256i bits = _mm256_castps_si256(biased), table = _mm256_load_si256((const __m256i *)pp_eighths);
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_permutevar8x32_epi32(table, bits), _mm256_slli_epi32(bits, 20)));
}
/* a where x >= limit or x is NaN, else 0. */
static inline pp_v v_zero_below(pp_v a, pp_v x, pp_v limit) {
    return _mm256_and_ps(a, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ));
}
/* Sums lanes i and i + n / 2 until one is left. */
static inline float v_sum(pp_v a) {
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
/* Returns 1 if a lane is above `limit`. */
static inline int v_any_above(pp_v a, float limit) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
}
static inline float v_highest(pp_v a) {
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

/* Transposes a square of 4 rows of 4 pairs of lanes, in place. */
static inline void v_transpose_pairs(pp_v *a) {
    __m256d even[2], odd[2];
    for (int i = 0; i < 2; i++) {
        const __m256d upper = _mm256_castps_pd(a[2 * i]), lower = _mm256_castps_pd(a[2 * i + 1]);
        even[i] = _mm256_unpacklo_pd(upper, lower);
        odd[i] = _mm256_unpackhi_pd(upper, lower);
    }
    a[0] = _mm256_castpd_ps(_mm256_permute2f128_pd(even[0], even[1], 0x20));
    a[1] = _mm256_castpd_ps(_mm256_permute2f128_pd(odd[0], odd[1], 0x20));
    a[2] = _mm256_castpd_ps(_mm256_permute2f128_pd(even[0], even[1], 0x31));
    a[3] = _mm256_castpd_ps(_mm256_permute2f128_pd(odd[0], odd[1], 0x31));
}

/* Loads 8 columns as f32 from the first (even) or the second (odd) of two adjacent rows of `width` columns.  Both take
 * the address in the first row. */
PP_INLINE pp_v v_even_f32(const unsigned char *at) { return _mm256_loadu_ps((const float *)at); }
PP_INLINE pp_v v_odd_f32(const unsigned char *at, int width) {
    return _mm256_loadu_ps((const float *)at + width);
}
PP_INLINE pp_v v_even_f16(const unsigned char *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
PP_INLINE pp_v v_odd_f16(const unsigned char *at, int width) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + 2 * width)));
}
PP_INLINE pp_v v_even_bf16(const unsigned char *at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)at), 16));
}
/* Clearing a register is free, whereas a mask, or shifts to the right and back, each take an issue slot. */
PP_INLINE pp_v v_odd_bf16(const unsigned char *at, int width) {
    pp_v x;
    (void)width;
    __asm__("vpxor %0, %0, %0\n\tvpblendw $0xaa, %1, %0, %0" : "=x"(x) : "m"(*(const __m256i_u *)at));
    return x;
}

/* Conversions of 8 adjacent elements between f32 and f16. */
static inline void v_store_f16(uint16_t *to, pp_v a) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline pp_v v_load_f16(const uint16_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
