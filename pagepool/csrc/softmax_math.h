/* softmax_math.h: exp, soft cap, slopes, sums of weights and merging of partial results.  Included once per ISA, after
 * convert_rows.h. */

/* 2^x and exp(x) for x <= 127. x (or x / ln 2) is split into n + r, where n is a multiple of 1/8. 2^n comes from a
 * table and an exponent. 2^r is a polynomial of degree 3 (minimax: error 2.7e-8 of the value); the total error is 1.2
 * ulp.  The kernels compute in base 2, where splitting x takes only additions: only 4 of all operations use the units
 * that multiply, which are busy.  The result is 0 from -127 down; NaN stays NaN. */
#define PP_EIGHTHS 1572864.0f /* 1.5 * 2^20: adding it leaves eighths; the last bits are n * 8 */
PP_INLINE pp_v exp2_of_parts(pp_v biased, pp_v r) {
    const pp_v power = v_pow2_eighths(biased);
    const pp_v p = v_fma(v_fma(v_set1(5.549622327e-2f), r, v_set1(2.402576357e-1f)), r, v_set1(6.931472421e-1f));
    return v_fma(v_mul(power, r), p, power);
}
PP_INLINE pp_v v_exp2(pp_v x) {
    const pp_v eighths = v_set1(PP_EIGHTHS), bounded = v_max(v_set1(-127.0f), x), biased = v_add(bounded, eighths);
    return exp2_of_parts(biased, v_sub(bounded, v_sub(biased, eighths)));
}
PP_INLINE pp_v v_exp(pp_v x) {
    const pp_v eighths = v_set1(PP_EIGHTHS), log2_e = v_set1((float)PP_LOG2_E);
    const pp_v bounded = v_max(v_set1(-88.03f), x), biased = v_fma(bounded, log2_e, eighths);
    const pp_v r = v_fma(bounded, log2_e, v_sub(eighths, biased));
    return exp2_of_parts(biased, v_fma(bounded, v_set1((float)(PP_LOG2_E - (float)PP_LOG2_E)), r));
}

/* The first lane.  The scalar functions below use it to compute one number with exactly the operations of a vector. */
static inline float v_first(pp_v x) {
    float lanes[PP_LANES];
    v_store(lanes, x);
    return lanes[0];
}
static inline float exp2_one(float x) { return v_first(v_exp2(v_set1(x))); }
static inline float exp_one(float x) { return v_first(v_exp(v_set1(x))); }

/* tanh(x) for x from -0.625 to 0.625, odd. */
PP_INLINE pp_v tanh_near(pp_v x) {
    const pp_v z = v_mul(x, x);
    pp_v p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, z, v_set1(2.06390887954e-2f));
    p = v_fma(p, z, v_set1(-5.37397155531e-2f));
    p = v_fma(p, z, v_set1(1.33314422036e-1f));
    p = v_fma(p, z, v_set1(-3.33332819422e-1f));
    return v_fma(v_mul(p, z), x, x);
}

/* tanh(x): a polynomial near 0 (Cephes), by exp elsewhere. */
PP_INLINE pp_v v_tanh(pp_v x) {
    const pp_v one = v_set1(1.0f), border = v_set1(0.625f);
    const pp_v size = v_max(x, v_sub(v_set1(0.0f), x)); /* keeps a NaN in x */
    if (!v_any_above(size, 0.62499994f)) return tanh_near(x); /* the float below 0.625: all lanes are near 0 */
    const pp_v e = v_exp2(v_mul(size, v_set1((float)(-2.0 * PP_LOG2_E)))), far = v_div(v_sub(one, e), v_add(one, e));
    const pp_v small = v_sub(v_set1(0.0f), v_max(v_set1(-0.625f), v_sub(v_set1(0.0f), size)));
    const pp_v near = tanh_near(small);
    const pp_v y = v_add(v_zero_below(far, size, border), v_sub(near, v_zero_below(near, size, border)));
    return v_sub(v_zero_below(v_add(y, y), x, v_set1(0.0f)), y);
}

/* Applies the soft cap, in base 2 like the scores. */
static __attribute__((noinline)) void cap_scores(const pp_tile *tile, int heads, float *s) {
    const pp_v cap = v_set1(tile->cap), inverse = v_set1(tile->inverse_cap);
    for (int t = 0; t < heads * PP_TILE; t += PP_LANES)
        v_store(s + t, v_mul(cap, v_tanh(v_mul(v_load(s + t), inverse))));
}

/* The positions first + t of a tile's tokens.  Each is rounded once, so that it does not depend on the number of lanes,
 * even beyond 2^24.  It is the sum of a multiple of 256, which is exact as a float up to 2^31, and the remainder. */
PP_INLINE void make_positions(int32_t first, pp_v *positions) {
    static const float tokens[PP_TILE] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    const int32_t left = first & 255;
    const pp_v least = v_set1((float)(first - left)), from = v_set1((float)left);
    PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++)
        positions[j] = v_add(least, v_add(from, v_load(tokens + j * PP_LANES)));
}

/* Applies ALiBi to the scores of rows, for the tile that begins `behind` tokens after `tile`. */
static __attribute__((noinline)) void add_slopes(const pp_tile *tile, int behind, int heads, float *s) {
    pp_v positions[PP_TILE / PP_LANES];
    int32_t query = tile->row / tile->group_size, head = tile->row % tile->group_size;
    const int32_t first = (int32_t)tile->distance + behind;
    make_positions(first - query, positions);
    for (int g = 0; g < heads; g++, s += PP_TILE, head++) {
        if (head == tile->group_size) {
            head = 0;
            make_positions(first - ++query, positions);
        }
        const pp_v slope = v_set1(tile->alibi_slopes[head]);
        PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++)
            v_store(s + j * PP_LANES, v_fma(slope, positions[j], v_load(s + j * PP_LANES)));
    }
}

#define ALL_SEEN 0xffffffffu

/* The sum of 16 numbers: lanes i and i + 8, then i and i + 4, ... */
PP_INLINE float tree_sum(const pp_v *x) {
    pp_v sum[PP_GROUP / PP_LANES];
    for (int j = 0; j < PP_GROUP / PP_LANES; j++) sum[j] = x[j];
    for (int half = PP_GROUP / PP_LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) sum[j] = v_add(sum[j], sum[j + half]);
    return v_sum(sum[0]);
}

/* The sum of the 16 running sums of a row. */
PP_INLINE float total_of(const float *sums) {
    pp_v sum[PP_GROUP / PP_LANES];
    for (int j = 0; j < PP_GROUP / PP_LANES; j++) sum[j] = v_load(sums + j * PP_LANES);
    return tree_sum(sum);
}

/* A row's result while its chunks are merged.  `m` and `total` (in all lanes) cover all chunks so far. */
typedef struct merged_row {
    pp_v total;
    float m;
    int empty;        /* no chunk had a token that this row sees */
    const float *sum; /* sums of the first chunk, or the merged sums */
} merged_row;

/* Merges the next chunk's sums, `width` floats, with the sums of the chunks before.  `to` receives the merged sums. */
PP_INLINE void merge_record(merged_row *merged, float *to, const float *sums, float total, float m, int64_t width) {
    const float both = m > merged->m ? m : merged->m;
    const pp_v old_scale = v_exp2(v_set1(merged->m - both)), scale = v_exp2(v_set1(m - both));
    merged->total = v_add(v_mul(merged->total, old_scale), v_mul(v_set1(total), scale));
    merged->m = both;
    for (int64_t d = 0; d < width; d += PP_LANES)
        v_store(to + d, v_fma(v_load(sums + d), scale, v_mul(v_load(merged->sum + d), old_scale)));
    merged->sum = to;
}

/* The same for a sink: it has a weight and no value. */
PP_INLINE void merge_sink(merged_row *merged, float *to, float sink, int64_t width) {
    const float m = pp_in_base_2(sink), both = m > merged->m ? m : merged->m;
    const pp_v old_scale = v_exp2(v_set1(merged->m - both));
    merged->total = v_add(v_mul(merged->total, old_scale), v_exp2(v_set1(m - both)));
    merged->m = both;
    for (int64_t d = 0; d < width; d += PP_LANES) v_store(to + d, v_mul(v_load(merged->sum + d), old_scale));
    merged->sum = to;
}

/* Writes the row's result to out[:dims]. */
static void write_row(const merged_row *merged, float *out, int64_t dims) {
    if (merged->empty) {
        memset(out, 0, (size_t)dims * sizeof(float));
        return;
    }
    int64_t d = 0;
    for (; d + PP_LANES <= dims; d += PP_LANES) v_store(out + d, v_div(v_load(merged->sum + d), merged->total));
    if (d < dims) {
        float rest[PP_LANES];
        v_store(rest, v_div(v_load(merged->sum + d), merged->total));
        memcpy(out + d, rest, (size_t)(dims - d) * sizeof(float));
    }
}

/* The same, converted to `dtype` and stored from element `at` of `out` on. */
static void write_result(const merged_row *merged, void *out, int32_t dtype, int64_t at, int64_t dims) {
    if (dtype == PP_F32) {
        write_row(merged, (float *)out + at, dims);
        return;
    }
    float row[PP_MAX_HEAD_DIM];
    write_row(merged, row, dims);
    (dtype == PP_F16 ? narrow_f16 : narrow_bf16)((uint16_t *)out + at, row, dims);
}
