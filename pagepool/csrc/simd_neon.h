/* simd_neon.h: the vector functions of the kernels for AArch64 Advanced SIMD: 4 lanes. */
#define PP_LANES 4
#define PP_MAX_HEADS 8 /* query heads that share a load */
#define PP_PANEL 6 /* rows of a panel of prefill; with the next two constants, sums use 24 of 32 registers */
#define PP_PANEL_SCORES 4
#define PP_PANEL_VALUES 4
#define PP_STEPS 0
#define PP_16_REGISTERS 0
#define PP_HALF_TAIL 0

typedef float32x4_t pp_v;

static inline pp_v v_load(const float *p) { return vld1q_f32(p); }
static inline void v_store(float *p, pp_v a) { vst1q_f32(p, a); }
static inline pp_v v_set1(float a) { return vdupq_n_f32(a); }
static inline pp_v v_add(pp_v a, pp_v b) { return vaddq_f32(a, b); }
static inline pp_v v_sub(pp_v a, pp_v b) { return vsubq_f32(a, b); }
static inline pp_v v_mul(pp_v a, pp_v b) { return vmulq_f32(a, b); }
static inline pp_v v_div(pp_v a, pp_v b) { return vdivq_f32(a, b); }
static inline pp_v v_fma(pp_v a, pp_v b, pp_v c) { return vfmaq_f32(c, a, b); }
static inline pp_v v_fma_once(pp_v a, pp_v b, pp_v c) { return v_fma(a, b, c); }
/* A factor that several vectors are multiplied by: *b in all lanes. v_fma_broadcast computes a * b + c. */
typedef pp_v pp_broadcast;
static inline pp_broadcast v_broadcast(const float *b) { return v_set1(*b); }
static inline pp_v v_fma_broadcast(pp_v a, pp_broadcast b, pp_v c) { return v_fma(a, b, c); }
/* A NaN in b is kept.  One in a is not, as on the other instruction sets: vmaxq_f32 would keep it, and a score that is
 * not a number would hide the scores of the other rows. */
static inline pp_v v_max(pp_v a, pp_v b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
/* 2^n for a float that holds n * 8 in its last bits. n is at least -127; the result at -127 is 0. */
static inline pp_v v_pow2_eighths(pp_v biased) {
    const uint8x16x2_t table = {{vreinterpretq_u8_u32(vld1q_u32(pp_eighths)),
                                 vreinterpretq_u8_u32(vld1q_u32(pp_eighths + 4))}};
    const uint32x4_t bits = vreinterpretq_u32_f32(biased), at = vandq_u32(bits, vdupq_n_u32(7u));
    const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100u), at, 0x04040404u); /* of the table's numbers */
    const uint32x4_t found = vreinterpretq_u32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(bytes)));
    return vreinterpretq_f32_u32(vaddq_u32(found, vshlq_n_u32(bits, 20)));
}
/* a where x >= limit or x is NaN, else 0. */
static inline pp_v v_zero_below(pp_v a, pp_v x, pp_v limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, limit)));
}
/* Sums lanes i and i + n / 2 until one is left. */
static inline float v_sum(pp_v a) {
    float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
/* Returns 1 if a lane is above `limit`. */
static inline int v_any_above(pp_v a, float limit) {
    return vmaxvq_u32(vcgtq_f32(a, vdupq_n_f32(limit))) != 0;
}
static inline float v_highest(pp_v a) { return vmaxvq_f32(a); }

/* Transposes a square of 2 rows of 2 pairs of lanes, in place. */
static inline void v_transpose_pairs(pp_v *a) {
    const float64x2_t upper = vreinterpretq_f64_f32(a[0]), lower = vreinterpretq_f64_f32(a[1]);
    a[0] = vreinterpretq_f32_f64(vzip1q_f64(upper, lower));
    a[1] = vreinterpretq_f32_f64(vzip2q_f64(upper, lower));
}

/* Two neighbouring rows of `width` columns as f32: columns [column, column + 4) of each. */
static inline void v_load2_f32(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    *a = vld1q_f32((const float *)rows + column);
    *b = vld1q_f32((const float *)rows + width + column);
}
static inline void v_load2_f16(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    const uint16_t *halves = (const uint16_t *)rows + column;
    *a = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
    *b = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + width)));
}
static inline void v_load2_bf16(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    (void)width;
    uint32x4_t words = vld1q_u32((const uint32_t *)rows + column);
    *a = vreinterpretq_f32_u32(vshlq_n_u32(words, 16));
    *b = vreinterpretq_f32_u32(vandq_u32(words, vdupq_n_u32(0xffff0000u)));
}

/* Conversions of 4 adjacent elements between f32 and f16. */
static inline void v_store_f16(uint16_t *to, pp_v a) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
static inline pp_v v_load_f16(const uint16_t *from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }

/* For each number of heads, the accumulators that fit into 32 registers: heads and vectors (two chains each) in one
 * pass over the scores, and vectors in one pass over the values. */
static inline int score_heads(int heads) { return heads; }
static inline int score_vectors(int heads) { return heads <= 2 ? 4 : heads <= 4 ? 2 : 1; }
static inline int chains_apart(int heads) { return (void)heads, 0; }
static inline int value_vectors(int heads) { return heads <= 3 ? 8 : heads <= 6 ? 4 : 2; }
