/* elementwise_kernel.h: the rows of elementwise.h.  Included once per ISA.
 *
 * The loops are plain C over a fixed number of lanes, which compilers vectorise for each instruction set. */

/* Lanes of the sum of squares: torch adds 4 vectors of 8 lanes side by side. */
enum { PP_SUM_VECTORS = 4, PP_SUM_LANES = 8, PP_SUM_BLOCK = PP_SUM_VECTORS * PP_SUM_LANES, PP_SUM_LEVELS = 4 };

enum { PP_LOOKUP = 128 }; /* elements between two vector loops */

/* Rounds to the nearest bf16, ties to even.  A NaN must have a zero lower half, as all NaNs here: they come from bf16
 * elements, or they are the CPU's default NaN.  It then stays a NaN. */
PP_INLINE uint16_t round_bf16(float value) {
    const uint32_t bits = pp_bits_of(value);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

PP_INLINE float square_of(uint16_t half) {
    const float x = pp_bf16_to_f32(half);
    return x * x;
}

/* Returns the sum of squares in the order of torch.sum over a contiguous dimension.  Sums of 2^power blocks are added
 * to the next level, up to four levels. */
static float sum_of_squares(const uint16_t *row, int64_t n) {
    const int64_t vectors = n / PP_SUM_LANES, blocks = vectors / PP_SUM_VECTORS;
    int64_t bits = 1;
    while (((int64_t)1 << bits) < blocks) bits++;
    const int64_t power = bits / PP_SUM_LEVELS < 4 ? 4 : bits / PP_SUM_LEVELS, step = (int64_t)1 << power;
    float levels[PP_SUM_LEVELS][PP_SUM_BLOCK] = {{0.0f}};
    int64_t block = 0;
    for (;;) {
        const int64_t end = block + step <= blocks ? block + step : blocks;
        const int is_last = block + step > blocks;
        float own[PP_SUM_BLOCK] = {0.0f};
        for (; block < end; block++) {
            const uint16_t *from = row + block * PP_SUM_BLOCK;
            PP_UNROLL for (int i = 0; i < PP_SUM_BLOCK; i++) own[i] += square_of(from[i]);
        }
        if (is_last) {
            memcpy(levels[0], own, sizeof own);
            break;
        }
        for (int i = 0; i < PP_SUM_BLOCK; i++) levels[1][i] += own[i];
        for (int level = 2; level < PP_SUM_LEVELS && !(block & ((step - 1) << (level - 1) * power)); level++)
            for (int i = 0; i < PP_SUM_BLOCK; i++) {
                levels[level][i] += levels[level - 1][i];
                levels[level - 1][i] = 0.0f;
            }
    }
    float *sums = levels[0];
    for (int level = 1; level < PP_SUM_LEVELS; level++)
        for (int i = 0; i < PP_SUM_BLOCK; i++) sums[i] += levels[level][i];
    for (int64_t vector = blocks * PP_SUM_VECTORS; vector < vectors; vector++)
        for (int i = 0; i < PP_SUM_LANES; i++) sums[i] += square_of(row[vector * PP_SUM_LANES + i]);
    for (int vector = 1; vector < PP_SUM_VECTORS; vector++)
        for (int i = 0; i < PP_SUM_LANES; i++) sums[i] += sums[vector * PP_SUM_LANES + i];
    float sum = 0.0f;
    for (int64_t i = vectors * PP_SUM_LANES; i < n; i++) sum += square_of(row[i]);
    for (int i = 0; i < PP_SUM_LANES; i++) sum += sums[i];
    return sum;
}

static void rms_norm_row(const uint16_t *x, const uint16_t *delta, const uint16_t *weight, float eps, int64_t n,
                         uint16_t *sum, uint16_t *out) {
    if (delta) {
        for (int64_t i = 0; i < n; i++) sum[i] = round_bf16(pp_bf16_to_f32(x[i]) + pp_bf16_to_f32(delta[i]));
        x = sum;
    }
    const float scale = 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) {
        const float scaled = pp_bf16_to_f32(round_bf16(pp_bf16_to_f32(x[i]) * scale));
        out[i] = round_bf16(pp_bf16_to_f32(weight[i]) * scaled);
    }
}

/* a * b + c * d, with all three results rounded to bf16. */
PP_INLINE uint16_t sum_of_products(float a, float b, float c, float d) {
    return round_bf16(pp_bf16_to_f32(round_bf16(a * b)) + pp_bf16_to_f32(round_bf16(c * d)));
}

static void rotate_row(uint16_t *x, const uint16_t *cos, const uint16_t *sin, int64_t heads, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t head = 0; head < heads; head++) {
        uint16_t *low = x + head * dim, *high = low + half;
        for (int64_t i = 0; i < half; i++) {
            const float a = pp_bf16_to_f32(low[i]), b = pp_bf16_to_f32(high[i]);
            low[i] = sum_of_products(a, pp_bf16_to_f32(cos[i]), -b, pp_bf16_to_f32(sin[i]));
            high[i] = sum_of_products(b, pp_bf16_to_f32(cos[half + i]), a, pp_bf16_to_f32(sin[half + i]));
        }
    }
}

static void lookup_mul_row(const uint16_t *gate, const uint16_t *up, const uint16_t *table, int64_t n, uint16_t *out) {
    uint16_t found[PP_LOOKUP];
    for (int64_t begin = 0; begin < n; begin += PP_LOOKUP) {
        const int64_t count = n - begin < PP_LOOKUP ? n - begin : PP_LOOKUP;
        for (int64_t i = 0; i < count; i++) found[i] = table[gate[begin + i]];
        for (int64_t i = 0; i < count; i++)
            out[begin + i] = round_bf16(pp_bf16_to_f32(found[i]) * pp_bf16_to_f32(up[begin + i]));
    }
}
