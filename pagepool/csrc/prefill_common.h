/* prefill_common.h: the parts of prefill that exact arithmetic and quantised pages share.  Included once per ISA, after the
 * decode kernels of all dtypes.
 *
 * A panel is PP_PANEL rows of one kv head (a row: one query head of one query token): a tile of a matrix product.  No
 * canonical sum (reference/canonical.py) runs across rows, so the number of rows is free.  It is large enough to keep
 * all accumulators of the CPU busy while each K and V serves all rows.  A panel goes through a chunk in three steps:
 *
 *   scores   of all tiles of the chunk, PP_PANEL rows x PP_PANEL_SCORES vectors of tokens in registers
 *   softmax  tile by tile, with the same functions as decode
 *   values   PP_VALUE_ROWS rows x PP_PANEL_VALUES vectors of dims, in registers over the whole chunk
 *
 * The result is merged in order with the result of the chunks before, in the same way as decode merges its records. */

enum { PP_TILES = PP_CHUNK / PP_TILE, PP_VALUE_ROWS = 6 };
_Static_assert(PP_PANEL % PP_VALUE_ROWS == 0, "a panel is whole passes of values");

typedef struct pp_panel {
    float s[PP_TILES][PP_PANEL * PP_TILE]; /* scores, then weights, row by row */
    float rescale[PP_TILES][PP_RESCALES];  /* for each row, if `raised` is set for the tile */
    float m[PP_RESCALES];
    uint32_t seen[PP_TILES][PP_PANEL];     /* the tokens that a row sees, if not all rows see all */
    uint8_t whole[PP_TILES];               /* all rows see all tokens */
    uint8_t raised[PP_TILES];
    int first, end;                        /* the tiles in which at least one row sees a token */
    int rows;                              /* at most PP_PANEL; results of further rows are ignored */
    pp_row row[PP_PANEL];
    const float *q;                        /* packed: transpose_panel */
    float *sums;                           /* PP_PANEL rows of a record as in pp_chunk */
    int64_t row_stride;
    int head_dim, v_head_dim;
    pp_tile tile;                          /* arguments of cap_scores and add_slopes */
} pp_panel;

/* The parts of a unit's scratch. */
typedef struct prefill_scratch {
    pp_panel *panel;
    pp_running *running; /* of each row */
    float *q, *rows, *sums, *widened;
    unsigned char *groups, *staging;
} prefill_scratch;

/* Bytes of one head's K and V of a group in scratch: f32 for exact arithmetic, otherwise 16 bit. */
static int64_t wide_bytes(const pp_kv_layout *layout, int exact) {
    return PP_GROUP * (int64_t)(layout->head_dim + layout->v_head_dim) * (exact ? (int64_t)sizeof(float) : 2);
}

/* Assigns the parts for `rows` rows in `memory`, and returns their size in bytes. */
static int64_t lay_out(const pp_kv_layout *layout, int32_t rows, unsigned char *memory, prefill_scratch *scratch) {
    int64_t at = 0;
    const int64_t padded = (rows + PP_PANEL - 1) / PP_PANEL * PP_PANEL, item = sizeof(float);
    const int64_t row_stride = pp_row_stride(layout), dims = layout->head_dim;
    scratch->panel = carve(memory, &at, sizeof(pp_panel));
    scratch->running = carve(memory, &at, padded * (int64_t)sizeof(pp_running));
    scratch->q = carve(memory, &at, padded * dims * item);
    scratch->rows = carve(memory, &at, padded * row_stride * item);
    scratch->sums = carve(memory, &at, PP_PANEL * row_stride * item);
    scratch->widened = carve(memory, &at, PP_PANEL * dims * item);
    const int quantised = pp_is_quantised(layout->dtype);
    const int in_place = !quantised && layout->tiled && !layout->v_in_k && layout->dtype == PP_F32;
    const int64_t group_bytes = quantised  ? pp_brought_in_bytes_of(layout)
                                : in_place ? 0
                                           : wide_bytes(layout, 1);
    const int64_t page_bytes = 2 * PP_GROUP * (dims + layout->v_head_dim) * layout->item_bytes;
    scratch->groups = carve(memory, &at, PP_CHUNK / PP_GROUP * group_bytes);
    scratch->staging = carve(memory, &at, quantised || in_place ? 0 : page_bytes);
    return at;
}

static int64_t prefill_bytes(const pp_kv_layout *layout, int32_t rows) {
    prefill_scratch scratch;
    return lay_out(layout, rows, NULL, &scratch);
}

/* The two entries after the last group, which are prefetched, repeat the last two groups. */
static void list_behind(int groups, const unsigned char **k, const unsigned char **v) {
    for (int i = groups; i < groups + 2; i++) {
        k[i] = k[i - 2];
        v[i] = v[i - 2];
    }
}

/* Lists K and V of one head of the chunk's groups, beginning with the tile of its first token.  They point into the
 * pages if the kernels can read these directly, otherwise into the scratch. */
static void read_chunk(const pp_chunk *chunk, int32_t head, int exact, const prefill_scratch *scratch,
                       const unsigned char **k, const unsigned char **v) {
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
        unsigned char *const to = scratch->groups + i * step;
        unsigned char *const staged = widens ? scratch->staging + i % 2 * tiled.head_bytes : to;
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
    const prefill_scratch scratch = {.groups = groups};
    read_chunk(chunk, head, 0, &scratch, k, v);
}

/* Determines which tokens of the chunk's tiles the panel's rows see.  Tile 0 begins at token `begin`. */
static void look_at_tiles(pp_panel *panel, const pp_chunk *chunk, int64_t begin) {
    int64_t low = INT64_MAX, high = 0, all_from = 0, all_to = chunk->end;
    for (int r = 0; r < panel->rows; r++) {
        const pp_view *view = panel->row[r].view;
        const int64_t first = pp_first_seen(view, panel->row[r].query), end = pp_end_seen(view, panel->row[r].query);
        const int64_t until = view->mask ? view->mask_first : end;
        if (first < low) low = first;
        if (first > all_from) all_from = first;
        if (end > high) high = end;
        if (until < all_to) all_to = until;
    }
    const int64_t end = high < chunk->end ? high : chunk->end;
    panel->first = low > begin ? (int)((low - begin) / PP_TILE < PP_TILES ? (low - begin) / PP_TILE : PP_TILES) : 0;
    panel->end = end > begin ? (int)((end - begin + PP_TILE - 1) / PP_TILE) : 0;
    for (int t = panel->first; t < panel->end; t++) {
        const int64_t at = begin + t * PP_TILE;
        panel->whole[t] = at >= all_from && at + PP_TILE <= all_to;
        if (panel->whole[t]) continue;
        uint32_t seen = 0;
        for (int r = 0; r < PP_PANEL; r++) {
            const pp_row *row = &panel->row[r];
            if (r >= panel->rows)
                seen = 0;
            else if (r == 0 || row->query != row[-1].query || row->view != row[-1].view)
                seen = pp_tile_seen(row->view, row->query, at);
            panel->seen[t][r] = seen;
        }
    }
}

/* Applies soft cap and ALiBi to the scores of the tile at `begin`.  ALiBi is applied sequence by sequence. */
static void transform_panel(pp_panel *panel, int64_t begin, float *s) {
    pp_tile *tile = &panel->tile;
    if (tile->cap != 0.0f) cap_scores(tile, panel->rows, s);
    for (int r = 0, end; tile->alibi_slopes && r < panel->rows; r = end) {
        const pp_view *view = panel->row[r].view;
        for (end = r + 1; end < panel->rows && panel->row[end].view == view;) end++;
        tile->row = panel->row[r].row;
        tile->distance = begin - pp_position(view, 0);
        add_slopes(tile, 0, end - r, s + r * PP_TILE);
    }
}

/* Returns 1 if the row sees a token of the chunk. */
static int sees_chunk(const pp_panel *panel, int r) {
    for (int t = panel->first; t < panel->end; t++)
        if (panel->whole[t] || panel->seen[t][r]) return 1;
    return 0;
}

/* Returns how many leading tokens of a tile all rows of a pass of values see, rounded down to whole pairs. */
static int tokens_in_common(const pp_panel *panel, int t, int r0) {
    uint32_t all = ALL_SEEN;
    if (panel->whole[t]) return PP_TILE;
    for (int r = r0; r < r0 + PP_VALUE_ROWS && r < panel->rows; r++) all &= panel->seen[t][r];
    return all == ALL_SEEN ? PP_TILE : __builtin_ctz(~all) & ~1;
}

static void mask_panel(const pp_panel *panel, int t, float *s) {
    for (int r = 0; r < PP_PANEL; r++)
        for (uint32_t hidden = ~panel->seen[t][r]; hidden; hidden &= hidden - 1)
            s[r * PP_TILE + __builtin_ctz(hidden)] = -INFINITY;
}

/* Merges the panel's result of a chunk with the result of the chunks before. */
static void merge_panel(const pp_panel *panel, pp_running *running, float *rows) {
    const int64_t width = panel->row_stride - PP_GROUP;
    for (int r = 0; r < panel->rows; r++) {
        const float *sums = panel->sums + r * panel->row_stride;
        float *row = rows + r * panel->row_stride;
        if (!sees_chunk(panel, r)) continue;
        const float total = total_of(sums + width);
        if (!running[r].some) {
            running[r] = (pp_running){.m = panel->m[r], .total = total, .some = 1};
            memcpy(row, sums, (size_t)width * sizeof(float));
            continue;
        }
        merged_row merged = {.total = v_set1(running[r].total), .m = running[r].m, .sum = row};
        merge_record(&merged, row, sums, total, panel->m[r], width);
        running[r].m = merged.m;
        running[r].total = v_first(merged.total);
    }
}

/* Sets the fields that are the same for all panels. */
static void begin_panel(pp_panel *panel, const pp_chunk *chunk, int32_t kv_head, float *sums) {
    const pp_kv_layout *layout = &chunk->pool->layout;
    panel->head_dim = layout->head_dim;
    panel->v_head_dim = layout->v_head_dim;
    panel->row_stride = pp_row_stride(layout);
    panel->sums = sums;
    panel->tile =
        (pp_tile){.scale = pp_in_base_2(chunk->sm_scale),
                  .cap = pp_in_base_2(chunk->logits_soft_cap),
                  .alibi_slopes = chunk->alibi_slopes ? chunk->alibi_slopes + kv_head * chunk->group_size : NULL,
                  .group_size = chunk->group_size};
    if (panel->tile.cap != 0.0f) panel->tile.inverse_cap = 1.0f / panel->tile.cap;
}

/* The panel's queries in f32. */
static void list_queries(const pp_panel *panel, int32_t q_dtype, float *widened, const float **queries) {
    for (int r = 0; r < panel->rows; r++)
        queries[r] = row_in_f32(q_dtype, panel->row[r].q, widened + r * panel->head_dim, panel->head_dim);
    for (int r = panel->rows; r < PP_QUERY_ROWS; r++) queries[r] = queries[0]; /* any readable pointer */
}

/* Lays the panel's queries out at `to`. */
static void pack_panel(const pp_panel *panel, int32_t q_dtype, float *widened, float *to) {
    const float *queries[PP_QUERY_ROWS] = {NULL};
    list_queries(panel, q_dtype, widened, queries);
    transpose_panel(to, queries, panel->head_dim, panel->tile.scale);
}

/* The rows of a block of query tokens from `first` on. */
static void list_rows(const pp_query_block *work, int32_t first, pp_panel *panel) {
    const int32_t group_size = work->chunk.group_size;
    const int32_t all = (work->query_end - work->query_begin) * group_size;
    panel->rows = all - first < PP_PANEL ? all - first : PP_PANEL;
    for (int r = 0; r < panel->rows; r++) {
        const int32_t row = work->query_begin * group_size + first + r, query = row / group_size;
        const int64_t head = (int64_t)work->kv_head * group_size + row % group_size;
        panel->row[r] = (pp_row){.view = &work->chunk.view,
                                 .query = query,
                                 .row = row,
                                 .q = pp_query_at(&work->queries, query, head)};
    }
}

/* Stores the panel's result of a chunk in the records of its rows. */
static void record_panel(const pp_panel *panel) {
    const int64_t width = panel->row_stride - PP_GROUP;
    for (int r = 0; r < panel->rows; r++) {
        const pp_row *row = &panel->row[r];
        const float *sums = panel->sums + r * panel->row_stride;
        if (row->seen) *row->seen = sees_chunk(panel, r) ? 1.0f : 0.0f;
        memcpy(row->sums, sums, (size_t)width * sizeof(float));
        row->sums[width] = total_of(sums + width);
        *row->m = panel->m[r];
    }
}

/* The functions that differ between the ways to compute. */
typedef struct panel_ways {
    /* Packs the panel's queries into `to`, which has room for their elements in f32.  `widened` has the same size. */
    void (*pack)(const pp_panel *panel, const pp_chunk *chunk, int32_t kv_head, int32_t q_dtype, float *widened,
                 float *to);
    void (*read)(const pp_chunk *chunk, int32_t head, const prefill_scratch *scratch, const unsigned char **k,
                 const unsigned char **v);
    /* Computes the panel's result for a chunk in which it sees at least one token.  The first tile that is read begins
     * at token `begin`. */
    void (*chunk)(pp_panel *panel, int64_t begin, const pp_kv_layout *layout, const unsigned char *const *k,
                  const unsigned char *const *v);
} panel_ways;

/* Computes the panel's result of a chunk.  Returns 1 if a row sees a token of it. */
static int run_panel(const panel_ways *ways, pp_panel *panel, const pp_chunk *chunk, int64_t begin,
                     const unsigned char *const *k, const unsigned char *const *v) {
    look_at_tiles(panel, chunk, begin);
    if (panel->first >= panel->end) return 0;
    for (int i = 0; i < PP_RESCALES; i++) panel->m[i] = -FLT_MAX; /* not -inf: -inf - (-inf) is NaN */
    memset(panel->sums, 0, (size_t)(PP_PANEL * panel->row_stride) * sizeof(float));
    ways->chunk(panel, begin, &chunk->pool->layout, k, v);
    return 1;
}

static void run_prefill(const pp_query_block *work, const panel_ways *ways) {
    const pp_kv_layout *layout = &work->chunk.pool->layout;
    const int32_t rows = (work->query_end - work->query_begin) * work->chunk.group_size;
    const int64_t q_floats = (int64_t)PP_PANEL * layout->head_dim;
    const unsigned char *k[PP_CHUNK_GROUPS], *v[PP_CHUNK_GROUPS];
    prefill_scratch scratch;
    pp_chunk chunk = work->chunk;
    lay_out(layout, rows, work->scratch, &scratch);
    pp_panel *panel = scratch.panel;
    begin_panel(panel, &chunk, work->kv_head, scratch.sums);
    for (int32_t r = 0; r < rows; r += PP_PANEL) {
        list_rows(work, r, panel);
        ways->pack(panel, &chunk, work->kv_head, work->queries.dtype, scratch.widened,
                   scratch.q + r / PP_PANEL * q_floats);
    }
    for (int32_t r = 0; r < rows; r++) scratch.running[r] = (pp_running){.some = 0};
    const int64_t first = pp_first_seen(&chunk.view, work->query_begin);
    const int64_t last = pp_end_seen(&chunk.view, work->query_end - 1);
    for (chunk.begin = first / PP_CHUNK * PP_CHUNK; chunk.begin < last; chunk.begin += PP_CHUNK) {
        chunk.first = first > chunk.begin ? first : chunk.begin;
        chunk.end = chunk.begin + PP_CHUNK < last ? chunk.begin + PP_CHUNK : last;
        ways->read(&chunk, work->kv_head, &scratch, k, v);
        for (int32_t r = 0; r < rows; r += PP_PANEL) {
            list_rows(work, r, panel);
            panel->q = scratch.q + r / PP_PANEL * q_floats;
            if (run_panel(ways, panel, &chunk, chunk.first / PP_TILE * PP_TILE, k, v))
                merge_panel(panel, scratch.running + r, scratch.rows + r * panel->row_stride);
        }
    }
    write_rows_of_unit(work, scratch.running, scratch.rows, panel->row_stride);
}

static void run_shared(const pp_shared *work, const panel_ways *ways) {
    const pp_kv_layout *layout = &work->chunk.pool->layout;
    const unsigned char *k[PP_CHUNK_GROUPS], *v[PP_CHUNK_GROUPS];
    prefill_scratch scratch;
    lay_out(layout, PP_PANEL, work->scratch, &scratch);
    pp_panel *panel = scratch.panel;
    begin_panel(panel, &work->chunk, work->kv_head, scratch.sums);
    panel->q = scratch.q;
    ways->read(&work->chunk, work->kv_head, &scratch, k, v);
    while ((panel->rows = work->next_rows(work->context, panel->row)) > 0) {
        ways->pack(panel, &work->chunk, work->kv_head, work->q_dtype, scratch.widened, scratch.q);
        run_panel(ways, panel, &work->chunk, work->chunk.first / PP_TILE * PP_TILE, k, v);
        record_panel(panel);
    }
}
