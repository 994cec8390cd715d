/* decode_whole.h: a tile that all rows of a part see whole, one at a time, where lines are asked for in runs or, by
 * wide units, again and past L2: most of what the walk does where it does not take two tiles at a time (decode_step.h).
 *
 * Included once per dtype from decode_kernel.h; V's dims are a multiple of PP_V_RUN.  It adds in the order of `tile`,
 * bit for bit.  How lines are asked for and what is seen is known when it is compiled, so that no loop tests for it
 * (but of 7 and 8 heads, whose passes over V take turns to ask) and what walks along fits into registers: 40
 * instructions for the 16 fma of a pair of dims of 4 heads in bf16, and not 46.  A busy neighbour on the core leaves
 * few places for them. */

PP_INLINE void PP_NAME(whole_tile)(const int HEADS, const pp_tile *tile, const float *q, float *rows, float *m,
                                   const int prefetch) {
    enum { VECTORS = PP_TILE / PP_LANES }; /* one pass over the scores takes all heads and all of these */
    float s[PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64)));
    float rescale[PP_RESCALES];
    PP_NAME(scores)(HEADS, VECTORS, tile, 0, q, 2 * HEADS, s, prefetch);
    bend_scores(tile, 0, HEADS, s);
    const float *scales = make_weights(HEADS, s, m, rows, tile->row_stride, rescale) ? rescale : NULL;
    if (tile->block_sums) add_to_blocks(tile, HEADS, s, scales);
    const int columns = value_vectors(HEADS) * PP_LANES;
    for (int d = 0; d < tile->v_head_dim; d += columns)
        PP_NAME(values)(HEADS, value_vectors(HEADS), 0, tile, PP_V_RUN, d, 0, PP_TILE, s, scales, rows,
                        d % PP_V_RUN ? PP_PREFETCH_NONE : prefetch);
}

#if PP_WIDE
PP_FOR_HEADS(repeating_tile_of, (int heads, const pp_tile *tile, const float *q, float *rows, float *m),
             (heads, tile, q, rows, m),
             PP_NAME(whole_tile)(HEADS, tile, q, rows, m, PP_PREFETCH_PAST))
#define PP_HEADS_IN_RUNS PP_HEADS_TO_6 /* the walk's is_fast: no more are read in runs */
#else
#define PP_HEADS_IN_RUNS PP_HEADS_TO_2
#endif
PP_FOR_SOME_HEADS(PP_HEADS_IN_RUNS, running_tile_of,
                  (int heads, const pp_tile *tile, const float *q, float *rows, float *m),
                  (heads, tile, q, rows, m),
                  PP_NAME(whole_tile)(HEADS, tile, q, rows, m, PP_PREFETCH_RUN))

/* Takes the tile for all rows of a part, if it is one for this file.  One head of up to 8 KB in 16 bit, of which memory
 * has to deliver a line for 2 fma, is as fast as memory in either way and took 1.01 to 1.03 times as long here on Zen
 * 5.  Zen 4 reads 1 and 2 heads in runs (S3) in 0.97 to 1.00 of the time here. */
PP_INLINE int PP_NAME(take_whole)(int heads, const pp_tile *tile, const float *q, float *rows, float *m,
                                  int prefetch) {
    if (tile->seen != ALL_SEEN || !tile->next_v[0] || tile->v_head_dim % PP_V_RUN) return 0;
    if (prefetch == PP_PREFETCH_RUN)
        PP_NAME(running_tile_of)(heads, tile, q, rows, m);
#if PP_WIDE
    else if (prefetch == PP_PREFETCH_PAST && (heads > 1 || PP_ITEM == 4))
        PP_NAME(repeating_tile_of)(heads, tile, q, rows, m);
#endif
    else
        return 0;
    return 1;
}
#undef PP_HEADS_IN_RUNS
