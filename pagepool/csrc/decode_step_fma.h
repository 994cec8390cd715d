/* decode_step_fma.h: the stages of decode_step.h in exact arithmetic. */

/* Between products of up to 6 heads softmax took 1 % more than before them. */
enum { PP_NAME(TOGETHER) = 0, PP_NAME(BEFORE) = 6 };

/* Scores of NV vectors of tokens, the `first` of 64 / PP_LANES; meanwhile WEIGHED heads become weights. */
PP_INLINE void PP_NAME(step_scores)(const int HEADS, const int NV, const int WEIGHED, const pp_tile *tile,
                                    const int first, const float *q, const int q_step, float *s,
                                    weighing *to_do, int prefetch) {
    enum { VECTORS = PP_TILE / PP_LANES, PER_GROUP = PP_GROUP / PP_LANES };
    const unsigned char *rows[4], *ahead[4], *half[4];
    pp_v even[PP_MAX_HEADS * 4], odd[PP_MAX_HEADS * 4];
    PP_UNROLL for (int j = 0; j < NV; j++) {
        rows[j] = tile->k[(first + j) / PER_GROUP];
        ahead[j] = tile->next_k[(first + j) / PER_GROUP];
        half[j] = tile->v[(first + j) / PER_GROUP];
    }
    PP_UNROLL for (int i = 0; i < HEADS * NV; i++) even[i] = odd[i] = v_set1(0.0f);
    const int64_t end = (int64_t)tile->head_dim / 2 * PP_NAME(K_PAIR_BYTES);
    const int64_t piece = end / PP_NAME(K_PAIR_BYTES) / (WEIGHED + 1) * PP_NAME(K_PAIR_BYTES);
    int64_t at = 0;
    for (int left = WEIGHED; left >= 0; left--) {
        const int64_t stop = left ? at + piece : end;
        for (; at < stop; at += PP_NAME(K_PAIR_BYTES), q += q_step) {
            pp_v a[4], b[4];
            PP_UNROLL for (int j = 0; j < NV; j++) {
                const int column = (first + j) % PER_GROUP * PP_LANES;
                LOAD2(rows[j] + at, PP_GROUP, column, &a[j], &b[j]);
                if (prefetch && column == 0)
                    prefetch_walk(prefetch, PP_ITEM == 4, PP_NAME(K_PAIR_BYTES), ahead[j] + at, half[j] + at,
                                  rows[j] + at + PP_NEAR, rows[j] + at + PP_NEARER);
            }
            PP_UNROLL for (int g = 0; g < HEADS; g++)
                PP_UNROLL for (int j = 0; j < NV; j++) {
                    even[g * NV + j] = v_fma_all(a[j], q + 2 * g, even[g * NV + j]);
                    odd[g * NV + j] = v_fma_all(b[j], q + 2 * g + 1, odd[g * NV + j]);
                }
        }
        if (left) PP_NAME(weigh_next)(to_do);
    }
    PP_UNROLL for (int j = 0; j < NV; j++) {
        float *to = s + (first + j) / VECTORS * HEADS * PP_TILE + (first + j) % VECTORS * PP_LANES;
        PP_UNROLL for (int g = 0; g < HEADS; g++)
            v_store(to + g * PP_TILE, v_add(even[g * NV + j], odd[g * NV + j]));
    }
}

/* Adds p V of both tiles to NV vectors of dims, from `column` of V's dims on; scales: of each tile, or NULL.  What is
 * still to be weighed, of the second tile, is so while the first one is added. */
PP_INLINE void PP_NAME(step_values)(const int HEADS, const int NV, const int WEIGHS, const pp_tile *tile, int column,
                                    const float *p, const float *const *scales, float *o, weighing *to_do,
                                    int prefetch) {
    enum { PAIR_BYTES = 2 * PP_V_RUN * PP_ITEM, RUN_BYTES = PP_GROUP * PP_V_RUN * PP_ITEM };
    const int64_t run = (int64_t)(column / PP_V_RUN) * RUN_BYTES;
    /* Each pass prefetches its part of every pair of rows: Zen 4 drops prefetches that come faster than the memory. */
    const int part = NV * PP_LANES * 2 * PP_ITEM;
    const int64_t from = run + column % PP_V_RUN * 2 * PP_ITEM;
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
        const unsigned char *rows = tile->v[i] + run, *ahead = tile->next_v[i] + from, *half = tile->next_k[i] + from;
        const unsigned char *near = last_run ? half - run : tile->v[i] + from + RUN_BYTES;
        const unsigned char *nearer = tile->v[i] + from, *end = tile->v[i] + run + RUN_BYTES - PP_NEARER;
        const float *weight = p + i / 2 * HEADS * PP_TILE + i % 2 * PP_GROUP;
        for (int64_t at = 0; at < RUN_BYTES; at += PAIR_BYTES, weight += 2) {
            pp_v a[8], b[8];
            if (WEIGHS && at % (2 * PAIR_BYTES) == 0 && to_do->next < to_do->end) PP_NAME(weigh_next)(to_do);
            if (prefetch)
                prefetch_walk(prefetch, PP_ITEM == 4, part, ahead + at, half + at, near + at,
                              nearer + at + (!last_run || nearer + at < end ? PP_NEARER : 0));
            PP_UNROLL for (int j = 0; j < NV; j++)
                LOAD2(rows + at, PP_V_RUN, column % PP_V_RUN + j * PP_LANES, &a[j], &b[j]);
            PP_UNROLL for (int g = 0; g < HEADS; g++)
                PP_UNROLL for (int j = 0; j < NV; j++)
                    sum[g * NV + j] = v_fma_all(a[j], weight + g * PP_TILE, sum[g * NV + j]);
            PP_UNROLL for (int g = 0; g < HEADS; g++)
                PP_UNROLL for (int j = 0; j < NV; j++)
                    sum[g * NV + j] = v_fma_all(b[j], weight + g * PP_TILE + 1, sum[g * NV + j]);
        }
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            v_store(o + g * tile->row_stride + column + j * PP_LANES, sum[g * NV + j]);
}
