/* simd_baseline.h: the vector functions of the kernels in the compiler's generic vectors: 4 lanes, any CPU, no fma, no
 * f16. */
#define PP_LANES 4
#define PP_MAX_HEADS 4 /* query heads that share a load */
#define PP_PANEL 6 /* rows of a panel of prefill; with the next two constants, sums use 12 of 16 registers */
#define PP_PANEL_SCORES 2
#define PP_PANEL_VALUES 2
#define PP_STEPS 0
#define PP_16_REGISTERS 0
#define PP_HALF_TAIL 0

typedef float pp_v __attribute__((vector_size(16)));
typedef int32_t pp_vi __attribute__((vector_size(16)));
typedef uint32_t pp_vu __attribute__((vector_size(16)));

static inline pp_v v_load(const float *p) {
    pp_v a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline void v_store(float *p, pp_v a) { memcpy(p, &a, sizeof a); }
static inline pp_v v_set1(float a) { return (pp_v){a, a, a, a}; }
static inline pp_v v_add(pp_v a, pp_v b) { return a + b; }
static inline pp_v v_sub(pp_v a, pp_v b) { return a - b; }
static inline pp_v v_mul(pp_v a, pp_v b) { return a * b; }
static inline pp_v v_div(pp_v a, pp_v b) { return a / b; }
/* Rounds twice. This is the only difference in bits from the instruction sets with fma. */
static inline pp_v v_fma(pp_v a, pp_v b, pp_v c) { return a * b + c; }
/* Rounds once, and is slow: for bits that must equal those of instruction sets with fma. */
static inline pp_v v_fma_once(pp_v a, pp_v b, pp_v c) {
    for (int i = 0; i < PP_LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
/* A factor that several vectors are multiplied by: *b in all lanes. v_fma_broadcast computes a * b + c. */
typedef pp_v pp_broadcast;
static inline pp_broadcast v_broadcast(const float *b) { return v_set1(*b); }
static inline pp_v v_fma_broadcast(pp_v a, pp_broadcast b, pp_v c) { return v_fma(a, b, c); }
static inline pp_v v_pick(pp_vi mask, pp_v yes, pp_v no) { return (pp_v)((mask & (pp_vi)yes) | (~mask & (pp_vi)no)); }
/* A NaN in b is kept. */
static inline pp_v v_max(pp_v a, pp_v b) { return v_pick(a > b, a, b); }
/* 2^n for a float that holds n * 8 in its last bits. n is at least -127; the result at -127 is 0. */
static inline pp_v v_pow2_eighths(pp_v biased) {
    const pp_vu bits = (pp_vu)biased, at = bits & 7u;
    const pp_vu table = {pp_eighths[at[0]], pp_eighths[at[1]], pp_eighths[at[2]], pp_eighths[at[3]]};
    return (pp_v)(table + (bits << 20));
}
/* a where x >= limit or x is NaN, else 0. */
static inline pp_v v_zero_below(pp_v a, pp_v x, pp_v limit) { return (pp_v)(~(x < limit) & (pp_vi)a); }
/* Sums lanes i and i + n / 2 until one is left. */
static inline float v_sum(pp_v a) { return (a[0] + a[2]) + (a[1] + a[3]); }
/* Returns 1 if a lane is above `limit`. */
static inline int v_any_above(pp_v a, float limit) {
    pp_vi above = a > v_set1(limit);
    return (above[0] | above[1] | above[2] | above[3]) != 0;
}
static inline float v_highest(pp_v a) {
    float b = a[0] > a[2] ? a[0] : a[2], c = a[1] > a[3] ? a[1] : a[3];
    return b > c ? b : c;
}

/* Transposes a square of 2 rows of 2 pairs of lanes, in place. */
static inline void v_transpose_pairs(pp_v *a) {
    const pp_v upper = a[0], lower = a[1];
    a[0] = (pp_v){upper[0], upper[1], lower[0], lower[1]};
    a[1] = (pp_v){upper[2], upper[3], lower[2], lower[3]};
}

/* Two neighbouring rows of `width` columns as f32: columns [column, column + 4) of each. */
static inline void v_load2_f32(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    *a = v_load((const float *)rows + column);
    *b = v_load((const float *)rows + width + column);
}
/* As pp_f16_to_f32: a multiplication corrects the bias of the exponent, for subnormals also; a mask restores infinities
 * and NaN. */
static inline pp_v v_from_f16(const unsigned char *p) {
    uint16_t half[4];
    memcpy(half, p, sizeof half);
    pp_vu bits = {half[0], half[1], half[2], half[3]};
    pp_vu magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
    pp_vu finite = (pp_vu)((pp_v)magnitude * v_set1(0x1p112f));
    pp_vu special = (pp_vu)((pp_vi)magnitude >= 0x7c00 << 13);
    return (pp_v)(sign | (special & (magnitude | 0x7f800000u)) | (~special & finite));
}
static inline void v_load2_f16(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    *a = v_from_f16(rows + 2 * column);
    *b = v_from_f16(rows + 2 * (width + column));
}
static inline void v_load2_bf16(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    (void)width;
    pp_vu words;
    memcpy(&words, rows + 4 * column, sizeof words);
    *a = (pp_v)(words << 16);
    *b = (pp_v)(words & 0xffff0000u);
}

/* Conversions of 4 adjacent elements between f32 and f16. */
static inline void v_store_f16(uint16_t *to, pp_v a) {
    for (int i = 0; i < PP_LANES; i++) to[i] = pp_f32_to_f16(a[i]);
}
static inline pp_v v_load_f16(const uint16_t *from) { return v_from_f16((const unsigned char *)from); }

/* For each number of heads, the accumulators that fit into 16 registers: heads and vectors (two chains each) in one
 * pass over the scores, and vectors in one pass over the values. */
static inline int score_heads(int heads) { return heads <= 3 ? heads : (heads + 1) / 2; }
static inline int score_vectors(int heads) { return heads == 1 ? 4 : 2; }
static inline int chains_apart(int heads) { return (void)heads, 0; }
static inline int value_vectors(int heads) { return heads == 1 ? 8 : heads <= 3 ? 4 : 2; }
