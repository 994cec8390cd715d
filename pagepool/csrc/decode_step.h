/* decode_step.h: the straight line of the walk: two neighbouring tiles of one kv head, all seen by all rows.
 *
 * Included once per dtype from decode_kernel.h where PP_IN_STEPS is 1; V's dims are a multiple of PP_V_RUN.  It adds in
 * the order of two tiles, one after the other, bit for bit.  Two at a time, so that softmax can be done between the
 * products: it mostly adds, which other units do than those that multiply.  Of many heads the first tile's scores
 * become weights, head by head, while the second one's scores are made; these do so while the first tile's values are
 * added up.  Besides, sums of values are loaded and stored half as often.
 *
 * Scores and weights lie tile by tile, in a tile head by head, 32 places each.  What differs between arithmetics:
 *
 *   TOGETHER       of up to so many heads the scores of both tiles are made at once
 *   BEFORE         of up to so many the first tile's softmax is done before the second one's scores
 *   step_scores    scores of some vectors of both tiles' tokens
 *   step_values    p V of both tiles for some vectors of dims
 *
 * AGAIN: the mode, which asks for lines again, or PP_PREFETCH_NONE, where a former part of the rows has asked. */

/* Makes the next head's scores weights, and adds them to its running sums. */
PP_INLINE void PP_NAME(weigh_next)(weighing *to_do) {
    const int g = to_do->next++;
    WEIGH(to_do->s + g * PP_TILE, to_do->m[g], to_do->rows + (g + 1) * to_do->row_stride - PP_GROUP);
}

#ifdef PP_DOT
#include "decode_step_dot.h"
#else
#include "decode_step_fma.h"
#endif

/* Both tiles for HEADS rows of the kv head; arguments as those of `tile`. */
PP_INLINE void PP_NAME(step)(const int HEADS, const int AGAIN, const pp_tile *tile, const float *q, float *rows,
                             float *m) {
    enum { VECTORS = 2 * PP_TILE / PP_LANES };
    _Static_assert((int)PP_NAME(TOGETHER) <= (int)PP_NAME(BEFORE), "weights of the first tile are made somewhere");
    float s[2 * PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64)));
    float rescale[2][PP_RESCALES];
    const float *scales[2];
    const int NV = HEADS <= PP_NAME(TOGETHER) ? VECTORS : SCORE_VECTORS(HEADS);
    const int columns = value_vectors(HEADS) * PP_LANES;
    float *second = s + HEADS * PP_TILE;
    weighing to_do = {.end = HEADS, .s = s, .m = m, .rows = rows, .row_stride = tile->row_stride};
    pp_tile one = {.seen = 0};
    if (tile->block_sums) one = *tile;
    for (int vector = 0; vector < VECTORS / 2; vector += NV)
        PP_NAME(step_scores)(HEADS, NV, 0, AGAIN, tile, vector, q, s, NULL);
    bend_scores(tile, 0, HEADS, s);
    scales[0] = raise_if_above(HEADS, s, m, rows, tile->row_stride, rescale[0]) ? rescale[0] : NULL;
    if (HEADS <= PP_NAME(BEFORE)) {
        while (to_do.next < to_do.end) PP_NAME(weigh_next)(&to_do);
        if (NV < VECTORS) PP_NAME(step_scores)(HEADS, NV, 0, AGAIN, tile, NV, q, s, NULL);
    } else if (NV == VECTORS / 2) {
        PP_NAME(step_scores)(HEADS, NV, HEADS, AGAIN, tile, NV, q, s, &to_do);
    } else {
        PP_NAME(step_scores)(HEADS, NV, HEADS / 2, AGAIN, tile, VECTORS / 2, q, s, &to_do);
        PP_NAME(step_scores)(HEADS, NV, HEADS - HEADS / 2, AGAIN, tile, VECTORS / 2 + NV, q, s, &to_do);
    }
    if (one.block_sums) ADD_TO_BLOCKS(&one, HEADS, s, scales[0]);
    one.begin += PP_TILE;
    bend_scores(tile, PP_TILE, HEADS, second);
    scales[1] = raise_if_above(HEADS, second, m, rows, tile->row_stride, rescale[1]) ? rescale[1] : NULL;
    to_do.next = 0;
    to_do.s = second;
    PP_NAME(step_values)(HEADS, value_vectors(HEADS), 1, AGAIN, tile, 0, s, scales, rows, &to_do);
    if (one.block_sums) ADD_TO_BLOCKS(&one, HEADS, second, scales[1]);
    for (int d = columns; d < tile->v_head_dim; d += columns)
        PP_NAME(step_values)(HEADS, value_vectors(HEADS), 0, AGAIN, tile, d, s, scales, rows, NULL);
}

/* How lines are asked for is known, so that no loop tests it. */
PP_FOR_HEADS(quiet_step_of, (int heads, const pp_tile *tile, const float *q, float *rows, float *m),
             (heads, tile, q, rows, m),
             PP_NAME(step)(HEADS, PP_PREFETCH_NONE, tile, q, rows, m))
PP_FOR_HEADS(repeating_step_of, (int heads, const pp_tile *tile, const float *q, float *rows, float *m),
             (heads, tile, q, rows, m),
             PP_NAME(step)(HEADS, PP_PREFETCH_REPEAT, tile, q, rows, m))
#if PP_WIDE
PP_FOR_HEADS(past_step_of, (int heads, const pp_tile *tile, const float *q, float *rows, float *m),
             (heads, tile, q, rows, m),
             PP_NAME(step)(HEADS, PP_PREFETCH_PAST, tile, q, rows, m))
#endif
