/* quantised.h: the work on a tile of quantised pages.  Included once per ISA, after one of simd_vnni.h, simd_madd.h,
 * simd_sdot.h and simd_int.h.
 *
 * Sums over quantised elements are sums of integers, so their order does not change the result: every instruction set,
 * decode and prefill have the same bits.  The factors that are multiplied with them are converted to integers as well
 * (reference/canonical.py):
 *
 *   queries   q[d] times the channel's scale, as integers of up to 32,512 times a scale of the row
 *   weights   of a tile, each times its token's scale of V, as integers of up to 32,512 times a scale of row and tile
 *
 * A packed row of queries has two 32-bit words for each group of four dims, and two words before them: the row's scale
 * times sm_scale, and 128 times the sum of its integers.  The second word is needed because stored K is the integer
 * plus 128.
 *
 * int4 is copied to scratch first, in the order of int8. */

enum { INT_MOST = 32512, INT_WORDS = 2, INT_COLUMNS = PP_GROUP / PP_LANES };

/* The maximum magnitude of a query's integers, so that a score fits into an int32. */
static int32_t most_of_query(int32_t head_dim) {
    const int32_t most = INT32_MAX / (127 * head_dim);
    return most < INT_MOST ? most : INT_MOST;
}

/* Lays out queries as integers. */
static void transpose_quantised(float *to, const float *end, int64_t step, const float *const *row, int32_t rows,
                                int32_t head_dim, float scale, const float *channel_scale) {
    const int32_t limit = most_of_query(head_dim);
    float scaled[PP_MAX_HEAD_DIM];
    int32_t integers[PP_MAX_HEAD_DIM];
    (void)end;
    for (int32_t r = 0; r < rows; r++) {
        const float *q = row[r];
        if (channel_scale) {
            for (int32_t d = 0; d < head_dim; d++) scaled[d] = row[r][d] * channel_scale[d];
            q = scaled;
        }
        float *words = to + r * INT_WORDS;
        words[0] = make_integers(q, head_dim, limit, integers) * scale;
        uint32_t sum = 0;
        for (int32_t d = 0; d < head_dim; d++) sum += (uint32_t)integers[d];
        sum *= 128;
        memcpy(words + 1, &sum, sizeof sum);
        for (int32_t d = 0; d < head_dim; d += 4) ints_of_query(integers + d, words += step);
    }
}

static void pack_quantised_queries(float *to, const pp_queries *from, const pp_kv_layout *layout, int32_t group_size,
                               int32_t num_queries, float sm_scale, const float *channel_scale) {
    pack_parts(transpose_quantised, INT_WORDS, to, from, layout, group_size, num_queries, pp_in_base_2(sm_scale),
               channel_scale);
}

/* Two loops, because PP_UNROLL unrolls at most 16 iterations.  A remaining loop would keep all sums in memory. */
PP_INLINE void ints_clear(const int COUNT, pp_ints *sums) {
    PP_UNROLL for (int i = 0; i < COUNT; i++)
        PP_UNROLL for (int j = 0; j < INT_SUMS; j++) sums[i * INT_SUMS + j] = ints_zero();
}

/* Scores of a tile for HEADS rows, in passes of NV groups.  If `next` is not NULL, it is prefetched line by line. */
PP_INLINE void int_scores_at(const int HEADS, const int NV, const unsigned char *const *k,
                             const unsigned char *const *next, int32_t head_dim, const float *q, int q_step,
                             float *s) {
    enum { NEAR = 1024 };
    pp_ints sums[PP_MAX_HEADS * 2 * INT_SUMS];
    ints_clear(HEADS * NV, sums);
    const float *words = q;
    for (int32_t at = 0; at < head_dim * PP_GROUP; at += 4 * PP_GROUP) {
        pp_int_data data[2 * INT_DATA];
        words += q_step;
        PP_UNROLL for (int j = 0; j < NV; j++) {
            ints_load_k(k[j] + at, data + j * INT_DATA);
            if (!next) continue;
            prefetch_into_l2(next[j] + at, 1);
            prefetch_into_l1(k[j] + at + NEAR);
        }
        PP_UNROLL for (int h = 0; h < HEADS; h++) {
            const pp_factor factor = ints_spread(words + h * INT_WORDS);
            PP_UNROLL for (int j = 0; j < NV; j++)
                ints_add_k(sums + (h * NV + j) * INT_SUMS, data + j * INT_DATA, &factor);
        }
    }
    PP_UNROLL for (int h = 0; h < HEADS; h++) {
        const pp_v scale = v_set1(q[h * INT_WORDS]);
        uint32_t bias;
        memcpy(&bias, q + h * INT_WORDS + 1, sizeof bias);
        PP_UNROLL for (int j = 0; j < NV; j++) {
            const float *k_scale = (const float *)(const void *)(k[j] + head_dim * PP_GROUP);
            pp_v floats[INT_COLUMNS];
            ints_to_floats(sums + (h * NV + j) * INT_SUMS, bias, floats);
            PP_UNROLL for (int i = 0; i < INT_COLUMNS; i++)
                v_store(s + h * PP_TILE + j * PP_GROUP + i * PP_LANES,
                        v_mul(floats[i], v_mul(v_load(k_scale + i * PP_LANES), scale)));
        }
    }
}

/* The number of rows that are computed together with their sums in registers, and the number of groups (scores) or
 * vectors of dims (values) per row. */
PP_INLINE int int_rows(int heads) {
    const int most = INT_REGISTERS / INT_SUMS;
    return heads < most ? heads : most;
}
PP_INLINE int int_vectors(int heads, int most) {
    const int room = INT_REGISTERS / (heads * INT_SUMS);
    return room >= 4 && most >= 4 ? 4 : room >= 2 ? 2 : 1;
}

PP_INLINE void int_scores(const int HEADS, const unsigned char *const *k, const unsigned char *const *next,
                          int32_t head_dim, const float *q, int q_step, float *s) {
    const int ROWS = int_rows(HEADS), NV = int_vectors(ROWS, 2), LEFT = HEADS % ROWS;
    PP_UNROLL for (int j = 0; j < 2; j += NV) {
        for (int h = 0; h + ROWS <= HEADS; h += ROWS)
            int_scores_at(ROWS, NV, k + j, h || !next ? NULL : next + j, head_dim, q + h * INT_WORDS, q_step,
                          s + h * PP_TILE + j * PP_GROUP);
        if (LEFT)
            int_scores_at(LEFT, NV, k + j, NULL, head_dim, q + (HEADS - LEFT) * INT_WORDS, q_step,
                          s + (HEADS - LEFT) * PP_TILE + j * PP_GROUP);
    }
}

/* Copies a tile's scales of V to `scales` and replaces each scale that is not finite by 0.  Returns a mask with a bit
 * set for each replaced scale. */
static uint32_t finite_scales(const unsigned char *const *v, int32_t dims, float *scales) {
    uint32_t bad = 0;
    pp_v sum = v_set1(0.0f);
    for (int j = 0; j < 2; j++)
        memcpy(scales + j * PP_GROUP, v[j] + dims * PP_GROUP, PP_GROUP * sizeof(float));
    PP_UNROLL for (int t = 0; t < PP_TILE; t += PP_LANES)
        sum = v_add(sum, v_sub(v_load(scales + t), v_load(scales + t)));
    if (v_sum(sum) == 0.0f) return 0;
    for (int t = 0; t < PP_TILE; t++)
        if (!isfinite(scales[t])) {
            bad |= 1u << t;
            scales[t] = 0.0f;
        }
    return bad;
}

/* Multiplies a row's weights p by the scales of the tokens and converts the products to integers.  Returns the factor
 * that converts the integers back, or NaN if a token with a scale that is not finite has a weight. */
PP_INLINE float int_weights(const float *p, const float *scales, uint32_t bad, float *words) {
    pp_v x[PP_TILE / PP_LANES];
    PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++)
        x[j] = v_mul(v_load(p + j * PP_LANES), v_load(scales + j * PP_LANES));
    pp_v highest = x[0];
    PP_UNROLL for (int j = 1; j < PP_TILE / PP_LANES; j++) highest = v_max(highest, x[j]);
    const float most = v_highest(highest);
    const int some = most >= PP_LEAST_QUANTISED;
    const pp_v up = v_set1(some ? (float)INT_MOST / most : 0.0f);
    PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++) x[j] = v_add(v_mul(x[j], up), v_set1(PP_ROUND));
    ints_of_weights(x, words);
    for (uint32_t left = bad; left; left &= left - 1)
        if (p[__builtin_ctz(left)] != 0.0f) return NAN;
    return some ? most / (float)INT_MOST : 0.0f;
}

/* Adds a tile's values to NV vectors of dims, beginning at `column` of a run.  The run begins `at` bytes after the
 * start of a group's V; its rows of four tokens are `width` dims wide. */
PP_INLINE void int_values_at(const int HEADS, const int NV, const unsigned char *const *v,
                             const unsigned char *const *next, int64_t at, int width, int column, const float *words,
                             const float *factors, const float *rescale, float *rows, int64_t row_stride) {
    enum { NEAR = 1024 };
    pp_ints sums[PP_MAX_HEADS * 4 * INT_SUMS];
    ints_clear(HEADS * NV, sums);
    for (int j = 0; j < 2; j++) {
        const unsigned char *row = v[j] + at + column * 4;
        const int64_t ahead = next ? distance_of(next[j], v[j]) : 0;
        for (int four = 0; four < PP_GROUP / 4; four++, row += width * 4, words += INT_WORDS) {
            pp_int_data data[4 * INT_DATA];
            PP_UNROLL for (int i = 0; i < NV; i++) {
                ints_load_v(row + i * 64, data + i * INT_DATA);
                if (!next) continue;
                prefetch_into_l2(at_distance(row + i * 64, ahead), 1);
                prefetch_into_l1(row + i * 64 + NEAR);
            }
            PP_UNROLL for (int h = 0; h < HEADS; h++) {
                const pp_factor factor = ints_spread(words + h * PP_TILE / 4 * INT_WORDS);
                PP_UNROLL for (int i = 0; i < NV; i++)
                    ints_add_v(sums + (h * NV + i) * INT_SUMS, data + i * INT_DATA, &factor);
            }
        }
    }
    PP_UNROLL for (int h = 0; h < HEADS; h++)
        PP_UNROLL for (int i = 0; i < NV; i++) {
            pp_v floats[INT_COLUMNS];
            ints_to_floats(sums + (h * NV + i) * INT_SUMS, 0, floats);
            PP_UNROLL for (int c = 0; c < INT_COLUMNS; c++) {
                float *to = rows + h * row_stride + i * PP_GROUP + c * PP_LANES;
                const pp_v old = rescale ? v_mul(v_load(to), v_set1(rescale[h])) : v_load(to);
                v_store(to, v_fma(floats[c], v_set1(factors[h]), old));
            }
        }
}

/* Weights of a tile as integers, for several rows, and the sums to add to.  All pointers are for row 0. */
typedef struct int_rows_of {
    const float *words, *factors, *rescale; /* rescale may be NULL */
    float *sums;
    int64_t row_stride;
} int_rows_of;

/* int_values_at for ROWS rows from row h on.  If `all` is not set, only the first vector is inside the dims. */
PP_INLINE void int_values_of(const int ROWS, const int NV, int all, const unsigned char *const *v,
                             const unsigned char *const *next, int64_t at, int width, int column,
                             const int_rows_of *of, int h) {
    const float *words = of->words + h * PP_TILE / 4 * INT_WORDS, *rescale = of->rescale ? of->rescale + h : NULL;
    float *sums = of->sums + h * of->row_stride + column;
    if (all)
        int_values_at(ROWS, NV, v, next, at, width, column, words, of->factors + h, rescale, sums, of->row_stride);
    else
        int_values_at(ROWS, 1, v, next, at, width, column, words, of->factors + h, rescale, sums, of->row_stride);
}

/* Multiplies HEADS rows of sums by `rescale` unless it is NULL, then adds p V of a tile, where p are the weights. */
PP_INLINE void int_values(const int HEADS, const unsigned char *const *v, const unsigned char *const *next,
                          int32_t dims, const float *p, const float *rescale, float *rows, int64_t row_stride) {
    enum { WORDS = PP_TILE / 4 * INT_WORDS };
    const int ROWS = int_rows(HEADS), NV = int_vectors(ROWS, 4), LEFT = HEADS % ROWS;
    float words[PP_MAX_HEADS * WORDS] __attribute__((aligned(64))), factors[PP_MAX_HEADS], scales[PP_TILE];
    const uint32_t bad = finite_scales(v, dims, scales);
    PP_UNROLL for (int h = 0; h < HEADS; h++)
        factors[h] = int_weights(p + h * PP_TILE, scales, bad, words + h * WORDS);
    for (int32_t d = 0; d < dims; d += PP_V_RUN) {
        const int width = pp_run_width(dims, d);
        const int_rows_of of = {words, factors, rescale, rows + d, row_stride};
        const int64_t at = (int64_t)d * PP_GROUP;
        for (int c = 0, all; c < width; c += all ? NV * PP_GROUP : PP_GROUP) {
            all = width - c > (NV - 1) * PP_GROUP;
            for (int h = 0; h + ROWS <= HEADS; h += ROWS)
                int_values_of(ROWS, NV, all, v, h ? NULL : next, at, width, c, &of, h);
            if (LEFT) int_values_of(LEFT, NV, all, v, NULL, at, width, c, &of, HEADS - LEFT);
        }
    }
}

/* One tile of one kv head for HEADS of its rows that see the same tokens.  The arguments are described at one_tile in
 * decode_tile.h. */
PP_INLINE void quantised_tile(const int HEADS, const pp_tile *tile, const float *q, int q_step, float *rows, float *m,
                          int mode) {
    float s[PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64)));
    float rescale[PP_RESCALES];
    const unsigned char *const *next_k = mode && tile->k_dtype == PP_INT8 ? tile->next_k : NULL;
    const unsigned char *const *next_v = mode && tile->v_dtype == PP_INT8 ? tile->next_v : NULL;
    int_scores(HEADS, tile->k, next_k, tile->head_dim, q, q_step, s);
    transform_scores(tile, 0, HEADS, s);
    if (tile->seen != ALL_SEEN) mask_scores(tile, HEADS, s);
    const float *scales = raise_if_above(HEADS, s, m, rows, tile->row_stride, rescale) ? rescale : NULL;
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        weigh(s + g * PP_TILE, m[g], rows + (g + 1) * tile->row_stride - PP_GROUP);
    int_values(HEADS, tile->v, next_v, tile->v_head_dim, s, scales, rows, tile->row_stride);
}

PP_FOR_HEADS(one_tile_quantised, PP_QUANTISED,
             (int heads, const pp_tile *tile, const float *q, int q_step, float *rows, float *m, int mode),
             (heads, tile, q, q_step, rows, m, mode),
             quantised_tile(HEADS, tile, q, q_step, rows, m, mode))
