/* convert_rows.h: rows of elements between f32 and the dtypes of pages, in an instruction set's vocabulary.  Once per
 * ISA. */

static void copy_f32(void *to, const float *from, int64_t n) { memcpy(to, from, (size_t)n * sizeof(float)); }

static void copy_to_f32(float *to, const void *from, int64_t n) { memcpy(to, from, (size_t)n * sizeof(float)); }

/* What an instruction makes of the payload of a NaN is the instruction set's affair; a NaN it stays. */
static void narrow_f16(void *to, const float *from, int64_t n) {
    uint16_t *half = to;
    int64_t i = 0;
    for (; i + PP_LANES <= n; i += PP_LANES) v_store_f16(half + i, v_load(from + i));
    for (; i < n; i++) half[i] = pp_f32_to_f16(from[i]);
}

static void widen_f16(float *to, const void *from, int64_t n) {
    const uint16_t *half = from;
    int64_t i = 0;
    for (; i + PP_LANES <= n; i += PP_LANES) v_store(to + i, v_load_f16(half + i));
    for (; i < n; i++) to[i] = pp_f16_to_f32(half[i]);
}

static void narrow_bf16(void *to, const float *from, int64_t n) {
    uint16_t *half = to;
    for (int64_t i = 0; i < n; i++) half[i] = pp_f32_to_bf16(from[i]);
}

static void widen_bf16(float *to, const void *from, int64_t n) {
    const uint16_t *half = from;
    for (int64_t i = 0; i < n; i++) to[i] = pp_bf16_to_f32(half[i]);
}
