/* convert_rows.h: rows of elements between f32 and the dtypes of pages, in an instruction set's vocabulary.  Once per
 * ISA. */

/* What an instruction makes of the payload of a NaN is the instruction set's affair; a NaN it stays. */
static void narrow_f16(void *to, const float *from, int64_t n) {
    uint16_t *half = to;
    int64_t i = 0;
    for (; i + PP_LANES <= n; i += PP_LANES) v_store_f16(half + i, v_load(from + i));
    for (; i < n; i++) half[i] = pp_f32_to_f16(from[i]);
}

/* Returns 16-bit element i.  The rows of a caller may be unaligned. */
static inline uint16_t half_at(const void *from, int64_t i) {
    uint16_t half;
    memcpy(&half, (const char *)from + 2 * i, sizeof half);
    return half;
}

static void widen_f16(float *to, const void *from, int64_t n) {
    int64_t i = 0;
    for (; i + PP_LANES <= n; i += PP_LANES) v_store(to + i, v_load_f16((const uint16_t *)from + i));
    for (; i < n; i++) to[i] = pp_f16_to_f32(half_at(from, i));
}

static void narrow_bf16(void *to, const float *from, int64_t n) {
    uint16_t *half = to;
    for (int64_t i = 0; i < n; i++) half[i] = pp_f32_to_bf16(from[i]);
}

static void widen_bf16(float *to, const void *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = pp_bf16_to_f32(half_at(from, i));
}

/* Returns a caller's row of n elements as f32: the row itself if it is f32, otherwise a copy in `wide`. */
static const float *row_in_f32(int32_t dtype, const void *row, float *wide, int32_t n) {
    if (dtype == PP_F32) return row;
    (dtype == PP_F16 ? widen_f16 : widen_bf16)(wide, row, n);
    return wide;
}

/* Pairs of bf16 in the lanes of a vector of f32: what products of tiles work on.  A lane holds two neighbours, the
 * first in its lower half: dims of q and K, tokens of V and of the weights.  As f32 the lanes mean nothing; they are
 * loaded, broadcast and stored as such because that keeps their bits. */
typedef uint32_t pp_bits __attribute__((vector_size(sizeof(pp_v))));
