/* decode_dot.h: the work on one tile in arithmetic of bf16, in place of that of decode_kernel.h.
 *
 * Included from decode_kernel.h with PP_DOT (by_instruction, by_fma, by_double) defined, for bf16 pages.  Nothing is
 * widened: pages hold pairs of dims of K and pairs of tokens of V, which is what a dot product of pairs takes.
 *
 *   scores   32 tokens side by side, pairs of dims one after another
 *   softmax  as ever, in f32; then the weights are rounded, pairs of tokens side by side
 *   sums     of the rounded weights: 16 side by side, each a chain over its pair of every tile
 *   values   64 dims side by side, pairs of tokens one after another
 *
 * Queries come rounded and packed as pairs: a float of `q` holds two dims. */

#define V_DOT PP_CAT(v_dot_, PP_DOT, )
#define FLUSH_BEGIN PP_CAT(flush_begin_, PP_DOT, )
#define FLUSH_END PP_CAT(flush_end_, PP_DOT, )
#define FLUSHES PP_CAT(FLUSHES_, PP_DOT, )
#define ROUND_WEIGHTS PP_CAT(round_weights_, PP_DOT, )
#define WEIGH PP_NAME(weigh)
#define ADD_TO_BLOCKS PP_NAME(add_to_blocks)
#define SCORE_VECTORS PP_NAME(score_vectors)

enum { PP_NAME(PAIR_BYTES) = 4 };

/* Adds a pair of dims to NV vectors of scores of HEADS heads. */
PP_INLINE void PP_NAME(score_pair)(const int HEADS, const int NV, const pp_v *k, const float *q, pp_v *sum) {
    PP_UNROLL for (int g = 0; g < HEADS; g++) {
        const pp_v pair = v_set1(q[g]);
        PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = V_DOT(sum[g * NV + j], k[j], pair);
    }
}

/* Whether requests wait for what is computed (prefetch_paced.h): 1 to 6 heads of 128 dims in 0.90 to 0.98 of the time.
 */
PP_INLINE int PP_NAME(is_paced)(int mode) { return PP_WIDE && mode == PP_PREFETCH_PAST; }

/* Scores of NV vectors of tokens, from vector `first` of the tile, for HEADS heads; where subnormals are flushed by a
 * mode, which is none of the scale's, not scaled yet.  From one pair of dims to the next, queries are q_step elements
 * apart. */
PP_INLINE void PP_NAME(scores)(const int HEADS, const int NV, const pp_tile *tile, int first, const float *q,
                               const int q_step, float *s, int prefetch) {
    enum { ROW = PP_GROUP * PP_NAME(PAIR_BYTES) }; /* a pair of dims of a group of tokens */
    const int per_group = PP_GROUP / PP_LANES;
    const unsigned char *rows[4], *ahead[4], *half[4];
    int column[4];
    PP_UNROLL for (int j = 0; j < NV; j++) {
        column[j] = (first + j) % per_group * PP_LANES * PP_NAME(PAIR_BYTES);
        rows[j] = tile->k[(first + j) / per_group] + column[j];
        ahead[j] = tile->next_k[(first + j) / per_group];
        half[j] = tile->v[(first + j) / per_group];
    }
    pp_v sum[PP_MAX_HEADS * 4];
    PP_UNROLL for (int i = 0; i < HEADS * NV; i++) sum[i] = v_set1(0.0f);
    for (int64_t at = 0, end = tile->head_dim / 2 * ROW; at < end; at += ROW, q += q_step) {
        pp_v k[4];
        const int64_t asked = at + (PP_NAME(is_paced)(prefetch) ? zero_after(sum[0]) : 0);
        PP_UNROLL for (int j = 0; j < NV; j++) {
            k[j] = v_load((const float *)(rows[j] + at));
            if (prefetch && column[j] == 0)
                prefetch_walk(prefetch, 1, ROW, ahead[j] + asked, half[j] + asked, rows[j] + asked + PP_NEAR,
                              rows[j] + asked + PP_NEARER);
        }
        PP_NAME(score_pair)(HEADS, NV, k, q, sum);
    }
    const pp_v scale = v_set1(tile->scale);
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++) {
            const pp_v score = sum[g * NV + j];
            v_store(s + g * PP_TILE + (first + j) * PP_LANES, FLUSHES ? score : v_mul(score, scale));
        }
}

/* Makes a head's scores s of a tile weights and rounds these, pairs of tokens side by side, in the same place. */
PP_INLINE void PP_NAME(round_weights)(float *s, float shift) {
    PP_UNROLL for (int t = 0; t < PP_TILE; t += PP_LANES) v_store(s + t, v_exp2(v_sub(v_load(s + t), v_set1(shift))));
    ROUND_WEIGHTS(s, s);
}

/* Adds a head's rounded weights to its running sums. */
PP_INLINE void PP_NAME(sum_weights)(const float *pairs, float *sums) {
    const pp_v ones = (pp_v)((pp_bits)v_set1(0.0f) | 0x3f803f80u);
    PP_UNROLL for (int i = 0; i < PP_TILE / 2; i += PP_LANES)
        v_store(sums + i, V_DOT(v_load(sums + i), v_load(pairs + i), ones));
}

/* Both, where no mode flushes subnormals. */
PP_INLINE void WEIGH(float *s, float shift, float *sums) {
    PP_NAME(round_weights)(s, shift);
    PP_NAME(sum_weights)(s, sums);
}

/* Adds the rounded weights of a tile to the sums of its blocks. */
static __attribute__((noinline)) void ADD_TO_BLOCKS(const pp_tile *tile, int heads, const float *pairs,
                                                    const float *rescale) {
    float p[PP_MAX_HEADS * PP_TILE];
    for (int g = 0; g < heads; g++) widen_pairs(p + g * PP_TILE, pairs + g * PP_TILE, PP_TILE);
    add_to_blocks(tile, heads, p, rescale);
}

/* Vectors of tokens of a pass over the scores: one chain takes half as many registers as two.  4 at most. */
PP_INLINE int SCORE_VECTORS(int heads) {
    const int room = 2 * score_vectors(heads), most = PP_TILE / PP_LANES < 4 ? PP_TILE / PP_LANES : 4;
    return room < most ? room : most;
}

/* The scores of a tile, as far as it has tokens that are seen. */
PP_INLINE void PP_NAME(tile_scores)(const int HEADS, const pp_tile *tile, const float *q, int q_step, float *s,
                                    int prefetch) {
    enum { VECTORS = PP_TILE / PP_LANES };
    const int full = tile->seen >> PP_GROUP ? VECTORS : VECTORS / 2;
    const int pass = score_heads(HEADS), last = HEADS - pass; /* two passes at most */
    const int nv = SCORE_VECTORS(HEADS);
    int vector = tile->seen << PP_GROUP ? 0 : VECTORS / 2;
    for (; vector + nv <= full; vector += nv) {
        PP_NAME(scores)(pass, nv, tile, vector, q, q_step, s, prefetch);
        if (last) PP_NAME(scores)(last, nv, tile, vector, q + pass, q_step, s + pass * PP_TILE, 0);
    }
    for (; vector < full; vector++)
        for (int g = 0; g < HEADS; g++)
            PP_NAME(scores)(1, 1, tile, vector, q + g, q_step, s + g * PP_TILE, g ? 0 : prefetch);
}

/* Adds p V of one or both of two neighbouring tokens: `mask` keeps the halves of those that are seen, since what is not
 * seen may be NaN. */
PP_INLINE void PP_NAME(value_pair)(const int HEADS, const int NV, const int HALF, const uint32_t mask,
                                   const unsigned char *row, const float *pairs, pp_v *sum) {
    pp_v x[8];
    PP_UNROLL for (int j = 0; j < NV; j++) {
        if (HALF) {
            float lanes[PP_LANES] = {0};
            memcpy(lanes, row, sizeof lanes / 2);
            x[j] = v_load(lanes);
        } else {
            x[j] = v_load((const float *)row + j * PP_LANES);
        }
        if (mask != ALL_SEEN) x[j] = keep_bits(x[j], mask);
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++) {
        const pp_v p = v_set1(pairs[g * PP_TILE]);
        PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = V_DOT(sum[g * NV + j], x[j], p);
    }
}

/* Adds p V of tokens [from, to) to NV vectors of dims, from `column` of V's dims on, which lies in a run that is
 * `width` dims wide. */
PP_INLINE void PP_NAME(values)(const int HEADS, const int NV, const int HALF, const pp_tile *tile, const int width,
                               int column, int from, int to, const float *pairs, const float *rescale, float *o,
                               int prefetch) {
    const int64_t run = (int64_t)(column / PP_V_RUN) * PP_V_RUN * PP_GROUP * PP_ITEM;
    pp_v sum[PP_MAX_HEADS * 8];
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++) {
            sum[g * NV + j] = v_load(o + g * tile->row_stride + column + j * PP_LANES);
            if (rescale) sum[g * NV + j] = v_mul(sum[g * NV + j], v_set1(rescale[g]));
        }
    const int row_bytes = width * PP_NAME(PAIR_BYTES), offset = column % PP_V_RUN * PP_NAME(PAIR_BYTES);
    const int64_t v_bytes = (int64_t)tile->v_head_dim * PP_GROUP * PP_ITEM;
    for (int i = 0; i * PP_GROUP < to; i++) {
        const int left = to - i * PP_GROUP, tokens = left < PP_GROUP ? left : PP_GROUP;
        const int before = from - i * PP_GROUP, first = before > 0 ? before : 0;
        if (first >= tokens) continue;
        int t = first & ~1;
        const int64_t at = run + t / 2 * row_bytes, next_run = run + (int64_t)PP_GROUP * width * PP_ITEM;
        const unsigned char *row = tile->v[i] + at + offset, *end = tile->v[i] + v_bytes;
        const unsigned char *ahead = (prefetch ? tile->next_v[i] : tile->v[i]) + at, *half = tile->next_k[i] + at;
        const unsigned char *near = next_run < v_bytes ? tile->v[i] + at + (next_run - run) : half - run;
        const float *weights = pairs + (i * PP_GROUP + t) / 2;
        if (first & 1) { /* the second token alone is seen */
            PP_NAME(value_pair)(HEADS, NV, HALF, 0xffff0000u, row, weights, sum);
            t += 2, weights++, row += row_bytes, ahead += row_bytes, half += row_bytes, near += row_bytes;
        }
        const int both = is_by_both(HEADS, row_bytes, from, to);
        pp_paced paced = paced_values(tile, both, run, row_bytes, i, t);
        for (; t + 1 < tokens; t += 2, weights++, row += row_bytes) {
            if (PP_NAME(is_paced)(prefetch)) {
                prefetch_paced(&paced, both, both ? row_bytes / 2 : row_bytes, sum[0]);
            } else if (prefetch) {
                prefetch_walk(prefetch, 1, row_bytes, ahead, half, near,
                              row + (row + PP_NEARER < end ? PP_NEARER : 0));
                ahead += row_bytes, half += row_bytes, near += row_bytes;
            }
            PP_NAME(value_pair)(HEADS, NV, HALF, ALL_SEEN, row, weights, sum);
        }
        if (t < tokens) /* the second token is not seen */
            PP_NAME(value_pair)(HEADS, NV, HALF, 0x0000ffffu, row, weights, sum);
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            v_store(o + g * tile->row_stride + column + j * PP_LANES, sum[g * NV + j]);
}

/* The sums of weights and the values of a tile, these run by run of tokens that are seen. */
PP_INLINE void PP_NAME(tile_values)(const int HEADS, const pp_tile *tile, const float *pairs, const float *scales,
                                    float *rows, int prefetch) {
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_NAME(sum_weights)(pairs + g * PP_TILE, rows + (g + 1) * tile->row_stride - PP_GROUP);
    const int columns = value_vectors(HEADS) * PP_LANES, dims = tile->v_head_dim, whole = dims / PP_V_RUN * PP_V_RUN;
    uint32_t seen = tile->seen;
    do {
        int from, to;
        seen = take_run(seen, &from, &to);
        int d = 0;
        for (; d < whole; d += columns)
            PP_NAME(values)(HEADS, value_vectors(HEADS), 0, tile, PP_V_RUN, d, from, to, pairs, scales, rows,
                            d % PP_V_RUN ? 0 : prefetch);
        for (; d + PP_LANES <= dims; d += PP_LANES)
            PP_NAME(values)(HEADS, 1, 0, tile, dims - whole, d, from, to, pairs, scales, rows,
                            d == whole ? prefetch : 0);
#if PP_HALF_TAIL
        for (int g = 0; d < dims && g < HEADS; g++)
            PP_NAME(values)(1, 1, 1, tile, dims - whole, d, from, to, pairs + g * PP_TILE,
                            scales ? scales + g : NULL, rows + g * tile->row_stride, d == whole && !g ? prefetch : 0);
#endif
        scales = NULL;
        prefetch = PP_PREFETCH_NONE;
    } while (seen);
}

/* Both stages for a mode that flushes subnormals: not inlined, see dot_by_fma.h. */
PP_FOR_HEADS(flushed_scores, (int heads, const pp_tile *tile, const float *q, int q_step, float *s, int prefetch),
             (heads, tile, q, q_step, s, prefetch),
             PP_NAME(tile_scores)(HEADS, tile, q, q_step, s, prefetch))

PP_FOR_HEADS(flushed_values, (int heads, const pp_tile *tile, const float *pairs, const float *scales, float *rows,
                              int prefetch),
             (heads, tile, pairs, scales, rows, prefetch),
             PP_NAME(tile_values)(HEADS, tile, pairs, scales, rows, prefetch))

/* One tile of one kv head for HEADS of its rows that see the same of it; arguments as in decode_kernel.h. */
PP_INLINE void PP_NAME(tile)(const int HEADS, const pp_tile *tile, const float *q, int q_step, float *rows, float *m,
                             int prefetch) {
    float s[PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64))), rescale[PP_RESCALES];
    if (FLUSHES) {
        const pp_v scale = v_set1(tile->scale);
        const unsigned before = FLUSH_BEGIN();
        PP_NAME(flushed_scores)(HEADS, tile, q, q_step, s, prefetch);
        FLUSH_END(before);
        for (int t = 0; t < HEADS * PP_TILE; t += PP_LANES) v_store(s + t, v_mul(v_load(s + t), scale));
    } else {
        PP_NAME(tile_scores)(HEADS, tile, q, q_step, s, prefetch);
    }
    bend_scores(tile, 0, HEADS, s);
    if (tile->seen != ALL_SEEN) hide_scores(tile, HEADS, s);
    const float *scales = raise_if_above(HEADS, s, m, rows, tile->row_stride, rescale) ? rescale : NULL;
    PP_UNROLL for (int g = 0; g < HEADS; g++) PP_NAME(round_weights)(s + g * PP_TILE, m[g]);
    if (tile->block_sums) ADD_TO_BLOCKS(tile, HEADS, s, scales);
    if (!tile->next_v[0]) prefetch = PP_PREFETCH_NONE;
    if (FLUSHES) {
        const unsigned before = FLUSH_BEGIN();
        PP_NAME(flushed_values)(HEADS, tile, s, scales, rows, prefetch);
        FLUSH_END(before);
    } else {
        PP_NAME(tile_values)(HEADS, tile, s, scales, rows, prefetch);
    }
}

