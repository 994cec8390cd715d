/* decode_step.h: the straight line of the walk: two neighbouring tiles of one kv head, all seen by all rows.
 *
 * Included once per dtype from decode_kernel.h where PP_IN_STEPS is 1; V's dims are a multiple of PP_V_RUN.  It adds in
 * the order of two tiles, one after the other, bit for bit.  Two at a time, so that softmax can be done between the
 * products: it mostly adds, which other units do than those that multiply.  Of more than 6 heads the first tile's
 * scores become weights, head by head, while the second one's scores are made; these do so while the first tile's
 * values are added up.  Besides, sums of values are loaded and stored half as often.
 *
 * Scores and weights lie tile by tile, in a tile head by head, 32 of each. */

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
        if (left) weigh_next(to_do);
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
            if (WEIGHS && at % (2 * PAIR_BYTES) == 0 && to_do->next < to_do->end) weigh_next(to_do);
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

/* Both tiles for HEADS rows of the kv head; arguments as those of `tile`. */
PP_INLINE void PP_NAME(step)(const int HEADS, const pp_tile *tile, const float *q, int q_step, float *rows, float *m,
                             int prefetch) {
    enum { VECTORS = 2 * PP_TILE / PP_LANES };
    float s[2 * PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64)));
    float rescale[2][PP_RESCALES];
    const float *scales[2];
    const int NV = score_vectors(HEADS), columns = value_vectors(HEADS) * PP_LANES;
    float *second = s + HEADS * PP_TILE;
    weighing to_do = {.end = HEADS, .s = s, .m = m, .rows = rows, .row_stride = tile->row_stride};
    pp_tile one = {.seen = 0};
    if (tile->logits_soft_cap != 0.0f || tile->alibi_slopes || tile->block_sums) one = *tile;
    for (int vector = 0; vector < VECTORS / 2; vector += NV)
        PP_NAME(step_scores)(HEADS, NV, 0, tile, vector, q, q_step, s, NULL, prefetch);
    if (one.logits_soft_cap != 0.0f || one.alibi_slopes) bend_scores(&one, HEADS, s);
    scales[0] = raise_if_above(HEADS, s, m, rows, tile->row_stride, rescale[0]) ? rescale[0] : NULL;
    if (NV == VECTORS / 2) { /* few heads: between their products it takes 1 % more than before them */
        while (to_do.next < to_do.end) weigh_next(&to_do);
        PP_NAME(step_scores)(HEADS, NV, 0, tile, NV, q, q_step, s, NULL, prefetch);
    } else {
        PP_NAME(step_scores)(HEADS, NV, HEADS / 2, tile, VECTORS / 2, q, q_step, s, &to_do, prefetch);
        PP_NAME(step_scores)(HEADS, NV, HEADS - HEADS / 2, tile, VECTORS / 2 + NV, q, q_step, s, &to_do, prefetch);
    }
    if (one.block_sums) add_to_blocks(&one, HEADS, s, scales[0]);
    one.distance += PP_TILE;
    one.begin += PP_TILE;
    if (one.logits_soft_cap != 0.0f || one.alibi_slopes) bend_scores(&one, HEADS, second);
    scales[1] = raise_if_above(HEADS, second, m, rows, tile->row_stride, rescale[1]) ? rescale[1] : NULL;
    to_do.next = 0;
    to_do.s = second;
    PP_NAME(step_values)(HEADS, value_vectors(HEADS), 1, tile, 0, s, scales, rows, &to_do, prefetch);
    if (one.block_sums) add_to_blocks(&one, HEADS, second, scales[1]);
    for (int d = columns; d < tile->v_head_dim; d += columns)
        PP_NAME(step_values)(HEADS, value_vectors(HEADS), 0, tile, d, s, scales, rows, NULL, prefetch);
}

static __attribute__((noinline)) void PP_NAME(step_of)(int heads, const pp_tile *tile, const float *q, int q_step,
                                                       float *rows, float *m, int prefetch) {
    PP_FOR_HEADS(heads, PP_NAME(step)(HEADS, tile, q, q_step, rows, m, prefetch))
}
