/* decode_step_dot.h: the stages of decode_step.h in arithmetic of bf16. */

/* A dot takes 6 cycles on Zen 4, and one begins in each: up to 3 heads have too few chains under way in two vectors. */
enum { PP_NAME(TOGETHER) = 3, PP_NAME(BEFORE) = 5 };

/* Scores of NV vectors of tokens, the `first` of 64 / PP_LANES; meanwhile WEIGHED heads become weights. */
PP_INLINE void PP_NAME(step_scores)(const int HEADS, const int NV, const int WEIGHED, const int AGAIN,
                                    const pp_tile *tile, const int first, const float *q, float *s, weighing *to_do) {
    enum { VECTORS = PP_TILE / PP_LANES, PER_GROUP = PP_GROUP / PP_LANES, ROW = PP_GROUP * PP_NAME(PAIR_BYTES) };
    const unsigned char *rows[4], *ahead[4], *half[4];
    pp_v sum[PP_MAX_HEADS * 4];
    PP_UNROLL for (int j = 0; j < NV; j++) {
        rows[j] = tile->k[(first + j) / PER_GROUP];
        ahead[j] = tile->next_k[(first + j) / PER_GROUP];
        half[j] = tile->v[(first + j) / PER_GROUP];
    }
    PP_UNROLL for (int i = 0; i < HEADS * NV; i++) sum[i] = v_set1(0.0f);
    const int64_t pairs = tile->head_dim / 2, piece = pairs / (WEIGHED + 1) * ROW, end = pairs * ROW;
    int64_t at = 0;
    for (int left = WEIGHED; left >= 0; left--) {
        const int64_t stop = left ? at + piece : end;
        for (; at < stop; at += ROW, q += PP_QUERY_PAIR * HEADS) {
            pp_v k[4];
            PP_UNROLL for (int j = 0; j < NV; j++) {
                const int column = (first + j) % PER_GROUP * PP_LANES;
                k[j] = v_load((const float *)(rows[j] + at) + column);
                if (AGAIN && column == 0)
                    prefetch_walk(AGAIN, 1, ROW, ahead[j] + at, half[j] + at, rows[j] + at + PP_NEAR,
                                  rows[j] + at + PP_NEARER);
            }
            PP_NAME(score_pair)(HEADS, NV, k, q, sum);
        }
        if (left) PP_NAME(weigh_next)(to_do);
    }
    const pp_v scale = v_set1(tile->scale);
    PP_UNROLL for (int j = 0; j < NV; j++) {
        float *to = s + (first + j) / VECTORS * HEADS * PP_TILE + (first + j) % VECTORS * PP_LANES;
        PP_UNROLL for (int g = 0; g < HEADS; g++) v_store(to + g * PP_TILE, v_mul(sum[g * NV + j], scale));
    }
}

/* Adds p V of both tiles to NV vectors of dims, from `column` of V's dims on; scales: of each tile, or NULL.  What is
 * still to be weighed, of the second tile, is so while the first one is added. */
PP_INLINE void PP_NAME(step_values)(const int HEADS, const int NV, const int WEIGHS, const int AGAIN,
                                    const pp_tile *tile, int column, const float *p, const float *const *scales,
                                    float *o, weighing *to_do) {
    enum { ROW = PP_V_RUN * PP_NAME(PAIR_BYTES), RUN_BYTES = PP_GROUP / 2 * ROW };
    const int64_t run = (int64_t)(column / PP_V_RUN) * RUN_BYTES;
    /* Each pass prefetches its part of every pair of rows: Zen 4 drops prefetches that come faster than the memory. */
    const int part = NV * PP_LANES * PP_NAME(PAIR_BYTES);
    const int64_t from = run + column % PP_V_RUN * PP_NAME(PAIR_BYTES);
    const int last_run = column / PP_V_RUN + 1 == tile->v_head_dim / PP_V_RUN;
    _Static_assert(PP_MAX_HEADS <= 2 * PP_GROUP / 4, "a head with every fourth token of the first tile");
    pp_v sum[PP_MAX_HEADS * 8];
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            sum[g * NV + j] = v_load(o + g * tile->row_stride + column + j * PP_LANES);
    for (int i = 0; i < 4; i++) {
        const float *scale = i % 2 ? NULL : scales[i / 2];
        if (scale)
            PP_UNROLL for (int g = 0; g < HEADS; g++)
                PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = v_mul(sum[g * NV + j], v_set1(scale[g]));
        const unsigned char *row = tile->v[i] + from, *ahead = tile->next_v[i] + from, *half = tile->next_k[i] + from;
        const unsigned char *near = last_run ? half - run : row + RUN_BYTES;
        const unsigned char *end = tile->v[i] + run + RUN_BYTES - PP_NEARER;
        const float *pairs = p + i / 2 * HEADS * PP_TILE + i % 2 * (PP_GROUP / 2);
        for (int64_t at = 0; at < RUN_BYTES; at += ROW, pairs++) {
            if (WEIGHS && at % (2 * ROW) == 0 && to_do->next < to_do->end) PP_NAME(weigh_next)(to_do);
            if (AGAIN)
                prefetch_walk(AGAIN, 1, part, ahead + at, half + at, near + at,
                              row + at + (!last_run || row + at < end ? PP_NEARER : 0));
            PP_NAME(value_pair)(HEADS, NV, 0, ALL_SEEN, row + at, pairs, sum);
        }
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            v_store(o + g * tile->row_stride + column + j * PP_LANES, sum[g * NV + j]);
}
