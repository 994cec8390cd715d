/* tiles_panel.h: panels by products of tiles, for arithmetic "bf16" and "bf16x2", except the products.
 *
 * A panel has 32 rows.  Its stages:
 *
 *   scores   squares of 32 rows x 32 tokens
 *   softmax  row by row.  The chunk's highest score is the shift; each weight is split into bf16 parts
 *   values   squares of 32 rows x 32 dims
 *
 * Pages are in bf16, or in f16, whose numbers are sums of two bf16 numbers.  Estimate for AMX: over bf16 pages, 2 and 3
 * products ran at 742 and 588 GFLOP/s, so 10^9 operations take 0.64 + 0.35 n ms in n products.  f16 queries over f16
 * pages take 8 products: 288 GFLOP/s, 1.9 times exact arithmetic (149), and 1.7 with a tenth for cutting K and V.  f32
 * pages need three parts and 11 products: 1.5 times, and less than 1.4 with the cut.  So they are not supported.
 *
 * Sums over int8 pages are integers, and tiles would keep the bits of scores.  But the weights of each 32 tokens have a
 * scale, and a tile has 64 tokens.  One scale for a chunk would change the bits of int8 pages on every CPU, for a gain
 * that was not measured.
 *
 * reference/canonical.py specifies the order of every sum.  Vectors (tiles_vectors.h) and AMX (tiles_amx.h) compute the
 * same bits.
 *
 * Included once per implementation, after the definitions of IN_FLIGHT, tile_item, cut_into_parts and
 * add_rounded_weights.  A square has 32 rows x 32 columns; its elements are stored as [32 rows][32]. */
#define PP_PANEL_ROWS 32
enum {
    PP_SQUARE = PP_PANEL_ROWS * PP_TILE,
    PP_SQUARES = PP_CHUNK / PP_TILE,
    PP_SCORE_STEP = PP_CHUNK + 16, /* with rows 2 KB apart, all rows would map to a few sets of L1 */
    PP_K_TILE = 32 * PP_GROUP * 2  /* bytes of 32 dims of K of a group */
};

typedef struct panel_buffers {
    float s[PP_PANEL_ROWS * PP_SCORE_STEP] __attribute__((aligned(64))); /* [32 rows][PP_SCORE_STEP] */
    tile_item p[2][PP_SQUARES][PP_SQUARE] __attribute__((aligned(64)));
    float m[PP_PANEL_ROWS], total[PP_PANEL_ROWS];
} panel_buffers;

/* Replaces -0 by 0, because the sign of a zero after underflow can depend on masked tokens. */
static inline pp_v settled(pp_v sums) { return v_add(sums, v_set1(0.0f)); }

#include "panel.h"

/* Address of the queries of a part and of 32 dims, [32 rows][32]. */
PP_INLINE const tile_item *queries_at(const panel_call *call, const tile_item *q, int part, int step) {
    return q + (part * call->steps + step) * PP_SQUARE;
}

/* Copies a query in bf16.  Dims after the last one are zeros. */
static inline void copy_query(const panel_call *call, const unsigned char *q, tile_item *to) {
    int i = 0;
    for (; i < call->head_dim / 32; i++) memcpy(to + i * PP_SQUARE, q + 64 * i, 64);
    if (i == call->steps) return;
    memset(to + i * PP_SQUARE, 0, 64);
    memcpy(to + i * PP_SQUARE, q + 64 * i, (size_t)(call->head_dim - 32 * i) * 2);
}

/* Splits the queries of the panel's rows into parts: [q_parts][steps][32 rows][32].  Dims after the last one are zeros.
 * */
static void pack_tiles(const panel_run *run, const pp_panel *panel, const pp_chunk *chunk, int32_t kv_head,
                       int32_t q_dtype, void *packed) {
    const panel_call *call = &run->call;
    const int64_t step = (int64_t)call->steps * PP_SQUARE;
    tile_item *to = packed;
    (void)chunk, (void)kv_head;
    for (int r = 0; r < panel->rows; r++) {
        if (sizeof(tile_item) == 2 && q_dtype == PP_BF16) { /* they are items already, in one part */
            copy_query(call, panel->row[r].q, to + r * 32);
            continue;
        }
        const float *q = row_in_f32(q_dtype, panel->row[r].q, run->scratch.widened, call->head_dim);
        for (int i = 0; i < call->steps; i++) {
            const int dims = call->head_dim - 32 * i < 32 ? call->head_dim - 32 * i : 32;
            tile_item *at = to + i * PP_SQUARE + r * 32;
            float some[32] = {0};
            pp_v x[PP_TILE / PP_LANES];
            memcpy(some, q + 32 * i, (size_t)dims * sizeof(float));
            for (int j = 0; j < PP_TILE / PP_LANES; j++) x[j] = v_load(some + j * PP_LANES);
            switch (call->q_parts) {
            case 1: cut_into_parts(1, x, at, step); break;
            case 2: cut_into_parts(2, x, at, step); break;
            default: cut_into_parts(PP_MOST_PARTS, x, at, step); break;
            }
        }
    }
}

/* Multiplies the scores of a row by the scale, if softmax does not. */
static __attribute__((noinline)) void scale_row(const pp_panel *panel, int r) {
    float *s = panel->to->s + r * PP_SCORE_STEP;
    const pp_v scale = v_set1(panel->call->tile.scale);
    for (int i = panel->first * PP_TILE; i < panel->end * PP_TILE; i += PP_LANES)
        v_store(s + i, v_mul(v_load(s + i), scale));
}

/* Scales the scores of a row if softmax does not, and applies soft cap, ALiBi and mask. */
static __attribute__((noinline)) void bend_row(const pp_panel *panel, int r) {
    if (panel->call->bends) scale_row(panel, r);
    for (int t = panel->first; t < panel->end; t++)
        if (panel->call->bends || !panel->whole[t])
            bend_scores(panel, r, t, panel->to->s + r * PP_SCORE_STEP + t * PP_TILE);
}

/* Softmax computes 2^(score * factor - m) with one rounding, but m is rounded: it differs from the largest product by
 * up to half a unit in its last place.  From this size of m on, which no model reaches, the difference could make
 * weights overflow.  The products are then rounded as m is. */
#define PP_M_OF_ROUNDED_SCORES 0x1p28f

/* State of the softmax of a panel: the next item is tile `tile` of row `row`. */
typedef struct tile_softmax {
    const pp_panel *panel;
    int row, tile;
    float m, factor;
    pp_v sum[PP_GROUP / PP_LANES];
} tile_softmax;

/* Converts the 32 scores at `s` to weights, and adds these to 16 running sums.  Weights are stored in PARTS parts at
 * `p`. */
PP_INLINE void weigh_tile(const int PARTS, const float *s, tile_item *p, pp_v factor, pp_v shift, pp_v *sum) {
    pp_v weights[PP_TILE / PP_LANES];
    PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++)
        weights[j] = v_exp2(v_fma(v_load(s + j * PP_LANES), factor, shift));
    cut_into_parts(PARTS, weights, p, PP_SQUARES * PP_SQUARE);
    /* Adds the rounded weights, as they are multiplied with V.  With the sum of the unrounded weights the error is up
     * to twice as large if a few tokens have nearly all weight. */
    PP_UNROLL for (int part = PARTS - 1; part >= 0; part--)
        add_rounded_weights(p + part * PP_SQUARES * PP_SQUARE, sum);
}

/* Computes the weights of the next TILES tiles of a row, or of the remaining ones.  Before the first tile of a row it
 * determines the shift. */
PP_INLINE void softmax_item(const int PARTS, const int TILES, tile_softmax *x) {
    const pp_panel *panel = x->panel;
    const int r = x->row;
    float *s = panel->to->s + r * PP_SCORE_STEP;
    tile_item *p = panel->to->p[0][0] + r * 32;
    if (x->tile == panel->first) {
        if (panel->call->bends || !panel->whole_panel) bend_row(panel, r);
        pp_v highest[PP_TILE / PP_LANES];
        PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++) highest[j] = v_set1(-INFINITY);
        for (int t = panel->first; t < panel->end; t++)
            PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++)
                highest[j] = v_max(v_load(s + t * PP_TILE + j * PP_LANES), highest[j]); /* ignores NaN */
        for (int j = 1; j < PP_TILE / PP_LANES; j++) highest[0] = v_max(highest[j], highest[0]);
        x->factor = panel->call->factor;
        const float m = v_highest(highest[0]) * x->factor;
        x->m = m > -FLT_MAX ? m : -FLT_MAX; /* -inf - (-inf) is NaN */
        if (fabsf(m) >= PP_M_OF_ROUNDED_SCORES && !panel->call->bends) {
            scale_row(panel, r);
            x->factor = 1.0f;
        }
        for (int j = 0; j < PP_GROUP / PP_LANES; j++) x->sum[j] = v_set1(0.0f);
    }
    const int from = x->tile, end = from + TILES < panel->end ? from + TILES : panel->end;
    const pp_v factor = v_set1(x->factor), shift = v_set1(-x->m);
    pp_v sum[PP_GROUP / PP_LANES];
    PP_UNROLL for (int j = 0; j < PP_GROUP / PP_LANES; j++) sum[j] = x->sum[j];
    if (end - from == TILES)
        PP_UNROLL for (int i = 0; i < TILES; i++)
            weigh_tile(PARTS, s + (from + i) * PP_TILE, p + (from + i) * PP_SQUARE, factor, shift, sum);
    else
        for (int t = from; t < end; t++)
            weigh_tile(PARTS, s + t * PP_TILE, p + t * PP_SQUARE, factor, shift, sum);
    x->tile = end;
    if (end == panel->end) {
        panel->to->m[r] = x->m;
        panel->to->total[r] = tree_sum(sum);
        x->row++;
        x->tile = panel->first;
    } else
        PP_UNROLL for (int j = 0; j < PP_GROUP / PP_LANES; j++) x->sum[j] = sum[j];
}

/* The softmax of all rows, at once. */
static __attribute__((noinline)) void softmax_of_panel(const pp_panel *panel) {
    tile_softmax x = {.panel = panel, .tile = panel->first};
    while (x.row < panel->rows)
        if (panel->call->p_parts == 1)
            softmax_item(1, PP_SQUARES, &x);
        else
            softmax_item(2, PP_SQUARES, &x);
}

/* Cuts pairs of rows of `width` f16 numbers, as in pages of f16, into rows of pairs of bf16 numbers, as in pages of
 * bf16.  The first part is the number without its last bits, and the second is the rest, which is exact: 0 for an
 * infinity, NaN for a NaN.  The second parts are `step` bytes behind the first. */
static void cut_rows(int pairs, int width, const unsigned char *from, unsigned char *to, int64_t step) {
    float both[2 * PP_V_RUN + PP_LANES] = {0};
    for (; pairs > 0; pairs--, from += width * 4, to += width * 4) {
        widen_f16(both, from, 2 * width);
        for (int c = 0; c < width; c += PP_LANES) {
            const pp_v x = v_load(both + c), y = v_load(both + width + c);
            const pp_bits a = (pp_bits)x & 0xffff0000u, b = (pp_bits)y & 0xffff0000u;
            const pp_bits rest_a = (pp_bits)(x != (pp_v)a) & (pp_bits)v_sub(x, (pp_v)a);
            const pp_bits rest_b = (pp_bits)(y != (pp_v)b) & (pp_bits)v_sub(y, (pp_v)b);
            const pp_bits words[2] = {a >> 16 | b, rest_a >> 16 | (rest_b & 0xffff0000u)}; /* a NaN has more bits */
            for (int part = 0; part < 2; part++)
                if (width - c >= PP_LANES) /* constant size, so that no function is called */
                    memcpy(to + c * 4 + part * step, &words[part], sizeof words[part]);
                else
                    memcpy(to + c * 4 + part * step, &words[part], (size_t)(width - c) * 4);
        }
    }
}

/* Bytes of scratch for list_groups. */
static int64_t groups_bytes(const pp_kv_layout *layout) {
    const int64_t bytes = PP_CHUNK * 2 * (int64_t)(layout->head_dim + layout->v_head_dim);
    return pp_kernels_get()->tiled_bytes(layout) + (layout->dtype == PP_BF16 ? 0 : pp_parts_of(layout->dtype) * bytes);
}

/* Lists K and V of a head for the groups of a chunk, beginning with the tile of its first token, in the order of bf16
 * pages: in the pages, or in copies.  The first part is listed, and the other follows it.  Returns the number of
 * groups. */
static int list_groups(const panel_run *run, const pp_chunk *chunk, int32_t head, panel_chunk *to) {
    const panel_call *call = &run->call;
    const pp_kv_layout *layout = &chunk->pool->layout;
    const int count = count_groups(to);
    const unsigned char **k = to->k, **v = to->v;
    unsigned char *groups = run->scratch.groups;
    pp_kernels_get()->read_tiled(chunk, head, groups, k, v);
    groups += pp_kernels_get()->tiled_bytes(layout);
    for (int i = 0; layout->dtype != PP_BF16 && i < count; i++) {
        cut_rows(call->head_dim / 2, PP_GROUP, k[i], groups, call->k_step);
        k[i] = groups;
        groups += call->page_parts * call->k_step;
        for (int d = 0; d < call->v_head_dim; d += PP_V_RUN) {
            const int64_t at = (int64_t)d * PP_GROUP * 2;
            cut_rows(PP_GROUP / 2, pp_run_width(call->v_head_dim, d), v[i] + at, groups + at, call->v_step);
        }
        v[i] = groups;
        groups += call->page_parts * call->v_step;
    }
    return count;
}

/* Copies 32 tokens x 32 dims of V, from dim 32 d on, from `at` bytes on in two groups.  The copy has a row for each of
 * 16 pairs of tokens, `row_bytes` apart.  Dims 16 to 31 of a row are `half_bytes` after dims 0 to 15.  Dims past the
 * last one and tokens that are not `seen` become zeros. */
static void copy_v(int v_head_dim, int d, const unsigned char *const *groups, int64_t at, uint32_t seen,
                   unsigned char *to, int64_t row_bytes, int64_t half_bytes) {
    const int run = 32 * d / PP_V_RUN * PP_V_RUN, left = v_head_dim - run, width = left < PP_V_RUN ? left : PP_V_RUN;
    const int dims = v_head_dim - 32 * d < 32 ? v_head_dim - 32 * d : 32;
    for (int pair = 0; pair < 16; pair++, to += row_bytes) {
        const unsigned char *from =
            groups[pair / 8] + at + (int64_t)run * PP_GROUP * 2 + (pair % 8 * width + 32 * d % PP_V_RUN) * 4;
        const uint32_t both = seen >> (2 * pair) & 3, keep = (both & 1 ? 0xffffu : 0) | (both & 2 ? 0xffff0000u : 0);
        uint32_t words[32];
        if (dims < 32) memset(words, 0, sizeof words);
        if (dims == 32) /* constant size, so that no function is called */
            memcpy(words, from, sizeof words);
        else
            memcpy(words, from, (size_t)dims * 4);
        for (int i = 0; i < 32; i++) words[i] &= keep;
        memcpy(to, words, 64);
        memcpy(to + half_bytes, words + 16, 64);
    }
}

/* The parts of scratch that both implementations have. */
static void lay_out_tiles(const pp_kv_layout *layout, int q_parts, panel_sizes *sizes) {
    const int64_t steps = (layout->head_dim + 31) / 32, v_dims = (layout->v_head_dim + 31) / 32 * 32;
    sizes->q = q_parts * steps * PP_SQUARE * (int64_t)sizeof(tile_item);
    sizes->sums = PP_PANEL_ROWS * v_dims * (int64_t)sizeof(float);
    sizes->groups = groups_bytes(layout);
}

/* Lists the rows of one head in a chunk, from row `row` of all rows up to `to`.  Their queries are rows of f32. */
static void list_chunk_rows(const pp_chunk *work, int32_t head, int32_t row, int32_t to, pp_panel *panel) {
    const int32_t head_rows = work->group_size * work->view.num_queries;
    panel->rows = to - row < PP_PANEL_ROWS ? to - row : PP_PANEL_ROWS;
    for (int r = 0; r < panel->rows; r++) {
        const int32_t at = row + r, of_head = at - head * head_rows;
        panel->row[r] = (pp_row){.view = &work->view,
                                 .query = of_head / work->group_size,
                                 .row = of_head,
                                 .q = work->q + (int64_t)at * work->pool->layout.head_dim,
                                 .sums = work->rows + at * work->row_stride,
                                 .m = work->m + at,
                                 .seen = work->seen ? work->seen + at : NULL};
    }
}

/* Decode: a chunk of one sequence for some of its rows, head by head. */
static void run_decode(const pp_chunk *work, const panel_ways *ways) {
    const int32_t head_rows = work->group_size * work->view.num_queries;
    panel_run *run = begin_run(ways, work, 0, PP_PANEL_ROWS, work->scratch);
    for (int32_t from = work->row_begin, to; from < work->row_end; from = to) {
        const int32_t head = from / head_rows, head_end = (head + 1) * head_rows;
        to = head_end < work->row_end ? head_end : work->row_end;
        if (work->alibi_slopes) run->call.tile.alibi_slopes = work->alibi_slopes + head * work->group_size;
        read_head(run, work, head, &run->chunks[0]);
        for (int32_t row = from; row < to; row += PP_PANEL_ROWS) {
            pp_panel *panel = next_panel(run, &run->chunks[0], run->scratch.q);
            list_chunk_rows(work, head, row, to, panel);
            pack_tiles(run, panel, work, head, PP_F32, run->scratch.q);
            push_panel(run, panel);
        }
        drain(run);
    }
}
