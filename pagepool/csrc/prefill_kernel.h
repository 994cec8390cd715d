/* prefill_kernel.h: prefill in exact arithmetic: query tokens of one sequence and kv head over all tokens that they
 * see.
 *
 * Included once per ISA after prefill_common.h.  Reads groups of f32.  Other dtypes are converted to f32 chunk by
 * chunk, once for all rows of the unit. */

/* sum[r][j] += x[j] * y[r * step], for all rows and vectors; the sums are in registers. */
PP_INLINE void add_outer(const int ROWS, const int NV, const pp_v *x, const float *y, const int64_t step,
                         pp_v *sum) {
    PP_UNROLL for (int r = 0; r < ROWS; r++) {
        const pp_broadcast all = v_broadcast(y + r * step);
        PP_UNROLL for (int j = 0; j < NV; j++) sum[r * NV + j] = v_fma_broadcast(x[j], all, sum[r * NV + j]);
    }
}

/* Half of the scores of NV vectors of tokens for all rows.  Without ODD, stores the sums over even dims in `s`; with
 * ODD, adds the sums over odd dims to `s`. */
PP_INLINE void panel_chain(const int NV, const int ODD, const pp_panel *panel, const unsigned char *const *k,
                           float *s) {
    enum { FLOATS = 2, PAIR_BYTES = PP_GROUP * 4 * FLOATS }; /* of packed queries; of K */
    const int64_t bytes = panel->head_dim / 2 * PAIR_BYTES;
    const float *q = panel->q + ODD;
    const unsigned char *at[4];
    pp_v sum[PP_PANEL * 4];
    int64_t ahead[4];
    PP_UNROLL for (int j = 0; j < NV; j++) {
        at[j] = k[j] + ODD * PP_GROUP * 4;
        ahead[j] = distance_of(k[j + PP_TILE / PP_LANES] + ODD * PP_GROUP * 4, at[j]);
    }
    PP_UNROLL for (int r = 0; r < PP_PANEL; r++)
        PP_UNROLL for (int j = 0; j < NV; j++) sum[r * NV + j] = v_set1(0.0f);
    for (int64_t i = 0; i < bytes; i += PAIR_BYTES, q += FLOATS * PP_PANEL) {
        pp_v x[4];
        PP_UNROLL for (int j = 0; j < NV; j++) {
            x[j] = v_load((const float *)(at[j] + i));
            if (j * PP_LANES * 4 % 64 == 0) prefetch_into_l1(at_distance(at[j] + i, ahead[j]));
        }
        add_outer(PP_PANEL, NV, x, q, FLOATS, sum);
    }
    PP_UNROLL for (int r = 0; r < PP_PANEL; r++)
        PP_UNROLL for (int j = 0; j < NV; j++) {
            float *to = s + r * PP_TILE + j * PP_LANES;
            v_store(to, ODD ? v_add(v_load(to), sum[r * NV + j]) : sum[r * NV + j]);
        }
}

static __attribute__((noinline)) void panel_chains(const pp_panel *panel, const unsigned char *const *k,
                                                   float *s) {
    panel_chain(PP_PANEL_SCORES, 0, panel, k, s);
    PP_OPAQUE(s); /* otherwise the sums of the first chain stay in registers that the second needs */
    panel_chain(PP_PANEL_SCORES, 1, panel, k, s);
}

#if PP_PANEL_SCORES * PP_LANES > PP_GROUP
/* The same for one group of a tile.  Near the diagonal the other group is often masked. */
static __attribute__((noinline)) void panel_chains_of_group(const pp_panel *panel,
                                                            const unsigned char *const *k, float *s) {
    panel_chain(PP_GROUP / PP_LANES, 0, panel, k, s);
    PP_OPAQUE(s);
    panel_chain(PP_GROUP / PP_LANES, 1, panel, k, s);
}
#endif

/* Scores of the visible tiles.  If the second group of a tile is invisible to all rows, only the first group is
 * computed. */
static void panel_scores(pp_panel *panel, const unsigned char *const *k) {
    enum { PER_GROUP = PP_GROUP / PP_LANES, VECTORS = PP_TILE / PP_LANES };
    for (int t = panel->first; t < panel->end; t++) {
        uint32_t seen = 0;
        for (int r = 0; !panel->whole[t] && r < panel->rows; r++) seen |= panel->seen[t][r];
        const int vectors = panel->whole[t] || seen >> PP_GROUP ? VECTORS : VECTORS / 2;
        const unsigned char *at[2 * VECTORS];
        for (int j = 0; j < 2 * VECTORS; j++)
            at[j] = k[2 * t + j / PER_GROUP] + j % PER_GROUP * PP_LANES * 4;
#if PP_PANEL_SCORES * PP_LANES > PP_GROUP
        if (vectors < VECTORS) {
            panel_chains_of_group(panel, at, panel->s[t]);
            continue;
        }
#endif
        for (int j = 0; j < vectors; j += PP_PANEL_SCORES)
            panel_chains(panel, at + j, panel->s[t] + j * PP_LANES);
    }
}

/* Converts scores to weights and adds the weights to the running sums. */
static __attribute__((noinline)) void panel_softmax(pp_panel *panel, int64_t begin) {
    float *sums = panel->sums;
    const int64_t stride = panel->row_stride;
    for (int t = panel->first; t < panel->end; t++) {
        float *s = panel->s[t];
        transform_panel(panel, begin + t * PP_TILE, s);
        if (!panel->whole[t]) mask_panel(panel, t, s);
        panel->raised[t] = (uint8_t)raise_if_above(PP_PANEL, s, panel->m, sums, stride, panel->rescale[t]);
        PP_UNROLL for (int r = 0; r < PP_PANEL; r++)
            weigh(s + r * PP_TILE, panel->m[r], sums + (r + 1) * stride - PP_GROUP);
    }
}

/* Adds p V of the chunk's tokens [from, to) to NV vectors of dims.  Both ends are even, and all rows of the pass see
 * these tokens.  `offset` is the offset of the dims in a group; rows of the group are `width` words wide. */
PP_INLINE void run_of_values(const int NV, const pp_panel *panel, const unsigned char *const *v, int from,
                             int to, int r0, int64_t offset, int64_t width, float *sums) {
    pp_v sum[PP_VALUE_ROWS * 4];
    PP_UNROLL for (int r = 0; r < PP_VALUE_ROWS; r++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            sum[r * NV + j] = v_load(sums + r * panel->row_stride + j * PP_LANES);
    for (int at = from; at < to;) {
        const int t = at / PP_TILE;
        if (at % PP_TILE == 0 && panel->raised[t])
            PP_UNROLL for (int r = 0; r < PP_VALUE_ROWS; r++)
                PP_UNROLL for (int j = 0; j < NV; j++)
                    sum[r * NV + j] = v_mul(sum[r * NV + j], v_set1(panel->rescale[t][r0 + r]));
        const int group_end = (at / PP_GROUP + 1) * PP_GROUP, end = group_end < to ? group_end : to;
        const unsigned char *row = v[at / PP_GROUP] + offset + at % PP_GROUP * width * 4;
        const int64_t ahead = distance_of(v[at / PP_GROUP + 1], v[at / PP_GROUP]);
        const float *p = panel->s[t] + r0 * PP_TILE + at % PP_TILE;
        for (; at < end; at++, row += width * 4, p++) {
            pp_v x[4];
            PP_UNROLL for (int j = 0; j < NV; j++) {
                x[j] = v_load((const float *)row + j * PP_LANES);
                if (j * PP_LANES * 4 % 64 == 0) prefetch_into_l1(at_distance(row, ahead) + j * PP_LANES * 4);
            }
            add_outer(PP_VALUE_ROWS, NV, x, p, PP_TILE, sum);
        }
    }
    PP_UNROLL for (int r = 0; r < PP_VALUE_ROWS; r++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            v_store(sums + r * panel->row_stride + j * PP_LANES, sum[r * NV + j]);
}

/* Adds p V of the tokens of a tile that one row sees, to its dims from `column` on. */
static __attribute__((noinline)) void values_of_row(const unsigned char *const *v, int dims, int column,
                                                    uint32_t seen, const float *p, float *sums) {
    for (int d = column, next; d < dims; d = next) {
        const int run = d / PP_V_RUN * PP_V_RUN, width = dims - run < PP_V_RUN ? dims - run : PP_V_RUN;
        const int left = run + width - d;
        const int64_t offset = (int64_t)run * PP_GROUP * 4 + (d - run) * 4;
        pp_v sum = v_load(sums + d);
        next = left < PP_LANES ? d + left : d + PP_LANES;
        for (uint32_t bits = seen; bits;) {
            const int token = __builtin_ctz(bits), place = token % PP_GROUP;
            const unsigned char *row = v[token / PP_GROUP] + offset + place * width * 4;
            pp_v x;
            if (left < PP_LANES) { /* memory after the last dims may be inaccessible */
                float lanes[PP_LANES] = {0};
                memcpy(lanes, row, (size_t)left * sizeof(float));
                x = v_load(lanes);
            } else {
                x = v_load((const float *)row);
            }
            bits &= bits - 1;
            add_outer(1, 1, &x, p + token, 0, &sum);
        }
        v_store(sums + d, sum);
    }
}

/* Adds p V of the chunk's tokens [from, to), which all rows of the pass see. */
static __attribute__((noinline)) void common_values(const pp_panel *panel, const unsigned char *const *v,
                                                    int from, int to, int r0) {
    enum { COLUMNS = PP_PANEL_VALUES * PP_LANES, RUN_BYTES = PP_V_RUN * PP_GROUP * 4 };
    _Static_assert(PP_V_RUN % COLUMNS == 0, "passes of values are within runs");
    float *sums = panel->sums + r0 * panel->row_stride;
    const int dims = panel->v_head_dim, whole = dims / PP_V_RUN * PP_V_RUN, width = dims - whole;
    int d = 0;
    for (; d < whole; d += COLUMNS)
        run_of_values(PP_PANEL_VALUES, panel, v, from, to, r0,
                      (int64_t)(d / PP_V_RUN) * RUN_BYTES + d % PP_V_RUN * 4, PP_V_RUN, sums + d);
    for (; d + PP_LANES <= dims; d += PP_LANES)
        run_of_values(1, panel, v, from, to, r0, (int64_t)(whole / PP_V_RUN) * RUN_BYTES + (d - whole) * 4,
                      width, sums + d);
    for (int t = from / PP_TILE; d < dims && t * PP_TILE < to; t++)
        for (int r = 0; r < PP_VALUE_ROWS; r++) { /* the last 8 dims, if dims is not a multiple of a vector */
            float *row = sums + r * panel->row_stride;
            if (panel->raised[t]) v_store(row + d, v_mul(v_load(row + d), v_set1(panel->rescale[t][r0 + r])));
            values_of_row(v + 2 * t, dims, d, pp_bits_between(0, to - t * PP_TILE),
                          panel->s[t] + (r0 + r) * PP_TILE, row);
        }
}

/* Adds p V of the chunk.  Tokens that all rows of a pass see are added for all rows at once, other tokens row by
 * row. */
static void panel_values(const pp_panel *panel, const unsigned char *const *v) {
    for (int r0 = 0; r0 < panel->rows; r0 += PP_VALUE_ROWS)
        for (int t = panel->first; t < panel->end;) {
            const int from = t * PP_TILE;
            int to = from, all = PP_TILE;
            for (; t < panel->end && all == PP_TILE; t++) {
                all = tokens_in_common(panel, t, r0);
                to = t * PP_TILE + all;
            }
            if (from < to) common_values(panel, v, from, to, r0);
            if (all == PP_TILE) continue;
            const int last = t - 1;
            for (int r = r0; r < r0 + PP_VALUE_ROWS && r < panel->rows; r++) {
                float *sums = panel->sums + r * panel->row_stride;
                const uint32_t left = panel->seen[last][r] & ~pp_bits_between(0, all);
                if (!all && panel->raised[last])
                    for (int d = 0; d < panel->row_stride - PP_GROUP; d += PP_LANES)
                        v_store(sums + d, v_mul(v_load(sums + d), v_set1(panel->rescale[last][r])));
                if (left)
                    values_of_row(v + 2 * last, panel->v_head_dim, 0, left, panel->s[last] + r * PP_TILE,
                                  sums);
            }
        }
}

static void panel_chunk(pp_panel *panel, int64_t begin, const pp_kv_layout *layout,
                        const unsigned char *const *k, const unsigned char *const *v) {
    (void)layout;
    panel_scores(panel, k);
    panel_softmax(panel, begin);
    panel_values(panel, v);
}

static void pack_panel_exact(const pp_panel *panel, const pp_chunk *chunk, int32_t kv_head, int32_t q_dtype,
                             float *widened, float *to) {
    (void)chunk, (void)kv_head;
    pack_panel(panel, q_dtype, widened, to);
}

static void read_chunk_exact(const pp_chunk *chunk, int32_t head, const prefill_scratch *scratch,
                             const unsigned char **k, const unsigned char **v) {
    read_chunk(chunk, head, 1, scratch, k, v);
}

static const panel_ways ways_exact = {pack_panel_exact, read_chunk_exact, panel_chunk};

static void prefill_exact(const pp_query_block *work) { run_prefill(work, &ways_exact); }
static void shared_exact(const pp_shared *work) { run_shared(work, &ways_exact); }
