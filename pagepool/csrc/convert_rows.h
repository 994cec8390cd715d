/* convert_rows.h: converts rows of elements between f32 and the dtypes of pages.  Included once per ISA. */

/* A NaN stays a NaN.  Its payload depends on the instruction set. */
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

/* Pairs of bf16 in the lanes of an f32 vector: the operands of products of tiles.  A lane holds two adjacent elements,
 * the first one in its lower half: dims of q and K, or tokens of V and of the weights.  The lanes have no meaning as
 * f32.  They are loaded, broadcast and stored as f32 only because this keeps their bits. */
typedef uint32_t pp_bits __attribute__((vector_size(sizeof(pp_v))));
