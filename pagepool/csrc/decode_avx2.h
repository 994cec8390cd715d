/* decode_avx2.h: a tile of a head for AVX2, which has only 16 registers and no broadcast operand.
 *
 * Included once per ISA instead of decode_tile.h; DT is the dtype of the page.  On Zen 4 with AVX2 and one thread it
 * takes 0.83 of the time of decode_tile.h in S1, 0.73 in S2 and 0.84 in S5 in bf16, 0.95 in S1 and 0.71 in S2 in f32,
 * but 1.2 in S3, which has one query head for each KV head.  The reasons for this structure:
 *
 *   Loads. Every weight (an element of a query, a softmax weight) is a separate load. A cycle can start two loads and
 *   two fma, so each load must serve at least two fma.
 *   Latency. Eight fma must be in flight at any time. This needs 8 to 12 sums, 2 to 4 vectors wide. The two chains of
 *   the scores run one after the other: with half of the sums, each load serves twice as many fma.
 *   Spills. A loop with a spilled sum waits for memory. Compilers spill unless each stage is a separate function, fma
 *   accumulates in place (v_add_product), loaded vectors stay loaded (v_pinned), and an iteration of a loop over
 *   values is one pair of rows.
 *   Other instructions. Each fma leaves room for one and a half other instructions, and there are twice as many fma as
 *   in AVX-512. Therefore the prefetch mode and the number of heads are compile-time constants, and parallel addresses
 *   are computed from one pointer.
 *   Prefetches. There is room for few. They are spread over all passes and parts, so that lines are not requested
 *   faster than they arrive: Zen 4 presumably drops prefetches that do not fit into its queue. */

/* Loads a vector of two adjacent rows of `width` columns as f32: even_row of the first row, odd_row of the second.
 * Both take the address in the first row. */
PP_INLINE pp_v even_row(const int DT, const unsigned char *at) {
    return DT == PP_F32 ? v_even_f32(at) : DT == PP_F16 ? v_even_f16(at) : v_even_bf16(at);
}
PP_INLINE pp_v odd_row(const int DT, const unsigned char *at, int width) {
    return DT == PP_F32 ? v_odd_f32(at, width) : DT == PP_F16 ? v_odd_f16(at, width) : v_odd_bf16(at, width);
}

PP_INLINE int k_pair_bytes(const int DT) { return 2 * PP_GROUP * item_bytes(DT); }

/* The prefetch mode of a part of a head's rows.  The second of several parts prefetches, because it reads data that the
 * first part has loaded: on Intel, S2 and S5 took 1.05 times as long if both parts prefetched once.  In f32, memory is
 * hardly faster than the computation.  There the four stages of the first two parts prefetch a quarter each (Zen 4: S2
 * in 0.91 to 0.92 of the time), if K and V have the same number of lines, in whole runs. */
enum { QUARTERS = PP_PREFETCH_TWICE + 1, LATE_QUARTERS };
PP_INLINE int part_mode(const int DT, int mode, int place, int parts, const pp_tile *tile) {
    if (DT == PP_QUANTISED || !mode || parts == 1) return place == 0 ? mode : PP_PREFETCH_NONE;
    if (item_bytes(DT) == 2 || tile->head_dim != tile->v_head_dim || tile->head_dim % PP_V_RUN || !tile->next_v[0])
        return place == 1 ? PP_PREFETCH_TWICE : PP_PREFETCH_NONE;
    return place == 0 ? QUARTERS : place == 1 ? LATE_QUARTERS : PP_PREFETCH_NONE;
}

/* Returns the two addresses that a stage prefetches, each `from` bytes after the beginning of a quarter of the data of
 * a group.  `next` is in the group that is read one visit of a head later.  `again` is one quarter before `next`, and
 * is prefetched for the second time.  A head has four stages: scores and values of its first part, then of its second
 * part. */
PP_INLINE void quarter_of(int late, const int VALUES, const pp_tile *tile, int64_t from,
                          const unsigned char **next, const unsigned char **again) {
    const unsigned char *const *groups = VALUES ? tile->next_v : tile->next_k;
    *next = groups[late] + from;
    *again = (VALUES ? tile->next_k[late] : late ? tile->next_v[0] : tile->v[1]) + from;
}
PP_INLINE void prefetch_quarter(const unsigned char *next, const unsigned char *again, const int bytes) {
    prefetch_into_l2(next, bytes);
    prefetch_into_l2(again, bytes);
}

/* Adds the products of NV vectors with one weight per head to HEADS x NV sums.  The vectors are from the first or (ODD)
 * the second of two adjacent rows of `width` elements.  For up to three heads, the weights stay in registers and the
 * vectors are loaded one by one.  For more heads, each weight is loaded once for every two or three vectors. 12 sums,
 * three weights and a vector use all 16 registers.  Compilers find this allocation only with v_pinned_12 before and
 * after the products. */
PP_INLINE void add_products(const int DT, const int HEADS, const int NV, const int ODD, const unsigned char *const *at,
                            int width, const float *weight, const int weight_step, pp_v *sum) {
    const int AT_ONCE = HEADS <= 3 || NV == 1 ? 1 : NV == 3 ? 3 : 2;
    pp_v w[PP_MAX_HEADS], x[3];
    if (HEADS == 3 && NV == 4) v_pinned_12(sum);
    PP_UNROLL for (int i = 0; i < NV; i += AT_ONCE) {
        PP_UNROLL for (int j = 0; j < AT_ONCE; j++) {
            x[j] = ODD ? odd_row(DT, at[i + j], width) : even_row(DT, at[i + j]);
            if (HEADS > 1) x[j] = v_pinned(x[j]);
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
    if (HEADS == 3 && NV == 4) v_pinned_12(sum);
}

/* Scores of NV vectors of tokens for HEADS heads, from vector `first` of the tile.  There are two chains of fma, over
 * EVEN dims and over ODD dims.  They run one after the other or both at once.  Queries of consecutive pairs of dims are
 * q_step elements apart.  The prefetches of a stage are spread evenly over its work.  For example, each chain of three
 * vectors issues three eighths of them, and the fourth vector two eighths. */
PP_INLINE void scores(const int DT, const int HEADS, const int NV, const int EVEN, const int ODD, const int MODE,
                      const pp_tile *tile, int first, const float *q, int64_t q_step, float *s, int late) {
    enum { PAIRS = 2, PER_GROUP = PP_GROUP / PP_LANES };
    const int BYTES = PAIRS * k_pair_bytes(DT), LINES = BYTES / 64, IS_16_BIT = item_bytes(DT) == 2;
    const int LONE = NV == 1, GROUPS = NV == 2 ? 1 : 2, group = first / PER_GROUP;
    const int BEGIN = LONE ? 6 : EVEN ? 0 : NV == 3 ? 3 : 4; /* eighths */
    /* 16 bit: all near lines, then all far ones.  Near and far lines in turn took 1.07 times as long (shape S1). */
    const int TWICE = 2 * GROUPS * LINES;
    const int END = LONE || (ODD && NV != 3) ? 8 : NV == 3 ? (ODD ? 6 : 3) : 4;
    const int64_t steps = tile->head_dim / (2 * PAIRS);
    const unsigned char *row = tile->k[group], *const end = row + steps * BYTES;
    const int64_t there = NV > 2 ? distance_of(tile->k[1], row) : 0;
    int64_t visit[2], half[2]; /* distances from `row` to the lines read one visit and half a visit of a head later */
    PP_UNROLL for (int i = 0; i < GROUPS; i++) {
        visit[i] = distance_of(tile->next_k[GROUPS == 2 ? i : group], row);
        half[i] = distance_of(tile->v[GROUPS == 2 ? i : group], row);
    }
    /* Each chain of each call prefetches its share of the quarter that belongs to this stage. */
    const int PIECE = LONE ? 64 : NV == 3 ? (EVEN ? 128 : 64) : NV * BYTES / (EVEN && ODD ? 4 : 8);
    const int64_t before = LONE ? 192 : NV == 3 ? 128 * ODD : PIECE * (NV == 4 ? ODD : 2 * group + ODD);
    const unsigned char *next = NULL, *again = NULL;
    if (MODE == QUARTERS) quarter_of(late, 0, tile, steps * before, &next, &again);
    pp_v even[PP_MAX_HEADS * 4], odd[PP_MAX_HEADS * 4];
    PP_UNROLL for (int i = 0; i < HEADS * NV; i++) even[i] = odd[i] = v_set1(0.0f);
    for (; row < end; row += BYTES) {
        if (MODE == QUARTERS) {
            prefetch_quarter(next, again, PIECE);
            next += PIECE, again += PIECE;
        }
        if (MODE == PP_PREFETCH_TWICE)
            PP_UNROLL for (int i = BEGIN * TWICE / 8; i < END * TWICE / 8; i++) {
                const int far = IS_16_BIT ? i >= TWICE / 2 : i % 2, line = IS_16_BIT ? i % (TWICE / 2) : i / 2;
                const int64_t *to = far ? visit : half;
                prefetch_into_l2(at_distance(row, to[line / LINES]) + line % LINES * 64, 1);
            }
        PP_UNROLL for (int i = 0; i < PAIRS; i++, q += q_step) {
            const unsigned char *at[4];
            PP_UNROLL for (int j = 0; j < NV; j++)
                at[j] = at_distance(row, j / PER_GROUP ? there : 0) + i * k_pair_bytes(DT) +
                        (LONE ? PER_GROUP - 1 : j % PER_GROUP) * PP_LANES * column_bytes(DT);
            if (EVEN) add_products(DT, HEADS, NV, 0, at, PP_GROUP, q, 2, even);
            if (ODD) add_products(DT, HEADS, NV, 1, at, PP_GROUP, q + 1, 2, odd);
        }
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            store_chains(EVEN, ODD, s + g * PP_TILE + (first + j) * PP_LANES, even[g * NV + j], odd[g * NV + j]);
}

/* The same head by head for one group of the tile, if the other group is masked. */
PP_INLINE void scores_of_group(const int DT, int heads, const pp_tile *tile, int first,
                               const float *q, int64_t q_step, float *s) {
    for (int g = 0; g < heads; g++, q += 2, s += PP_TILE)
        scores(DT, 1, 2, 1, 1, PP_PREFETCH_NONE, tile, first, q, q_step, s, 0);
}
PP_FOR_DTYPES(scores_of_group, (int heads, const pp_tile *tile, int first, const float *q, int64_t q_step, float *s),
              heads, tile, first, q, q_step, s)

/* Adds p V of all tokens of the tile to NV vectors of dims, starting at dim `column` of V.  That dim is in a run of
 * `width` dims. */
PP_INLINE void values(const int DT, const int HEADS, const int NV, const int MODE, const pp_tile *tile, int width,
                      int column, const float *p, float *o, int late) {
    const int64_t run = (int64_t)(column / PP_V_RUN) * PP_V_RUN * PP_GROUP * item_bytes(DT);
    const int64_t pair_bytes = 2 * width * item_bytes(DT);
    const int64_t row_stride = tile->row_stride, from = run + column % PP_V_RUN * column_bytes(DT);
    /* The part of each pair of rows to prefetch has the same length as the part that is read here.  `prefetched` is the
     * distance between them. */
    const int bytes = NV * PP_LANES * 2 * item_bytes(DT);
    const int64_t prefetched = column % PP_V_RUN * (2 * item_bytes(DT) - column_bytes(DT));
    /* Each pass prefetches the cache lines of its quarter that begin in its share.  If the passes have 3, 3 and 2
     * vectors, they prefetch two, one and one of the 4 lines of a pair of rows. */
    const int piece = NV == 3 ? 64 : bytes / 2;
    const int one_more = NV == 3 && column % PP_V_RUN == 0, line = (column % PP_V_RUN * item_bytes(DT) + 63) / 64;
    pp_v sum[PP_MAX_HEADS * 8];
    o += column;
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = v_load(o + g * row_stride + j * PP_LANES);
    for (int i = 0; i < 2; i++) {
        const unsigned char *row = tile->v[i] + from, *end = row + PP_GROUP / 2 * pair_bytes;
        const int64_t visit = distance_of(MODE ? tile->next_v[i] : tile->v[i], tile->v[i]) + prefetched;
        const int64_t half = distance_of(tile->next_k[i], tile->v[i]) + prefetched;
        const unsigned char *next = NULL, *again = NULL;
        if (MODE == QUARTERS)
            quarter_of(late, 1, tile, run + line * 64 + i * (PP_GROUP / 4 * pair_bytes), &next, &again);
        PP_OPAQUE(end); /* prevents full unrolling */
        for (; row < end; row += pair_bytes, p += 2) {
            if (MODE == QUARTERS) {
                prefetch_quarter(next, again, piece + 64 * one_more);
                next += pair_bytes / 2, again += pair_bytes / 2;
            }
            prefetch(MODE, 0, 0, 1, 1, bytes, row, at_distance(row, visit), at_distance(row, half));
            const unsigned char *at[8];
            PP_UNROLL for (int j = 0; j < NV; j++) at[j] = row + j * PP_LANES * column_bytes(DT);
            add_products(DT, HEADS, NV, 0, at, width, p, PP_TILE, sum);
            add_products(DT, HEADS, NV, 1, at, width, p + 1, PP_TILE, sum);
        }
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++) v_store(o + g * row_stride + j * PP_LANES, sum[g * NV + j]);
}

/* The functions of the stages, for each number of heads and each mode.  Up to 3 heads, a chain of scores is four
 * vectors wide.  For 4 heads it is three vectors wide, and the last vector computes both chains at once.  For more
 * heads it is two vectors wide.  A pass over a run of V (8 vectors) computes most_values
 * vectors at once; for 4 heads the passes have 3, 3 and 2. */
typedef void chain_stage(const pp_tile *tile, int first, const float *q, int64_t q_step, float *s, int late);
typedef void values_stage(const pp_tile *tile, int column, const float *p, float *o, int late);
typedef struct stages {
    chain_stage *even, *odd, *fourth; /* odd is NULL: even computes both chains; fourth may be NULL */
    values_stage *values, *last_values;
} stages;
PP_INLINE int score_step(int heads) { return heads <= 4 ? 4 : 2; }
PP_INLINE int most_values(int heads) { return heads == 1 ? 8 : heads <= 3 ? 4 : heads == 4 ? 3 : 2; }

#define PP_SCORES(name, HEADS, dtype, NV, EVEN, ODD, MODE) \
    static __attribute__((noinline)) void name##_##HEADS(const pp_tile *tile, int first, const float *q, \
                                                         int64_t q_step, float *s, int late) { \
        scores(dtype, HEADS, NV, EVEN, ODD, MODE, tile, first, q, q_step, s, late); \
    }
#define PP_VALUES(name, HEADS, dtype, NV, MODE) \
    static __attribute__((noinline)) void name##_##HEADS(const pp_tile *tile, int column, const float *p, float *o, \
                                                         int late) { \
        values(dtype, HEADS, NV, MODE, tile, PP_V_RUN, column, p, o, late); \
    }
#define PP_STAGES_OF(of, HEADS, dtype, K, V, MODE) \
    PP_SCORES(even_##of, HEADS, dtype, K, 1, 0, MODE) \
    PP_SCORES(odd_##of, HEADS, dtype, K, 0, 1, MODE) \
    PP_VALUES(values_##of, HEADS, dtype, V, MODE)
#define PP_ENTRY(of, HEADS, fourth, last) \
    [HEADS] = {even_##of##_##HEADS, odd_##of##_##HEADS, fourth, values_##of##_##HEADS, last##_##of##_##HEADS}
/* Defines the stages of a dtype in a mode, and the table stages_<of>, by the number of heads. */
#define PP_STAGES(of, dtype, MODE) \
    PP_SCORES(scores_##of, 1, dtype, 4, 1, 1, MODE) \
    PP_VALUES(values_##of, 1, dtype, 8, MODE) \
    PP_STAGES_OF(of, 2, dtype, 4, 4, MODE) \
    PP_STAGES_OF(of, 3, dtype, 4, 4, MODE) \
    PP_STAGES_OF(of, 4, dtype, 3, 3, MODE) \
    PP_SCORES(fourth_##of, 4, dtype, 1, 1, 1, MODE) \
    PP_VALUES(last_##of, 4, dtype, 2, MODE) \
    PP_STAGES_OF(of, 5, dtype, 2, 2, MODE) \
    PP_STAGES_OF(of, 6, dtype, 2, 2, MODE) \
    static const stages stages_##of[PP_MAX_HEADS + 1] = {[1] = {.even = scores_##of##_1, .values = values_##of##_1}, \
                                                         PP_ENTRY(of, 2, NULL, values), \
                                                         PP_ENTRY(of, 3, NULL, values), \
                                                         PP_ENTRY(of, 4, fourth_##of##_4, last), \
                                                         PP_ENTRY(of, 5, NULL, values), \
                                                         PP_ENTRY(of, 6, NULL, values)};
PP_STAGES(f32, PP_F32, PP_PREFETCH_NONE)
PP_STAGES(f32_twice, PP_F32, PP_PREFETCH_TWICE)
PP_STAGES(f32_in_quarters, PP_F32, QUARTERS)
PP_STAGES(f16, PP_F16, PP_PREFETCH_NONE)
PP_STAGES(f16_twice, PP_F16, PP_PREFETCH_TWICE)
PP_STAGES(bf16, PP_BF16, PP_PREFETCH_NONE)
PP_STAGES(bf16_twice, PP_BF16, PP_PREFETCH_TWICE)

static const stages *const all_stages[][QUARTERS + 1] = {
    [PP_F32] = {stages_f32, stages_f32_twice, stages_f32_in_quarters},
    [PP_F16] = {stages_f16, stages_f16_twice},
    [PP_BF16] = {stages_bf16, stages_bf16_twice},
};

/* Scores of the vectors [first, end) of the tile, in one of its groups or in both. */
PP_INLINE void tile_scores(const int DT, int heads, const stages *of, const pp_tile *tile, int first, int end,
                           const float *q, int64_t q_step, float *s, int late) {
    const int step = score_step(heads);
    if (end - first < step) {
        PP_BY_DTYPE(DT, scores_of_group)(heads, tile, first, q, q_step, s);
        return;
    }
    for (; first < end; first += step) {
        of->even(tile, first, q, q_step, s, late);
        if (of->odd) of->odd(tile, first, q, q_step, s, late);
        if (of->fourth) of->fourth(tile, 3, q, q_step, s, late);
    }
}

/* Two vectors of dims, in a run of any width. */
PP_FOR_DTYPES_AND_HEADS(narrow_values,
                        (int heads, const pp_tile *tile, int width, int column, const float *p, float *o),
                        (heads, tile, width, column, p, o),
                        values(DT, HEADS, 2, PP_PREFETCH_NONE, tile, width, column, p, o, 0))

/* Adds p V of tokens [from, to) to one or two vectors of a head's dims. */
PP_INLINE void some_values(const int DT, const int NV, const pp_tile *tile, int width, int column, int from, int to,
                           const float *p, float *o) {
    const int64_t run = (int64_t)(column / PP_V_RUN) * PP_V_RUN * PP_GROUP * item_bytes(DT);
    const int64_t pair_bytes = 2 * width * item_bytes(DT);
    pp_v sum[2];
    PP_UNROLL for (int j = 0; j < NV; j++) sum[j] = v_load(o + column + j * PP_LANES);
    for (int t = from; t < to; t++) {
        const unsigned char *at[2];
        PP_UNROLL for (int j = 0; j < NV; j++)
            at[j] = tile->v[t / PP_GROUP] + run + t % PP_GROUP / 2 * pair_bytes +
                    (column % PP_V_RUN + j * PP_LANES) * column_bytes(DT);
        if (t % 2)
            add_products(DT, 1, NV, 1, at, width, p + t, 0, sum);
        else
            add_products(DT, 1, NV, 0, at, width, p + t, 0, sum);
    }
    PP_UNROLL for (int j = 0; j < NV; j++) v_store(o + column + j * PP_LANES, sum[j]);
}

/* The same for all heads and for the dims from `column` on: used for the remaining dims of a row and at the ragged ends
 * of sequences. */
PP_INLINE void values_left(const int DT, int heads, const pp_tile *tile, int column, int from, int to,
                           const float *p, float *o) {
    const int dims = tile->v_head_dim, whole = dims / PP_V_RUN * PP_V_RUN;
    for (int g = 0; g < heads; g++, p += PP_TILE, o += tile->row_stride)
        for (int d = column, step; d < dims; d += step) {
            const int width = d < whole ? PP_V_RUN : dims - whole;
            step = d + 2 * PP_LANES <= dims ? 2 * PP_LANES : PP_LANES;
            if (step == PP_LANES)
                some_values(DT, 1, tile, width, d, from, to, p, o);
            else
                some_values(DT, 2, tile, width, d, from, to, p, o);
        }
}
PP_FOR_DTYPES(values_left, (int heads, const pp_tile *tile, int column, int from, int to, const float *p, float *o),
              heads, tile, column, from, to, p, o)

/* Scales the sums by `rescale`, then adds p V of tokens [from, to) of the tile to all dims. */
PP_INLINE void tile_values(const int DT, int heads, const stages *of, const pp_tile *tile, int from, int to,
                           const float *p, const float *rescale, float *o, int late) {
    const int most = most_values(heads);
    const int dims = tile->v_head_dim, whole = dims / PP_V_RUN * PP_V_RUN;
    for (int g = 0; rescale && g < heads; g++) {
        float *row = o + g * tile->row_stride;
        for (int d = 0; d < dims; d += PP_LANES) v_store(row + d, v_mul(v_load(row + d), v_set1(rescale[g])));
    }
    int d = 0;
    if (to - from == PP_TILE) {
        for (int left; d < whole; d += (left < most ? left : most) * PP_LANES) {
            left = PP_V_RUN / PP_LANES - d % PP_V_RUN / PP_LANES;
            (left < most ? of->last_values : of->values)(tile, d, p, o, late);
        }
        for (; d + 2 * PP_LANES <= dims; d += 2 * PP_LANES)
            PP_BY_DTYPE(DT, narrow_values)(heads, tile, dims - whole, d, p, o);
    }
    if (d < dims) PP_BY_DTYPE(DT, values_left)(heads, tile, d, from, to, p, o);
}

PP_FOR_HEADS(make_weights_of, PP_QUANTISED,
             (int heads, float *s, float *m, float *rows, int64_t row_stride, float *rescale, int *raised),
             (heads, s, m, rows, row_stride, rescale, raised),
             *raised = make_weights(HEADS, s, m, rows, row_stride, rescale))

/* Computes one tile of one kv head for `heads` of its rows.  The arguments are described at one_tile in
 * decode_tile.h. */
PP_INLINE void one_tile(const int DT, int heads, const pp_tile *tile, const float *q, int q_step,
                        float *rows, float *m, int mode) {
    enum { VECTORS = PP_TILE / PP_LANES };
    float s[PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64))), rescale[PP_RESCALES];
    const int begin = tile->seen << PP_GROUP ? 0 : VECTORS / 2, end = tile->seen >> PP_GROUP ? VECTORS : VECTORS / 2;
    const int late = mode == LATE_QUARTERS;
    const stages *of = &all_stages[DT][mode - late][heads];
    tile_scores(DT, heads, of, tile, begin, end, q, q_step, s, late);
    transform_scores(tile, 0, heads, s);
    if (tile->seen != ALL_SEEN) mask_scores(tile, heads, s);
    int raised;
    make_weights_of(heads, s, m, rows, tile->row_stride, rescale, &raised);
    const float *scales = raised ? rescale : NULL;
    if (!tile->next_v[0]) of = &all_stages[DT][PP_PREFETCH_NONE][heads];
    uint32_t seen = tile->seen; /* run by run: V of a masked token may be NaN */
    do {
        int from, to;
        seen = take_run(seen, &from, &to);
        tile_values(DT, heads, of, tile, from, to, s, scales, rows, late);
        scales = NULL;
        of = &all_stages[DT][PP_PREFETCH_NONE][heads];
    } while (seen);
}
PP_FOR_DTYPES(one_tile, (int heads, const pp_tile *tile, const float *q, int q_step, float *rows, float *m, int mode),
              heads, tile, q, q_step, rows, m, mode)
