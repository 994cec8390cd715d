/* decode_avx2.h: a tile of a head where there are 16 registers only, and no operand that spreads over lanes.
 *
 * Included once per dtype from decode_kernel.h, instead of the work on a tile there.  What counts here:
 *
 *   Every weight (an element of a query, a softmax weight) is a load of its own, and two loads start in a cycle, as
 *   two fma do: each load must serve two fma or more.  Eight fma must be under way at any time.  So 8 to 12 sums, 2 to
 *   4 vectors wide, and the scores' two chains one after the other: half of the sums, each load serves twice as many.
 *   A sum that is spilled makes its loop wait for memory.  Compilers do spill unless each stage is a function by
 *   itself, fma add in place (v_add_product), loaded vectors stay loaded (v_kept) and a turn of a loop over values is
 *   one pair of rows.
 *   Next to fma there is place for one other instruction and a half each, and twice as many fma as in AVX-512: what is
 *   asked for is known when a loop is compiled, what runs along is found from one place, and heads are constants.
 *   There is room for few prefetches.  They are spread over all passes and parts, so that lines are asked for no
 *   faster than they come: Zen 4 presumably drops what its queue has no place for. */

/* How one of `parts` parts of a head's rows, the one at `place`, prefetches.  They read the same bytes one after the
 * other.  Where lines are asked for repeatedly, each of the first two asks for all that is next; in f32, which memory
 * delivers hardly faster than it is used, their four stages for a quarter each, if K and V have as many lines, in whole
 * runs. */
PP_INLINE int PP_NAME(part_prefetch)(int mode, int place, int parts, const pp_tile *tile) {
    if (!pp_asks_again(mode)) return place == 0 ? mode : PP_PREFETCH_NONE;
    if (parts == 1) return PP_PREFETCH_REPEAT;
    if (place > 1) return PP_PREFETCH_NONE;
    if (PP_ITEM == 2 || tile->head_dim != tile->v_head_dim || tile->head_dim % PP_V_RUN || !tile->next_v[0])
        return PP_PREFETCH_L2;
    return place == 0 ? PP_PREFETCH_EARLY : PP_PREFETCH_LATE;
}

/* How a stage asks for lines while it computes: known when its loop is compiled, where they are many, since tests in
 * each turn were 6 of 50 instructions.  PAST: the first time past L2.  Quarters are asked for in f32. */
enum {
    PP_NAME(BY_MODE),
    PP_NAME(ONCE),
    PP_NAME(TWICE),
    PP_NAME(TWICE_PAST),
    PP_NAME(IN_QUARTERS),
    PP_NAME(IN_QUARTERS_PAST),
    PP_NAME(WAYS)
};
PP_INLINE int PP_NAME(is_twice)(const int ASKS) { return ASKS == PP_NAME(TWICE) || ASKS == PP_NAME(TWICE_PAST); }
PP_INLINE int PP_NAME(is_in_quarters)(const int ASKS) {
    return ASKS == PP_NAME(IN_QUARTERS) || ASKS == PP_NAME(IN_QUARTERS_PAST);
}

/* Twice and past L2 is for Zen 5, where memory is read faster if what is asked for waits for a sum of the turn before
 * (prefetch_paced.h).  Of more heads multiplication bounds: 3 and 4 in 16 bit took 1.00 to 1.04 times as long, 5 in f32
 * 1.04, and quarters 1.01. */
PP_INLINE int PP_NAME(is_paced)(const int HEADS, const int ASKS) {
    return ASKS == PP_NAME(TWICE_PAST) && HEADS <= (PP_ITEM == 4 ? 4 : 2);
}

/* How a part that prefetches as `prefetch` says does so on this machine, whose mode is `mode`.  What both of two parts
 * ask for once goes into L2 always: past it made no difference. */
PP_INLINE int PP_NAME(way_to_ask)(int mode, int prefetch) {
    const int past = mode == PP_PREFETCH_PAST;
    if (PP_ITEM == 4 && prefetch > PP_PREFETCH_PAST) return past ? PP_NAME(IN_QUARTERS_PAST) : PP_NAME(IN_QUARTERS);
    if (prefetch == PP_PREFETCH_REPEAT) return past ? PP_NAME(TWICE_PAST) : PP_NAME(TWICE);
    return prefetch == PP_PREFETCH_L2 ? PP_NAME(ONCE) : PP_NAME(BY_MODE);
}

/* Asks for `bytes` the first time. */
PP_INLINE void PP_NAME(ask_first)(const int ASKS, const unsigned char *at, int bytes) {
    if (ASKS == PP_NAME(TWICE_PAST) || ASKS == PP_NAME(IN_QUARTERS_PAST))
        prefetch_past_l2(at, bytes);
    else
        prefetch_into_l2(at, bytes);
}

/* A stage's quarter, in the order of the stages (scores of both parts, then values): a group's K or V, which is read a
 * head's visit later, and once more the quarter before it; of each what begins `from` bytes from its beginning. */
PP_INLINE void PP_NAME(quarter_of)(int mode, const int VALUES, const pp_tile *tile, int64_t from,
                                   const unsigned char **next, const unsigned char **again) {
    const int second = mode == PP_PREFETCH_LATE;
    const unsigned char *const *groups = VALUES ? tile->next_v : tile->next_k;
    const unsigned char *before = VALUES ? tile->next_k[1] : tile->v[1];
    *next = groups[second] + from;
    *again = (second ? groups[0] : before) + from;
}

/* Adds to HEADS x NV sums the products of NV vectors, each of the first or (ODD) the second of two neighbouring rows
 * that are `width` elements long, with a weight per head.  The weights of up to three heads stay in registers while the
 * vectors come one by one; of more heads the weights come one by one, for two vectors each, and once more for the next
 * two, or for three.  12 sums, three weights and a vector are all 16 registers: compilers find these places only where
 * they are told before and after that the sums are in registers. */
PP_INLINE void PP_NAME(add_products)(const int HEADS, const int NV, const int ODD, const unsigned char *const *at,
                                     int width, const float *weight, const int weight_step, pp_v *sum) {
    const int AT_ONCE = HEADS <= 3 || NV == 1 ? 1 : NV == 3 ? 3 : 2;
    pp_v w[PP_MAX_HEADS], x[3];
    if (HEADS == 3 && NV == 4) v_kept_12(sum);
    PP_UNROLL for (int i = 0; i < NV; i += AT_ONCE) {
        PP_UNROLL for (int j = 0; j < AT_ONCE; j++) {
            x[j] = ODD ? ODD_ROW(at[i + j], width) : EVEN_ROW(at[i + j]);
            if (HEADS > 1) x[j] = v_kept(x[j]);
        }
        PP_UNROLL for (int g = 0; g < HEADS; g++) {
            if (AT_ONCE == 3) {
                v_add_products_3(sum + g * NV, x, weight + g * weight_step);
                continue;
            }
            if (i == 0 || AT_ONCE == 2) w[g] = v_set1(weight[g * weight_step]);
            PP_UNROLL for (int j = 0; j < AT_ONCE; j++) v_add_product(&sum[g * NV + i + j], x[j], w[g]);
        }
    }
    if (HEADS == 3 && NV == 4) v_kept_12(sum);
}

/* Asks for what `row` and the neighbouring pair are to one or two groups, a visit later and, if twice, half a visit
 * later.  What the chains of a stage ask for is spread evenly over their work: of three vectors and one, three times
 * two and one.  In 16 bit the first chain asks for what is near and the second for what is far, which came out faster
 * than to share both. */
PP_INLINE void PP_NAME(ask_for_rows)(const int NV, const int EVEN, const int ODD, const int ASKS, int prefetch,
                                     const unsigned char *row, const int64_t *visit, const int64_t *half) {
    enum { LINES = 2 * PP_NAME(K_PAIR_BYTES) / 64, GROUPS = 2 };
    const int TWICE = PP_NAME(is_twice)(ASKS), groups = NV == 2 ? 1 : GROUPS, all = groups * LINES * (TWICE ? 2 : 1);
    const int begin = NV == 1 ? all * 3 / 4 : NV == 3 && ODD ? all * 3 / 8 : !EVEN ? all / 2 : 0;
    const int end = NV == 1 || ODD ? (NV == 3 ? all * 3 / 4 : all) : NV == 3 ? all * 3 / 8 : all / 2;
    PP_UNROLL for (int i = begin; i < end; i++) {
        const int near_first = TWICE && PP_ITEM == 2, far = near_first ? i >= all / 2 : !TWICE || i % 2;
        const int line = near_first ? i % (all / 2) : TWICE ? i / 2 : i;
        const unsigned char *at = distant(row, (far ? visit : half)[line / LINES]) + line % LINES * 64;
        if (far && ASKS == PP_NAME(BY_MODE))
            prefetch_once(prefetch, at, 64);
        else if (far)
            PP_NAME(ask_first)(ASKS, at, 64);
        else
            prefetch_into_l2(at, 64);
    }
}

/* Scores of NV vectors of tokens, from vector `first` of the tile, for HEADS heads: two chains of fma, over EVEN and
 * over ODD dims, the latter after the former or both at once.  From one pair of dims to the next, queries are q_step
 * elements apart. */
PP_INLINE void PP_NAME(scores)(const int HEADS, const int NV, const int EVEN, const int ODD, const int ASKS,
                               const pp_tile *tile, int first, const float *q, int64_t q_step, float *s,
                               int prefetch) {
    enum { PAIRS = 2, BYTES = PAIRS * PP_NAME(K_PAIR_BYTES), PER_GROUP = PP_GROUP / PP_LANES };
    const int LONE = NV == 1, group = first / PER_GROUP;
    const int64_t steps = tile->head_dim / (2 * PAIRS);
    const unsigned char *row = tile->k[group], *const end = row + steps * BYTES;
    const int64_t there = NV > 2 ? apart(tile->k[1], row) : 0;
    /* What is read a head's visit later and half a visit later. */
    int64_t visit[2], half[2];
    PP_UNROLL for (int i = 0; i < 2; i++) {
        visit[i] = apart(tile->next_k[NV > 2 || LONE ? i : group], row);
        half[i] = apart(tile->v[NV > 2 || LONE ? i : group], row);
    }
    /* Of the stage's quarter each chain of each call asks for its share. */
    const int PIECE = LONE ? 64 : NV == 3 ? (EVEN ? 128 : 64) : NV * BYTES / (EVEN && ODD ? 4 : 8);
    const int64_t before = LONE ? 192 : NV == 3 ? 128 * ODD : PIECE * (NV == 4 ? ODD : 2 * group + ODD);
    const unsigned char *next = NULL, *again = NULL;
    if (PP_NAME(is_in_quarters)(ASKS)) PP_NAME(quarter_of)(prefetch, 0, tile, steps * before, &next, &again);
    pp_v even[PP_MAX_HEADS * 4], odd[PP_MAX_HEADS * 4];
    PP_UNROLL for (int i = 0; i < HEADS * NV; i++) even[i] = odd[i] = v_set1(0.0f);
    for (; row < end; row += BYTES) {
        if (PP_NAME(is_in_quarters)(ASKS)) {
            PP_NAME(ask_first)(ASKS, next, PIECE);
            prefetch_into_l2(again, PIECE);
            next += PIECE, again += PIECE;
        }
        const int64_t later = PP_NAME(is_paced)(HEADS, ASKS) ? zero_after(EVEN ? even[0] : odd[0]) : 0;
        if (PP_NAME(is_twice)(ASKS) || ASKS == PP_NAME(ONCE))
            PP_NAME(ask_for_rows)(NV, EVEN, ODD, ASKS, PP_PREFETCH_L2, distant(row, later), visit, half);
        else if (ASKS == PP_NAME(BY_MODE) && prefetch == PP_PREFETCH_REPEAT)
            PP_NAME(ask_for_rows)(NV, EVEN, ODD, PP_NAME(TWICE), PP_PREFETCH_L2, row, visit, half);
        else if (ASKS == PP_NAME(BY_MODE) && prefetch)
            PP_NAME(ask_for_rows)(NV, EVEN, ODD, ASKS, prefetch, row, visit, half);
        PP_UNROLL for (int i = 0; i < PAIRS; i++, q += q_step) {
            const unsigned char *at[4];
            PP_UNROLL for (int j = 0; j < NV; j++)
                at[j] = distant(row, j / PER_GROUP ? there : 0) + i * PP_NAME(K_PAIR_BYTES) +
                        (LONE ? PER_GROUP - 1 : j % PER_GROUP) * PP_LANES * PP_COLUMN;
            if (EVEN) PP_NAME(add_products)(HEADS, NV, 0, at, PP_GROUP, q, 2, even);
            if (ODD) PP_NAME(add_products)(HEADS, NV, 1, at, PP_GROUP, q + 1, 2, odd);
        }
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            store_chains(EVEN, ODD, s + g * PP_TILE + (first + j) * PP_LANES, even[g * NV + j], odd[g * NV + j]);
}

/* The same head by head, of one group of the tile where the other is not seen. */
static __attribute__((noinline)) void PP_NAME(scores_of_group)(int heads, const pp_tile *tile, int first,
                                                               const float *q, int64_t q_step, float *s, int prefetch) {
    for (int g = 0; g < heads; g++, q += 2, s += PP_TILE, prefetch = PP_PREFETCH_NONE)
        PP_NAME(scores)(1, 2, 1, 1, PP_NAME(BY_MODE), tile, first, q, q_step, s, prefetch);
}

/* Adds p V of all tokens of the tile to NV vectors of dims, from `column` of V's dims on, which lies in a run that is
 * `width` dims wide. */
PP_INLINE void PP_NAME(values)(const int HEADS, const int NV, const int ASKS, const pp_tile *tile, int width,
                               int column, const float *p, float *o, int prefetch) {
    const int64_t run = (int64_t)(column / PP_V_RUN) * PP_V_RUN * PP_GROUP * PP_ITEM, pair_bytes = 2 * width * PP_ITEM;
    const int64_t row_stride = tile->row_stride, from = run + column % PP_V_RUN * PP_COLUMN;
    /* Of each pair of rows, what is as long as its part here, and from where it is read to where it is. */
    const int bytes = NV * PP_LANES * 2 * PP_ITEM;
    const int64_t asked = column % PP_V_RUN * (2 * PP_ITEM - PP_COLUMN);
    /* Of the stage's quarter each pass asks for the lines that begin within its share: of the 4 of a pair of rows where
     * they go as 3, 3 and 2 vectors, two, one and one. */
    const int piece = NV == 3 ? 64 : bytes / 2;
    const int one_more = NV == 3 && column % PP_V_RUN == 0, line = (column % PP_V_RUN * PP_ITEM + 63) / 64;
    pp_v sum[PP_MAX_HEADS * 8];
    o += column;
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = v_load(o + g * row_stride + j * PP_LANES);
    for (int i = 0; i < 2; i++) {
        const unsigned char *row = tile->v[i] + from, *end = row + PP_GROUP / 2 * pair_bytes;
        const int64_t visit = apart(prefetch ? tile->next_v[i] : tile->v[i], tile->v[i]) + asked;
        const int64_t half = apart(tile->next_k[i], tile->v[i]) + asked;
        const unsigned char *next = NULL, *again = NULL;
        if (PP_NAME(is_in_quarters)(ASKS))
            PP_NAME(quarter_of)(prefetch, 1, tile, run + line * 64 + i * (PP_GROUP / 4 * pair_bytes), &next, &again);
        PP_FORGET(end); /* or the loop is unrolled whole */
        for (; row < end; row += pair_bytes, p += 2) {
            if (PP_NAME(is_in_quarters)(ASKS)) {
                PP_NAME(ask_first)(ASKS, next, piece);
                prefetch_into_l2(again, piece);
                if (one_more) PP_NAME(ask_first)(ASKS, next + piece, 64);
                if (one_more) prefetch_into_l2(again + piece, 64);
                next += pair_bytes / 2, again += pair_bytes / 2;
            }
            const unsigned char *asks = PP_NAME(is_paced)(HEADS, ASKS) ? distant(row, zero_after(sum[0])) : row;
            if (PP_NAME(is_twice)(ASKS) || ASKS == PP_NAME(ONCE))
                PP_NAME(ask_first)(ASKS, distant(asks, visit), bytes);
            if (PP_NAME(is_twice)(ASKS)) prefetch_into_l2(distant(asks, half), bytes);
            if (ASKS == PP_NAME(BY_MODE) && prefetch) {
                prefetch_once(prefetch, distant(row, visit), bytes);
                if (prefetch == PP_PREFETCH_REPEAT) prefetch_into_l2(distant(row, half), bytes);
            }
            const unsigned char *at[8];
            PP_UNROLL for (int j = 0; j < NV; j++) at[j] = row + j * PP_LANES * PP_COLUMN;
            PP_NAME(add_products)(HEADS, NV, 0, at, width, p, PP_TILE, sum);
            PP_NAME(add_products)(HEADS, NV, 1, at, width, p + 1, PP_TILE, sum);
        }
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++) v_store(o + g * row_stride + j * PP_LANES, sum[g * NV + j]);
}

/* The stages for a number of heads in a way to ask: functions each.  Chains of scores are four vectors wide for up to 3
 * heads, three for 4 heads, whose last vector has both chains at once, and else two.  The 8 vectors of a run of V go as
 * most_values at a time, and the last of 4 heads as two. */
typedef void PP_NAME(chain)(const pp_tile *tile, int first, const float *q, int64_t q_step, float *s, int prefetch);
typedef void PP_NAME(pass)(const pp_tile *tile, int column, const float *p, float *o, int prefetch);
typedef struct PP_NAME(stages) {
    PP_NAME(chain) *even, *odd, *fourth; /* or both chains, NULL, NULL; the last of the fourth vector, or NULL */
    PP_NAME(pass) *values, *last_values;
} PP_NAME(stages);
PP_INLINE int PP_NAME(score_step)(int heads) { return heads <= 4 ? 4 : 2; }
PP_INLINE int PP_NAME(most_values)(int heads) { return heads == 1 ? 8 : heads <= 3 ? 4 : heads == 4 ? 3 : 2; }

#define PP_CHAIN(name, HEADS, NV, EVEN, ODD, WAY) \
    static __attribute__((noinline)) void PP_NAME(name##_##HEADS)(const pp_tile *tile, int first, const float *q, \
                                                                  int64_t q_step, float *s, int prefetch) { \
        PP_NAME(scores)(HEADS, NV, EVEN, ODD, WAY, tile, first, q, q_step, s, prefetch); \
    }
#define PP_PASS(name, HEADS, NV, WAY) \
    static __attribute__((noinline)) void PP_NAME(name##_##HEADS)(const pp_tile *tile, int column, const float *p, \
                                                                  float *o, int prefetch) { \
        PP_NAME(values)(HEADS, NV, WAY, tile, PP_V_RUN, column, p, o, prefetch); \
    }
#define PP_STAGES(way, HEADS, K, V, WAY) \
    PP_CHAIN(even_##way, HEADS, K, 1, 0, WAY) \
    PP_CHAIN(odd_##way, HEADS, K, 0, 1, WAY) \
    PP_PASS(values_##way, HEADS, V, WAY)
#define PP_ALL_STAGES(way, WAY) \
    PP_CHAIN(scores_##way, 1, 4, 1, 1, WAY) \
    PP_PASS(values_##way, 1, 8, WAY) \
    PP_STAGES(way, 2, 4, 4, WAY) \
    PP_STAGES(way, 3, 4, 4, WAY) \
    PP_STAGES(way, 4, 3, 3, WAY) \
    PP_CHAIN(fourth_##way, 4, 1, 1, 1, WAY) \
    PP_PASS(last_##way, 4, 2, WAY) \
    PP_STAGES(way, 5, 2, 2, WAY) \
    PP_STAGES(way, 6, 2, 2, WAY)
PP_ALL_STAGES(by_mode, PP_NAME(BY_MODE))
PP_ALL_STAGES(once, PP_NAME(ONCE))
PP_ALL_STAGES(twice, PP_NAME(TWICE))
PP_ALL_STAGES(twice_past, PP_NAME(TWICE_PAST))
#if PP_ITEM == 4
PP_ALL_STAGES(in_quarters, PP_NAME(IN_QUARTERS))
PP_ALL_STAGES(in_quarters_past, PP_NAME(IN_QUARTERS_PAST))
#endif

#define PP_ENTRY(way, HEADS, fourth, last) \
    [HEADS] = {PP_NAME(even_##way##_##HEADS), PP_NAME(odd_##way##_##HEADS), fourth, PP_NAME(values_##way##_##HEADS), \
               PP_NAME(last##_##way##_##HEADS)}
#define PP_ENTRIES(way) \
    {[1] = {.even = PP_NAME(scores_##way##_1), .values = PP_NAME(values_##way##_1)}, \
     PP_ENTRY(way, 2, NULL, values), \
     PP_ENTRY(way, 3, NULL, values), \
     PP_ENTRY(way, 4, PP_NAME(fourth_##way##_4), last), \
     PP_ENTRY(way, 5, NULL, values), \
     PP_ENTRY(way, 6, NULL, values)}
static const PP_NAME(stages) PP_NAME(all_stages)[PP_NAME(WAYS)][PP_MAX_HEADS + 1] = {
    [PP_NAME(BY_MODE)] = PP_ENTRIES(by_mode),
    [PP_NAME(ONCE)] = PP_ENTRIES(once),
    [PP_NAME(TWICE)] = PP_ENTRIES(twice),
    [PP_NAME(TWICE_PAST)] = PP_ENTRIES(twice_past),
#if PP_ITEM == 4
    [PP_NAME(IN_QUARTERS)] = PP_ENTRIES(in_quarters),
    [PP_NAME(IN_QUARTERS_PAST)] = PP_ENTRIES(in_quarters_past),
#endif
};
#undef PP_CHAIN
#undef PP_PASS
#undef PP_STAGES
#undef PP_ALL_STAGES
#undef PP_ENTRY
#undef PP_ENTRIES

/* Scores of the vectors [first, end) of the tile: those of one or both of its groups. */
PP_INLINE void PP_NAME(tile_scores)(int heads, const PP_NAME(stages) *stages, const pp_tile *tile, int first, int end,
                                    const float *q, int64_t q_step, float *s, int prefetch) {
    const int step = PP_NAME(score_step)(heads);
    if (end - first < step) {
        const int mode = prefetch > PP_PREFETCH_REPEAT ? PP_PREFETCH_L2 : prefetch;
        PP_NAME(scores_of_group)(heads, tile, first, q, q_step, s, mode);
        return;
    }
    for (; first < end; first += step) {
        stages->even(tile, first, q, q_step, s, prefetch);
        if (stages->odd) stages->odd(tile, first, q, q_step, s, prefetch);
        if (stages->fourth) stages->fourth(tile, 3, q, q_step, s, prefetch);
    }
}

/* Two vectors of dims of a run that is no PP_V_RUN wide, or of any run. */
PP_FOR_HEADS(narrow_values, (int heads, const pp_tile *tile, int width, int column, const float *p, float *o,
                             int prefetch),
             (heads, tile, width, column, p, o, prefetch),
             PP_NAME(values)(HEADS, 2, PP_NAME(BY_MODE), tile, width, column, p, o, prefetch))

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
PP_INLINE void PP_NAME(tile_values)(int heads, const PP_NAME(stages) *stages, const pp_tile *tile, int from, int to,
                                    const float *p, const float *rescale, float *o, int prefetch) {
    const int most = PP_NAME(most_values)(heads);
    const int dims = tile->v_head_dim, whole = dims / PP_V_RUN * PP_V_RUN;
    for (int g = 0; rescale && g < heads; g++) {
        float *row = o + g * tile->row_stride;
        for (int d = 0; d < dims; d += PP_LANES) v_store(row + d, v_mul(v_load(row + d), v_set1(rescale[g])));
    }
    int d = 0;
    if (to - from == PP_TILE) {
        for (int left; d < whole; d += (left < most ? left : most) * PP_LANES) {
            left = PP_V_RUN / PP_LANES - d % PP_V_RUN / PP_LANES;
            (left < most ? stages->last_values : stages->values)(tile, d, p, o, prefetch);
        }
        for (; d + 2 * PP_LANES <= dims; d += 2 * PP_LANES)
            PP_NAME(narrow_values)(heads, tile, dims - whole, d, p, o, prefetch);
    }
    if (d < dims) PP_NAME(values_left)(heads, tile, d, from, to, p, o);
}

/* Some rows of a head that see the same of a tile, from their scores to their values. */
typedef struct PP_NAME(work) {
    const PP_NAME(stages) *stages; /* of its values */
    int heads, prefetch;
    uint32_t seen;
    float *rows, *m, *block_sums;
} PP_NAME(work);

/* Scores of `heads` rows of the kv head from row r on, row `at` of all.  Their queries begin at q, from one pair of
 * dims to the next q_step elements apart. */
PP_INLINE void PP_NAME(begin_rows)(const pp_chunk *work, pp_tile *tile, int heads, int32_t r, int32_t at,
                                   const float *q, int64_t q_step, float *s, int prefetch, PP_NAME(work) *rows) {
    enum { VECTORS = PP_TILE / PP_LANES };
    const int begin = tile->seen << PP_GROUP ? 0 : VECTORS / 2, end = tile->seen >> PP_GROUP ? VECTORS : VECTORS / 2;
    const PP_NAME(stages) *stages = &PP_NAME(all_stages)[PP_NAME(way_to_ask)(work->prefetch, prefetch)][heads];
    rows->stages = tile->next_v[0] ? stages : &PP_NAME(all_stages)[PP_NAME(BY_MODE)][heads];
    rows->heads = heads;
    rows->prefetch = tile->next_v[0] ? prefetch : PP_PREFETCH_NONE;
    rows->seen = tile->seen;
    rows->rows = work->rows + at * work->row_stride;
    rows->m = work->m + at;
    rows->block_sums = work->block_sums ? work->block_sums + at * work->num_blocks : NULL;
    PP_NAME(tile_scores)(heads, stages, tile, begin, end, q, q_step, s, prefetch);
    tile->row = r;
    bend_scores(tile, 0, heads, s);
    if (tile->seen != ALL_SEEN) hide_scores(tile, heads, s);
}

/* Makes their scores weights, and adds up their values. */
static __attribute__((noinline)) void PP_NAME(finish_rows)(pp_tile *tile, const PP_NAME(work) *rows, float *s) {
    float rescale[PP_RESCALES];
    const int heads = rows->heads;
    const int raised = make_weights_of[heads](s, rows->m, rows->rows, tile->row_stride, rescale);
    const float *scales = raised ? rescale : NULL;
    int prefetch = rows->prefetch;
    uint32_t seen = rows->seen; /* run by run: what a row does not see must not be multiplied with, it may be NaN */
    if (rows->block_sums) {
        tile->seen = seen;
        tile->block_sums = rows->block_sums;
        add_to_blocks(tile, heads, s, scales);
    }
    do {
        int from, to;
        seen = take_run(seen, &from, &to);
        PP_NAME(tile_values)(heads, rows->stages, tile, from, to, s, scales, rows->rows, prefetch);
        scales = NULL;
        prefetch = PP_PREFETCH_NONE;
    } while (seen);
}

/* One tile of a kv head: parts [begin, end) of its rows.
 *
 * Between scores and values softmax mostly adds, and units that multiply would wait for it.  So a part's softmax is
 * done when the next part's scores are made already, besides which a processor begins it: 1 to 2 % of 7 rows, as long
 * as every second part's stages are called from a place of their own, where jumps are predicted. */
static __attribute__((noinline)) void PP_NAME(head)(const pp_chunk *work, pp_tile *tile, int32_t head, int32_t begin,
                                                    int32_t end, int mode) {
    float s[2][PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64)));
    PP_NAME(work) first, second;
    int first_waits = 0, second_waits = 0;
    const int32_t head_rows = work->group_size * work->view.num_queries, parts = num_parts(head_rows);
    const int32_t row = head * head_rows, least = parts == 1 ? head_rows : head_rows / parts;
    /* Borders of parts without a division for each: part_border(head_rows, part), and what remains of it. */
    int32_t from, to = begin ? part_border(head_rows, begin) : 0;
    int32_t over = begin ? (int32_t)((int64_t)head_rows * begin % parts) : 0;
    for (int32_t part = begin; part < end; part++) {
        int prefetch = PP_NAME(part_prefetch)(mode, part - begin, end - begin, tile);
        from = to;
        to += least;
        over += head_rows - least * parts;
        if (over >= parts) over -= parts, to++;
        const float *q = work->q + (int64_t)(row + from) * tile->head_dim;
        const int64_t q_step = 2 * (to - from);
        if (work->seen) { /* as many rows at a time as see the same */
            for (int32_t r = from, next; r < to; r = next) {
                next = rows_alike(work, tile, r, to, row + r);
                if (!tile->seen) continue;
                PP_NAME(begin_rows)(work, tile, next - r, r, row + r, q + 2 * (r - from), q_step, s[0], prefetch,
                                    &first);
                PP_NAME(finish_rows)(tile, &first, s[0]);
                prefetch = PP_PREFETCH_NONE;
            }
        } else if ((part - begin) % 2 == 0) {
            PP_NAME(begin_rows)(work, tile, to - from, from, row + from, q, q_step, s[0], prefetch, &first);
            if (second_waits) PP_NAME(finish_rows)(tile, &second, s[1]);
            first_waits = 1, second_waits = 0;
        } else {
            PP_NAME(begin_rows)(work, tile, to - from, from, row + from, q, q_step, s[1], prefetch, &second);
            PP_NAME(finish_rows)(tile, &first, s[0]);
            first_waits = 0, second_waits = 1;
        }
    }
    if (first_waits) PP_NAME(finish_rows)(tile, &first, s[0]);
    if (second_waits) PP_NAME(finish_rows)(tile, &second, s[1]);
}
