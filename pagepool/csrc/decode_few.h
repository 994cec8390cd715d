/* decode_few.h: scores and values of a tile where there are 16 registers only, and no operand that spreads over lanes.
 *
 * Included once per dtype from decode_kernel.h, instead of the stages there.  What counts here:
 *
 *   Every weight (an element of a query, a softmax weight) is a load of its own, and two loads start in a cycle, as
 *   two fma do: each load must serve two fma or more.  Eight fma must be under way at any time.  So 8 to 12 sums, 2 to
 *   4 vectors wide, and the scores' two chains one after the other: half of the sums, each load serves twice as many.
 *   A sum that is spilled makes its loop wait for memory.  Compilers do spill unless each stage is a function by
 *   itself, fma add in place (v_add_product) and loaded vectors stay loaded (v_kept).
 *   There is room for few prefetches.  They are spread over all passes and parts, so that lines are asked for no
 *   faster than they come: Zen 4 presumably drops what its queue has no place for. */

/* How one of `parts` parts of a head's rows, the one at `place`, prefetches.  They read the same bytes one after the
 * other.  Where lines are asked for repeatedly, each of the first two asks for all that is next; in f32, which memory
 * delivers hardly faster than it is used, their four stages for a quarter each, if K and V have as many lines, in whole
 * runs. */
PP_INLINE int PP_NAME(part_prefetch)(int mode, int place, int parts, const pp_tile *tile) {
    if (mode == PP_PREFETCH_RUN) mode = PP_PREFETCH_REPEAT; /* a third time took 1.2 times as long in f32 */
    if (mode != PP_PREFETCH_REPEAT) return place == 0 ? mode : PP_PREFETCH_NONE;
    if (parts == 1) return mode;
    if (place > 1) return PP_PREFETCH_NONE;
    if (PP_ITEM == 2 || tile->head_dim != tile->v_head_dim || tile->head_dim % PP_V_RUN || !tile->next_v[0])
        return PP_PREFETCH_L2;
    return place == 0 ? PP_PREFETCH_EARLY : PP_PREFETCH_LATE;
}

/* A stage's quarter: a group's K or V, which is read a head's visit later, and once more the quarter before it; of
 * each what begins `from` bytes from its beginning. */
PP_INLINE void PP_NAME(quarter_of)(int mode, const int VALUES, const pp_tile *tile, int64_t from,
                                   const unsigned char **next, const unsigned char **again) {
    const unsigned char *const *group = mode == PP_PREFETCH_EARLY ? tile->next_k : tile->next_v;
    const unsigned char *before = mode == PP_PREFETCH_EARLY ? tile->v[1] : tile->next_k[1];
    *next = group[VALUES] + from;
    *again = (VALUES ? group[0] : before) + from;
}

/* Adds to HEADS x NV sums the products of NV vectors, each of the first or (ODD) the second of two neighbouring rows
 * that are `width` elements long, with a weight per head.  The weights of up to three heads stay in registers while the
 * vectors come one by one; of more heads the weights come one by one, for two vectors each, and once more for the next
 * two, or for three.  12 sums, three weights and a vector are all 16 registers: compilers find these places only where
 * they are told before and after that the sums are in registers. */
PP_INLINE void PP_NAME(add_products)(const int HEADS, const int NV, const int ODD, const unsigned char *const *at,
                                     int width, const float *weight, const int weight_step, pp_v *sum) {
    const int AT_ONCE = HEADS <= 3 ? 1 : NV == 3 ? 3 : 2;
    pp_v x[8], w[PP_MAX_HEADS];
    if (HEADS == 3 && NV == 4) v_kept_12(sum);
    PP_UNROLL for (int i = 0; i < NV; i += AT_ONCE) {
        PP_UNROLL for (int j = i; j < i + AT_ONCE; j++) {
            pp_v a, b;
            LOAD2(at[j], width, 0, &a, &b);
            x[j] = ODD ? b : a;
            if (HEADS > 1) x[j] = v_kept(x[j]);
        }
        PP_UNROLL for (int g = 0; g < HEADS; g++) {
            if (AT_ONCE == 3) {
                v_add_products_3(sum + g * NV, x, weight + g * weight_step);
                continue;
            }
            if (i == 0 || AT_ONCE == 2) w[g] = v_set1(weight[g * weight_step]);
            PP_UNROLL for (int j = i; j < i + AT_ONCE; j++) v_add_product(&sum[g * NV + j], x[j], w[g]);
        }
    }
    if (HEADS == 3 && NV == 4) v_kept_12(sum);
}

/* Scores of NV vectors of tokens, from vector `first` of the tile, for HEADS heads: two chains of fma, over EVEN and
 * over ODD dims, the latter after the former or both at once.  From one pair of dims to the next, queries are q_step
 * elements apart. */
PP_INLINE void PP_NAME(scores)(const int HEADS, const int NV, const int EVEN, const int ODD, const int QUARTERS,
                               const pp_tile *tile, int first, const float *q, int64_t q_step, float *s,
                               int prefetch) {
    enum { PAIRS = 2, BYTES = PAIRS * PP_NAME(K_PAIR_BYTES), PER_GROUP = PP_GROUP / PP_LANES };
    const int group = first / PER_GROUP;
    const unsigned char *rows[2] = {tile->k[group], tile->k[1]};
    /* What is read a head's visit later and half a visit later.  Each chain asks for its share of both; in 16 bit the
     * one asks for all of what is near, the other for what is far, which came out faster. */
    const unsigned char *visit[2] = {tile->next_k[group], tile->next_k[1]}, *half[2] = {tile->v[group], tile->v[1]};
    const int share = EVEN && ODD ? BYTES : BYTES / 2;
    const int64_t from = EVEN ? 0 : share;
    /* Of the stage's quarter each chain of each call asks for its share. */
    const int piece = NV * share / 4;
    const int64_t calls_before = NV == 4 ? ODD : 2 * group + ODD;
    if (QUARTERS)
        PP_NAME(quarter_of)(prefetch, 0, tile, tile->head_dim / 2 / PAIRS * piece * calls_before, &visit[0], &half[0]);
    pp_v even[PP_MAX_HEADS * 4], odd[PP_MAX_HEADS * 4];
    PP_UNROLL for (int i = 0; i < HEADS * NV; i++) even[i] = odd[i] = v_set1(0.0f);
    for (int p = 0; p < tile->head_dim / 2; p += PAIRS) {
        if (QUARTERS) {
            prefetch_into_l2(visit[0], piece);
            prefetch_into_l2(half[0], piece);
            visit[0] += piece, half[0] += piece;
        } else if (prefetch) {
            PP_UNROLL for (int i = 0; i * PER_GROUP < NV; i++) {
                const int twice = prefetch == PP_PREFETCH_REPEAT, whole = twice && PP_ITEM == 2;
                if (!whole) prefetch_once(prefetch, visit[i] + from, share);
                if (!whole && twice) prefetch_into_l2(half[i] + from, share);
                if (whole && EVEN) prefetch_into_l2(half[i], BYTES);
                if (whole && ODD) prefetch_into_l2(visit[i], BYTES);
                visit[i] += BYTES, half[i] += BYTES;
            }
        }
        PP_UNROLL for (int i = 0; i < PAIRS; i++, q += q_step) {
            const unsigned char *at[4];
            PP_UNROLL for (int j = 0; j < NV; j++)
                at[j] = rows[j / PER_GROUP] + i * PP_NAME(K_PAIR_BYTES) + j % PER_GROUP * PP_LANES * PP_COLUMN;
            if (EVEN) PP_NAME(add_products)(HEADS, NV, 0, at, PP_GROUP, q, 2, even);
            if (ODD) PP_NAME(add_products)(HEADS, NV, 1, at, PP_GROUP, q + 1, 2, odd);
        }
        rows[0] += BYTES;
        rows[1] += BYTES;
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            store_chains(EVEN, ODD, s + g * PP_TILE + (first + j) * PP_LANES, even[g * NV + j], odd[g * NV + j]);
}

/* One chain of 2 to 6 heads. */
PP_INLINE void PP_NAME(chain)(const int ODD, const int QUARTERS, int heads, const pp_tile *tile, int first,
                              const float *q, int64_t q_step, float *s, int prefetch) {
    switch (heads) {
    case 2: PP_NAME(scores)(2, 4, !ODD, ODD, QUARTERS, tile, first, q, q_step, s, prefetch); break;
    case 3: PP_NAME(scores)(3, 4, !ODD, ODD, QUARTERS, tile, first, q, q_step, s, prefetch); break;
    case 4: PP_NAME(scores)(4, 2, !ODD, ODD, QUARTERS, tile, first, q, q_step, s, prefetch); break;
    case 5: PP_NAME(scores)(5, 2, !ODD, ODD, QUARTERS, tile, first, q, q_step, s, prefetch); break;
    case 6: PP_NAME(scores)(6, 2, !ODD, ODD, QUARTERS, tile, first, q, q_step, s, prefetch); break;
    }
}

/* Quarters are apart, since what a loop does not prefetch costs it 7 % of its time nevertheless. */
static __attribute__((noinline)) void PP_NAME(even_scores)(int heads, const pp_tile *tile, int first, const float *q,
                                                           int64_t q_step, float *s, int prefetch) {
    PP_NAME(chain)(0, 0, heads, tile, first, q, q_step, s, prefetch);
}
static __attribute__((noinline)) void PP_NAME(odd_scores)(int heads, const pp_tile *tile, int first, const float *q,
                                                          int64_t q_step, float *s, int prefetch) {
    PP_NAME(chain)(1, 0, heads, tile, first, q, q_step, s, prefetch);
}
static __attribute__((noinline)) void PP_NAME(even_in_quarters)(int heads, const pp_tile *tile, int first,
                                                                const float *q, int64_t q_step, float *s,
                                                                int prefetch) {
    PP_NAME(chain)(0, 1, heads, tile, first, q, q_step, s, prefetch);
}
static __attribute__((noinline)) void PP_NAME(odd_in_quarters)(int heads, const pp_tile *tile, int first,
                                                               const float *q, int64_t q_step, float *s,
                                                               int prefetch) {
    PP_NAME(chain)(1, 1, heads, tile, first, q, q_step, s, prefetch);
}

/* The same head by head: of a lone head, or of one group of the tile where the other is not seen. */
static __attribute__((noinline)) void PP_NAME(scores_by_head)(int heads, int vectors, const pp_tile *tile, int first,
                                                              const float *q, int64_t q_step, float *s, int prefetch) {
    for (int g = 0; g < heads; g++, q += 2, s += PP_TILE, prefetch = PP_PREFETCH_NONE)
        if (vectors == 4)
            PP_NAME(scores)(1, 4, 1, 1, 0, tile, first, q, q_step, s, prefetch);
        else
            PP_NAME(scores)(1, 2, 1, 1, 0, tile, first, q, q_step, s, prefetch);
}

/* Scores of the vectors [first, end) of the tile: those of one or both of its groups. */
PP_INLINE void PP_NAME(tile_scores)(int heads, const pp_tile *tile, int first, int end, const float *q, int64_t q_step,
                                    float *s, int prefetch) {
    const int step = heads <= 3 ? 4 : 2;
    if (heads == 1 || end - first < step) {
        const int mode = prefetch > PP_PREFETCH_REPEAT ? PP_PREFETCH_L2 : prefetch;
        PP_NAME(scores_by_head)(heads, end - first, tile, first, q, q_step, s, mode);
        return;
    }
    for (; first < end; first += step)
        if (PP_ITEM == 4 && prefetch > PP_PREFETCH_REPEAT) {
            PP_NAME(even_in_quarters)(heads, tile, first, q, q_step, s, prefetch);
            PP_NAME(odd_in_quarters)(heads, tile, first, q, q_step, s, prefetch);
        } else {
            PP_NAME(even_scores)(heads, tile, first, q, q_step, s, prefetch);
            PP_NAME(odd_scores)(heads, tile, first, q, q_step, s, prefetch);
        }
}

/* Adds p V of all tokens of the tile to NV vectors of dims, from `column` of V's dims on, which lies in a run that is
 * `width` dims wide. */
PP_INLINE void PP_NAME(values)(const int HEADS, const int NV, const int QUARTERS, const pp_tile *tile, int width,
                               int column, const float *p, float *o, int prefetch) {
    const int64_t run = (int64_t)(column / PP_V_RUN) * PP_V_RUN * PP_GROUP * PP_ITEM, pair_bytes = 2 * width * PP_ITEM;
    const int64_t ahead = run + column % PP_V_RUN * (2 * PP_ITEM); /* of each pair, what is as long as its part here */
    const int bytes = NV * PP_LANES * 2 * PP_ITEM;
    /* Of the stage's quarter each pass asks for the lines that begin within its share: of the 4 of a pair of rows where
     * they go as 3, 3 and 2 vectors, two, one and one. */
    const int piece = NV == 3 ? 64 : bytes / 2;
    const int one_more = NV == 3 && column % PP_V_RUN == 0, line = (column % PP_V_RUN * PP_ITEM + 63) / 64;
    pp_v sum[PP_MAX_HEADS * 8];
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            sum[g * NV + j] = v_load(o + g * tile->row_stride + column + j * PP_LANES);
    for (int i = 0; i < 2; i++) {
        const unsigned char *row = tile->v[i] + run + column % PP_V_RUN * PP_COLUMN;
        const unsigned char *visit = (prefetch ? tile->next_v[i] : tile->v[i]) + ahead, *half = tile->next_k[i] + ahead;
        const int64_t lines_before = run + line * 64 + i * (PP_GROUP / 4 * pair_bytes);
        if (QUARTERS) PP_NAME(quarter_of)(prefetch, 1, tile, lines_before, &visit, &half);
        for (int t = 0; t < PP_GROUP; t += 2, p += 2, row += pair_bytes) {
            if (QUARTERS) {
                prefetch_into_l2(visit, piece);
                prefetch_into_l2(half, piece);
                if (one_more) prefetch_into_l2(visit + piece, 64);
                if (one_more) prefetch_into_l2(half + piece, 64);
                visit += pair_bytes / 2, half += pair_bytes / 2;
            } else if (prefetch) {
                prefetch_once(prefetch, visit, bytes);
                if (prefetch == PP_PREFETCH_REPEAT) prefetch_into_l2(half, bytes);
                visit += pair_bytes, half += pair_bytes;
            }
            const unsigned char *at[8];
            PP_UNROLL for (int j = 0; j < NV; j++) at[j] = row + j * PP_LANES * PP_COLUMN;
            PP_NAME(add_products)(HEADS, NV, 0, at, width, p, PP_TILE, sum);
            PP_NAME(add_products)(HEADS, NV, 1, at, width, p + 1, PP_TILE, sum);
        }
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            v_store(o + g * tile->row_stride + column + j * PP_LANES, sum[g * NV + j]);
}

/* The next vectors of dims of a run: how many is returned.  The 8 of a run with 4 heads go as 3, 3 and 2. */
PP_INLINE int PP_NAME(next_values)(const int QUARTERS, int heads, const pp_tile *tile, int column, const float *p,
                                   float *o, int prefetch) {
    switch (heads) {
    case 1: PP_NAME(values)(1, 8, QUARTERS, tile, PP_V_RUN, column, p, o, prefetch); return 8;
    case 2: PP_NAME(values)(2, 4, QUARTERS, tile, PP_V_RUN, column, p, o, prefetch); return 4;
    case 3: PP_NAME(values)(3, 4, QUARTERS, tile, PP_V_RUN, column, p, o, prefetch); return 4;
    case 4:
        if (column % PP_V_RUN < 6 * PP_LANES) {
            PP_NAME(values)(4, 3, QUARTERS, tile, PP_V_RUN, column, p, o, prefetch);
            return 3;
        }
        PP_NAME(values)(4, 2, QUARTERS, tile, PP_V_RUN, column, p, o, prefetch);
        return 2;
    case 5: PP_NAME(values)(5, 2, QUARTERS, tile, PP_V_RUN, column, p, o, prefetch); return 2;
    default: PP_NAME(values)(6, 2, QUARTERS, tile, PP_V_RUN, column, p, o, prefetch); return 2;
    }
}
static __attribute__((noinline)) int PP_NAME(run_values)(int heads, const pp_tile *tile, int column, const float *p,
                                                         float *o, int prefetch) {
    return PP_NAME(next_values)(0, heads, tile, column, p, o, prefetch);
}
static __attribute__((noinline)) int PP_NAME(run_in_quarters)(int heads, const pp_tile *tile, int column,
                                                              const float *p, float *o, int prefetch) {
    return PP_NAME(next_values)(1, heads, tile, column, p, o, prefetch);
}

/* Two vectors of dims of a run that is no PP_V_RUN wide, or of any run. */
static __attribute__((noinline)) void PP_NAME(narrow_values)(int heads, const pp_tile *tile, int width, int column,
                                                             const float *p, float *o, int prefetch) {
    switch (heads) {
    case 1: PP_NAME(values)(1, 2, 0, tile, width, column, p, o, prefetch); break;
    case 2: PP_NAME(values)(2, 2, 0, tile, width, column, p, o, prefetch); break;
    case 3: PP_NAME(values)(3, 2, 0, tile, width, column, p, o, prefetch); break;
    case 4: PP_NAME(values)(4, 2, 0, tile, width, column, p, o, prefetch); break;
    case 5: PP_NAME(values)(5, 2, 0, tile, width, column, p, o, prefetch); break;
    case 6: PP_NAME(values)(6, 2, 0, tile, width, column, p, o, prefetch); break;
    }
}

/* Adds p V of tokens [from, to) to one or two vectors of a head's dims. */
PP_INLINE void PP_NAME(some_values)(const int NV, const pp_tile *tile, int width, int column, int from, int to,
                                    const float *p, float *o) {
    const int64_t run = (int64_t)(column / PP_V_RUN) * PP_V_RUN * PP_GROUP * PP_ITEM, pair_bytes = 2 * width * PP_ITEM;
    pp_v sum[2];
    PP_UNROLL for (int j = 0; j < NV; j++) sum[j] = v_load(o + column + j * PP_LANES);
    for (int t = from; t < to; t++) {
        const unsigned char *at[2];
        PP_UNROLL for (int j = 0; j < NV; j++)
            at[j] = tile->v[t / PP_GROUP] + run + t % PP_GROUP / 2 * pair_bytes +
                    (column % PP_V_RUN + j * PP_LANES) * PP_COLUMN;
        if (t % 2)
            PP_NAME(add_products)(1, NV, 1, at, width, p + t, 0, sum);
        else
            PP_NAME(add_products)(1, NV, 0, at, width, p + t, 0, sum);
    }
    PP_UNROLL for (int j = 0; j < NV; j++) v_store(o + column + j * PP_LANES, sum[j]);
}

/* The same for all heads and the dims from `column` on: what is left of rows and at the ragged ends of sequences. */
static __attribute__((noinline)) void PP_NAME(values_left)(int heads, const pp_tile *tile, int column, int from, int to,
                                                           const float *p, float *o) {
    const int dims = tile->v_head_dim, whole = dims / PP_V_RUN * PP_V_RUN;
    for (int g = 0; g < heads; g++, p += PP_TILE, o += tile->row_stride)
        for (int d = column, step; d < dims; d += step) {
            const int width = d < whole ? PP_V_RUN : dims - whole;
            step = d + 2 * PP_LANES <= dims ? 2 * PP_LANES : PP_LANES;
            if (step == PP_LANES)
                PP_NAME(some_values)(1, tile, width, d, from, to, p, o);
            else
                PP_NAME(some_values)(2, tile, width, d, from, to, p, o);
        }
}

/* Adds p V of tokens [from, to) of the tile to all dims, after scaling what is there. */
PP_INLINE void PP_NAME(tile_values)(int heads, const pp_tile *tile, int from, int to, const float *p,
                                    const float *rescale, float *o, int prefetch) {
    const int dims = tile->v_head_dim, whole = dims / PP_V_RUN * PP_V_RUN;
    for (int g = 0; rescale && g < heads; g++) {
        float *row = o + g * tile->row_stride;
        for (int d = 0; d < dims; d += PP_LANES) v_store(row + d, v_mul(v_load(row + d), v_set1(rescale[g])));
    }
    int d = 0;
    if (to - from == PP_TILE) {
        while (d < whole)
            if (PP_ITEM == 4 && prefetch > PP_PREFETCH_REPEAT)
                d += PP_LANES * PP_NAME(run_in_quarters)(heads, tile, d, p, o, prefetch);
            else
                d += PP_LANES * PP_NAME(run_values)(heads, tile, d, p, o, prefetch);
        for (; d + 2 * PP_LANES <= dims; d += 2 * PP_LANES)
            PP_NAME(narrow_values)(heads, tile, dims - whole, d, p, o, prefetch);
    }
    if (d < dims) PP_NAME(values_left)(heads, tile, d, from, to, p, o);
}
