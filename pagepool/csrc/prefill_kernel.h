/* prefill_kernel.h: panels in exact arithmetic.
 *
 * Included once per ISA after the decode kernels of all dtypes.  A panel has PP_PANEL rows: enough to keep all
 * accumulators of the CPU busy while each K and V serves all rows.
 *
 *   scores   PP_PANEL rows x PP_PANEL_SCORES vectors of tokens in registers
 *   softmax  tile by tile, with the same functions as decode
 *   values   PP_VALUE_ROWS rows x PP_PANEL_VALUES vectors of dims, in registers over the whole chunk
 *
 * Reads groups of f32.  Other dtypes are converted to f32 chunk by chunk, once for all rows of the unit. */
#define PP_PANEL_ROWS PP_PANEL
#define IN_FLIGHT 1
enum { PP_VALUE_ROWS = 6 };
_Static_assert(PP_PANEL % PP_VALUE_ROWS == 0, "a panel is whole passes of values");

typedef struct panel_buffers {
    float s[PP_CHUNK / PP_TILE][PP_PANEL * PP_TILE] __attribute__((aligned(64))); /* scores, then weights, row by row */
    float rescale[PP_CHUNK / PP_TILE][PP_RESCALES];  /* for each row, if `raised` is set for the tile */
    uint8_t raised[PP_CHUNK / PP_TILE];
    float m[PP_RESCALES], total[PP_PANEL];
} panel_buffers;

static inline pp_v settled(pp_v sums) { return sums; }

#include "panel.h"

/* Bytes of one head's K and V of a group in scratch: f32 for exact arithmetic, otherwise 16 bit. */
static int64_t wide_bytes(const pp_kv_layout *layout, int exact) {
    return PP_GROUP * (int64_t)(layout->head_dim + layout->v_head_dim) * (exact ? (int64_t)sizeof(float) : 2);
}

static void lay_out_exact(const pp_kv_layout *layout, int q_parts, panel_sizes *sizes) {
    const int in_place = layout->tiled && !layout->v_in_k && layout->dtype == PP_F32;
    const int64_t staging = 2 * PP_GROUP * (layout->head_dim + layout->v_head_dim) * layout->item_bytes;
    (void)q_parts;
    sizes->q = PP_PANEL * layout->head_dim * (int64_t)sizeof(float);
    sizes->sums = PP_PANEL * pp_row_stride(layout) * (int64_t)sizeof(float);
    sizes->groups = in_place ? 0 : PP_CHUNK / PP_GROUP * wide_bytes(layout, 1) + staging;
}

/* The two entries after the last group, which are prefetched, repeat the last two groups. */
static void list_behind(int groups, const unsigned char **k, const unsigned char **v) {
    for (int i = groups; i < groups + 2; i++) {
        k[i] = k[i - 2];
        v[i] = v[i - 2];
    }
}

/* Lists K and V of one head of the chunk's groups, beginning with the tile of its first token.  They point into the
 * pages if the kernels can read these directly, otherwise into `copies`: f32 for exact arithmetic, with room for two
 * groups of the page's dtype behind them; otherwise the dtype of the page. */
static void read_chunk(const pp_chunk *chunk, int32_t head, int exact, unsigned char *copies, const unsigned char **k,
                       const unsigned char **v) {
    const pp_kv_layout *layout = &chunk->pool->layout;
    const int widens = exact && layout->dtype != PP_F32;
    const int64_t first = chunk->first / PP_TILE * PP_TILE, at = head * layout->head_bytes;
    const int64_t k_bytes = PP_GROUP * (int64_t)layout->head_dim * layout->item_bytes; /* of one head of a tiled page */
    const int64_t v_bytes = PP_GROUP * (int64_t)layout->v_head_dim * layout->item_bytes;
    const int64_t step = wide_bytes(layout, exact);
    const pp_kv_layout tiled = {.k_bytes = k_bytes, .v_bytes = v_bytes, .head_bytes = k_bytes + v_bytes};
    const unsigned char *list[PP_CHUNK_GROUPS];
    if (layout->tiled) pp_list_groups(chunk, chunk->end, list);
    const int groups = (int)((chunk->end - first + PP_TILE - 1) / PP_TILE * 2);
    for (int i = 0; i < groups; i++) {
        unsigned char *const to = copies + i * step;
        unsigned char *const staged =
            widens ? copies + PP_CHUNK / PP_GROUP * step + i % 2 * tiled.head_bytes : to;
        if (layout->tiled) {
            k[i] = list[i] + at;
            v[i] = k[i] + layout->k_bytes;
            if (layout->v_in_k) {
                page_readers[layout->dtype].transpose_v(layout->v_head_dim, k[i], staged + k_bytes);
                v[i] = staged + k_bytes;
            }
        } else {
            if (i % 2 == 0) pack_tile(chunk, &tiled, first + i * PP_GROUP, head, staged);
            k[i] = staged;
            v[i] = staged + k_bytes;
        }
        if (widens) {
            float *const wide = (float *)to, *const wide_v = wide + PP_GROUP * layout->head_dim;
            page_readers[layout->dtype].widen_k(layout->head_dim, k[i], wide);
            page_readers[layout->dtype].widen_v(layout->v_head_dim, v[i], wide_v);
            k[i] = to;
            v[i] = (const unsigned char *)wide_v;
        }
    }
    list_behind(groups, k, v);
}

/* Bytes of the copied groups of a chunk for read_tiled, 0 if it reads the pages in place. */
static int64_t tiled_bytes(const pp_kv_layout *layout) {
    return layout->tiled && !layout->v_in_k ? 0 : PP_CHUNK / PP_GROUP * wide_bytes(layout, 0);
}

/* Lists K and V of one head of the chunk's groups in the order of tiled pages, in the 16 bits of the pages. */
static void read_tiled(const pp_chunk *chunk, int32_t head, unsigned char *groups, const unsigned char **k,
                       const unsigned char **v) {
    read_chunk(chunk, head, 0, groups, k, v);
}

static void read_exact(const panel_run *run, const pp_chunk *chunk, int32_t head, panel_chunk *to) {
    read_chunk(chunk, head, 1, run->scratch.groups, to->k, to->v);
}

/* The panel's queries in f32. */
static void list_queries(const panel_run *run, const pp_panel *panel, int32_t q_dtype, const float **queries) {
    const int dims = run->call.head_dim;
    for (int r = 0; r < panel->rows; r++)
        queries[r] = row_in_f32(q_dtype, panel->row[r].q, run->scratch.widened + r * dims, dims);
    for (int r = panel->rows; r < PP_QUERY_ROWS; r++) queries[r] = queries[0]; /* any readable pointer */
}

static void pack_exact(const panel_run *run, const pp_panel *panel, const pp_chunk *chunk, int32_t kv_head,
                       int32_t q_dtype, void *to) {
    const float *queries[PP_QUERY_ROWS] = {NULL};
    (void)chunk, (void)kv_head;
    list_queries(run, panel, q_dtype, queries);
    transpose_panel(to, queries, run->call.head_dim, run->call.tile.scale);
}

/* Returns how many leading tokens of a tile all rows of a pass of values see, rounded down to whole pairs. */
static int tokens_in_common(const pp_panel *panel, int t, int r0) {
    uint32_t all = ALL_SEEN;
    if (panel->whole[t]) return PP_TILE;
    for (int r = r0; r < r0 + PP_VALUE_ROWS && r < panel->rows; r++) all &= panel->seen[t][r];
    return all == ALL_SEEN ? PP_TILE : __builtin_ctz(~all) & ~1;
}

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
    const int64_t bytes = panel->call->head_dim / 2 * PAIR_BYTES;
    const float *q = (const float *)panel->q + ODD;
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
static void scores_exact(const pp_panel *panel) {
    enum { PER_GROUP = PP_GROUP / PP_LANES, VECTORS = PP_TILE / PP_LANES };
    const unsigned char *const *k = panel->chunk->k;
    for (int t = panel->first; t < panel->end; t++) {
        uint32_t seen = 0;
        for (int r = 0; !panel->whole[t] && r < panel->rows; r++) seen |= panel->seen[t][r];
        const int vectors = panel->whole[t] || seen >> PP_GROUP ? VECTORS : VECTORS / 2;
        const unsigned char *at[2 * VECTORS];
        for (int j = 0; j < 2 * VECTORS; j++)
            at[j] = k[2 * t + j / PER_GROUP] + j % PER_GROUP * PP_LANES * 4;
#if PP_PANEL_SCORES * PP_LANES > PP_GROUP
        if (vectors < VECTORS) {
            panel_chains_of_group(panel, at, panel->to->s[t]);
            continue;
        }
#endif
        for (int j = 0; j < vectors; j += PP_PANEL_SCORES)
            panel_chains(panel, at + j, panel->to->s[t] + j * PP_LANES);
    }
}

/* Converts scores to weights and adds the weights to the running sums. */
static __attribute__((noinline)) void softmax_exact(const pp_panel *panel) {
    panel_buffers *to = panel->to;
    float *sums = panel->sums;
    const int64_t stride = panel->call->sums_step;
    const int bends = panel->call->tile.cap != 0.0f || panel->call->tile.alibi_slopes;
    for (int i = 0; i < PP_RESCALES; i++) to->m[i] = -FLT_MAX; /* not -inf: -inf - (-inf) is NaN */
    memset(sums, 0, (size_t)(PP_PANEL * stride) * sizeof(float));
    for (int t = panel->first; t < panel->end; t++) {
        float *s = to->s[t];
        for (int r = 0; (bends || !panel->whole[t]) && r < panel->rows; r++) bend_scores(panel, r, t, s + r * PP_TILE);
        to->raised[t] = (uint8_t)raise_if_above(PP_PANEL, s, to->m, sums, stride, to->rescale[t]);
        PP_UNROLL for (int r = 0; r < PP_PANEL; r++)
            weigh(s + r * PP_TILE, to->m[r], sums + (r + 1) * stride - PP_GROUP);
    }
    for (int r = 0; r < panel->rows; r++) to->total[r] = total_of(sums + (r + 1) * stride - PP_GROUP);
}

/* Adds p V of the chunk's tokens [from, to) to NV vectors of dims.  Both ends are even, and all rows of the pass see
 * these tokens.  `offset` is the offset of the dims in a group; rows of the group are `width` words wide. */
PP_INLINE void run_of_values(const int NV, const pp_panel *panel, const unsigned char *const *v, int from,
                             int to, int r0, int64_t offset, int64_t width, float *sums) {
    pp_v sum[PP_VALUE_ROWS * 4];
    PP_UNROLL for (int r = 0; r < PP_VALUE_ROWS; r++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            sum[r * NV + j] = v_load(sums + r * panel->call->sums_step + j * PP_LANES);
    for (int at = from; at < to;) {
        const int t = at / PP_TILE;
        if (at % PP_TILE == 0 && panel->to->raised[t])
            PP_UNROLL for (int r = 0; r < PP_VALUE_ROWS; r++)
                PP_UNROLL for (int j = 0; j < NV; j++)
                    sum[r * NV + j] = v_mul(sum[r * NV + j], v_set1(panel->to->rescale[t][r0 + r]));
        const int group_end = (at / PP_GROUP + 1) * PP_GROUP, end = group_end < to ? group_end : to;
        const unsigned char *row = v[at / PP_GROUP] + offset + at % PP_GROUP * width * 4;
        const int64_t ahead = distance_of(v[at / PP_GROUP + 1], v[at / PP_GROUP]);
        const float *p = panel->to->s[t] + r0 * PP_TILE + at % PP_TILE;
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
            v_store(sums + r * panel->call->sums_step + j * PP_LANES, sum[r * NV + j]);
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
    float *sums = panel->sums + r0 * panel->call->sums_step;
    const int dims = panel->call->v_head_dim, whole = dims / PP_V_RUN * PP_V_RUN, width = dims - whole;
    int d = 0;
    for (; d < whole; d += COLUMNS)
        run_of_values(PP_PANEL_VALUES, panel, v, from, to, r0,
                      (int64_t)(d / PP_V_RUN) * RUN_BYTES + d % PP_V_RUN * 4, PP_V_RUN, sums + d);
    for (; d + PP_LANES <= dims; d += PP_LANES)
        run_of_values(1, panel, v, from, to, r0, (int64_t)(whole / PP_V_RUN) * RUN_BYTES + (d - whole) * 4,
                      width, sums + d);
    for (int t = from / PP_TILE; d < dims && t * PP_TILE < to; t++)
        for (int r = 0; r < PP_VALUE_ROWS; r++) { /* the last 8 dims, if dims is not a multiple of a vector */
            float *row = sums + r * panel->call->sums_step;
            if (panel->to->raised[t])
                v_store(row + d, v_mul(v_load(row + d), v_set1(panel->to->rescale[t][r0 + r])));
            values_of_row(v + 2 * t, dims, d, pp_bits_between(0, to - t * PP_TILE),
                          panel->to->s[t] + (r0 + r) * PP_TILE, row);
        }
}

/* Adds p V of the chunk.  Tokens that all rows of a pass see are added for all rows at once, other tokens row by
 * row. */
static void values_exact(const panel_run *run, const pp_panel *panel) {
    const unsigned char *const *v = panel->chunk->v;
    const int64_t stride = panel->call->sums_step;
    (void)run;
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
                float *sums = panel->sums + r * stride;
                const uint32_t left = panel->seen[last][r] & ~pp_bits_between(0, all);
                if (!all && panel->to->raised[last])
                    for (int d = 0; d < stride - PP_GROUP; d += PP_LANES)
                        v_store(sums + d, v_mul(v_load(sums + d), v_set1(panel->to->rescale[last][r])));
                if (left)
                    values_of_row(v + 2 * last, panel->call->v_head_dim, 0, left, panel->to->s[last] + r * PP_TILE,
                                  sums);
            }
        }
}

static const panel_ways ways_exact = {.lay_out = lay_out_exact,
                                      .pack = pack_exact,
                                      .read = read_exact,
                                      .scores = scores_exact,
                                      .softmax = softmax_exact,
                                      .values = values_exact};

/* Rows of a block of query tokens.  K and V are widened once for all of them. */
enum { BLOCK_ROWS = 240 };

static void prefill_exact(const pp_query_block *work) { run_prefill(work, &ways_exact); }
static void shared_exact(const pp_shared *work) { run_shared(work, &ways_exact); }
static int64_t bytes_exact(const pp_kv_layout *layout, int32_t arithmetic, int32_t q_dtype, int32_t rows) {
    (void)arithmetic, (void)q_dtype;
    return panel_bytes(&ways_exact, layout, 1, rows);
}

static const pp_way way_exact = {chunk_exact, prefill_exact, shared_exact, bytes_exact,
                                 PP_PANEL,    BLOCK_ROWS,    PP_PANEL,     30};
