/* panel.h: the driver of blocks of query tokens, of chunks that several sequences share, and of decode by panels.
 *
 * A panel is up to PP_PANEL_ROWS rows of one kv head (a row: one query head of one query token, of any sequence): a
 * tile of a matrix product.  No canonical sum (reference/canonical.py) runs across rows, so the bits of a row do not
 * depend on its panel, and the number of rows is free.  A panel goes through a chunk of 512 tokens in three stages:
 *
 *   scores   of all tiles of 32 tokens
 *   softmax  scores become weights
 *   values   sums of weights times V
 *
 * The result is merged in order with the result of the chunks before, in the same way as decode merges its records, or
 * stored in the records of the rows.  A way to compute (panel_ways) supplies the stages.  Included once per source file
 * of kernels, after the definitions of
 *
 *   PP_PANEL_ROWS   at most 32
 *   IN_FLIGHT       number of panels that are computed at once
 *   panel_buffers   scores and weights of a panel.  It has m[] and total[], the shift and the sum of the weights of
 *                   each row
 *   settled         a function of a finished vector of sums */
enum { PP_TILES = PP_CHUNK / PP_TILE, NUM_BUFFERS = (IN_FLIGHT + 1) / 2 };

/* Data that all panels of a unit share.  The members after row_stride are for products of tiles: tiles_panel.h. */
typedef struct panel_call {
    int head_dim, v_head_dim;
    pp_tile tile;             /* arguments of cap_scores and add_slopes */
    int64_t row_stride;       /* of results, in elements */
    int64_t sums_step;        /* of sums */
    int steps, v_squares;     /* in units of 32 dims; the last unit may have fewer */
    int q_parts, p_parts, page_parts; /* parts of a query, a weight, and an element of K or V */
    int64_t k_step, v_step;   /* bytes between the parts of K, and of V, of a group */
    int bends;                /* scale scores and apply soft cap or ALiBi before finding the shift */
    float factor;             /* otherwise the factor that scales scores while they become weights */
} panel_call;

/* K and V of one head of a chunk, beginning with the tile of its first token.  The lists have two groups for each tile,
 * and two more that are prefetched.  The members after `end` are for AMX: tiles_amx.h. */
typedef struct panel_chunk {
    const unsigned char *k[PP_CHUNK_GROUPS], *v[PP_CHUNK_GROUPS];
    int64_t begin, first, end; /* the first token of tile 0; the chunk's tokens */
    unsigned char *v_tiles;    /* [parts][v_squares][tiles of tokens][2][1 KB] */
    unsigned char *k_tail;     /* [parts][groups][1 KB]: the last dims, if they are fewer than 32 */
    int v_in_k;                /* V is read from K: v is not set */
    int not_finite;            /* V has a NaN or an infinity */
} panel_chunk;

typedef struct pp_panel {
    const panel_call *call;
    const panel_chunk *chunk;
    panel_buffers *to;
    const void *q;            /* as the way packs the queries */
    float *sums;              /* [PP_PANEL_ROWS][sums_step] */
    int rows;
    int first, end;           /* the tiles in which at least one row sees a token */
    int whole_panel;          /* all rows see all tokens of all these tiles */
    uint8_t whole[PP_TILES];  /* all rows see all tokens of the tile */
    uint32_t seen[PP_TILES][PP_PANEL_ROWS]; /* the tokens that a row sees, if not all rows see all */
    int64_t origin[PP_PANEL_ROWS]; /* the position of the first query token of the row's sequence */
    pp_row row[PP_PANEL_ROWS]; /* `view` may be invalid after look_at_tiles */
    pp_running *running;      /* of the rows, with their `results` so far; NULL: results go to records */
    float *results;
} pp_panel;

/* Bytes of scratch: of a panel's queries, of its sums, for `read`, and for the way itself. */
typedef struct panel_sizes {
    int64_t q, sums, groups, own;
} panel_sizes;

typedef struct panel_scratch {
    struct panel_run *run;
    pp_running *running; /* of each row of the unit */
    float *results, *sums, *widened;
    unsigned char *q, *groups, *own;
    int64_t q_bytes; /* of a panel */
} panel_scratch;

/* The work of a unit on one head. */
typedef struct panel_run {
    panel_scratch scratch;
    const struct panel_ways *ways;
    const pp_kv_layout *layout;
    panel_call call;
    int count; /* number of panels in progress or finished */
    pp_panel panels[IN_FLIGHT];
    panel_chunk chunks[IN_FLIGHT];
    panel_buffers buffers[NUM_BUFFERS];
} panel_run;

/* A way to compute panels. */
typedef struct panel_ways {
    void (*lay_out)(const pp_kv_layout *layout, int q_parts, panel_sizes *sizes);
    void (*begin)(panel_run *run); /* assigns scratch.own; or NULL */
    /* Packs the panel's queries into `to`.  scratch.widened has room for them in f32. */
    void (*pack)(const panel_run *run, const pp_panel *panel, const pp_chunk *chunk, int32_t kv_head, int32_t q_dtype,
                 void *to);
    /* Lists K and V of a head of a chunk.  `to` has begin, first and end already. */
    void (*read)(const panel_run *run, const pp_chunk *chunk, int32_t head, panel_chunk *to);
    void (*scores)(const pp_panel *panel);
    void (*softmax)(const pp_panel *panel);
    void (*values)(const panel_run *run, const pp_panel *panel);
    /* Instead of the stages: starts a panel, and finishes all panels that were started.  NULL: one after the other. */
    void (*push)(panel_run *run, pp_panel *panel);
    void (*drain)(panel_run *run);
} panel_ways;

static panel_call make_call(const pp_chunk *chunk, int32_t kv_head, int64_t sums_bytes) {
    const pp_kv_layout *layout = &chunk->pool->layout;
    panel_call call = {
        .head_dim = layout->head_dim,
        .v_head_dim = layout->v_head_dim,
        .tile = {.scale = pp_in_base_2(chunk->sm_scale),
                 .cap = pp_in_base_2(chunk->logits_soft_cap),
                 .alibi_slopes = chunk->alibi_slopes ? chunk->alibi_slopes + kv_head * chunk->group_size : NULL,
                 .group_size = chunk->group_size},
        .row_stride = pp_row_stride(layout),
        .sums_step = sums_bytes / (PP_PANEL_ROWS * (int64_t)sizeof(float)),
        .steps = (layout->head_dim + 31) / 32,
        .v_squares = (layout->v_head_dim + 31) / 32,
        .q_parts = pp_query_parts(chunk->arithmetic, chunk->q_dtype),
        .p_parts = pp_weight_parts(chunk->arithmetic),
        .page_parts = pp_parts_of(layout->dtype),
        .k_step = PP_GROUP * (int64_t)layout->head_dim * 2,
        .v_step = PP_GROUP * (int64_t)layout->v_head_dim * 2,
        .factor = 1.0f};
    /* Scaling preserves the maximum of the scores only if the factor is above 0. */
    call.bends = call.tile.cap != 0.0f || call.tile.alibi_slopes || !(call.tile.scale > 0.0f);
    if (!call.bends) call.factor = call.tile.scale;
    if (call.tile.cap != 0.0f) call.tile.inverse_cap = 1.0f / call.tile.cap;
    return call;
}

/* Assigns the parts for `rows` rows in `memory`, and returns their size in bytes. */
static int64_t lay_out(const panel_ways *ways, const pp_kv_layout *layout, int q_parts, int32_t rows,
                       unsigned char *memory, panel_scratch *scratch, panel_sizes *sizes) {
    int64_t at = 0;
    const int64_t panels = (rows + PP_PANEL_ROWS - 1) / PP_PANEL_ROWS, padded = panels * PP_PANEL_ROWS;
    const int64_t item = sizeof(float);
    *sizes = (panel_sizes){0};
    ways->lay_out(layout, q_parts, sizes);
    *scratch = (panel_scratch){.run = carve(memory, &at, sizeof(panel_run)), .q_bytes = sizes->q};
    scratch->running = carve(memory, &at, padded * (int64_t)sizeof(pp_running));
    scratch->results = carve(memory, &at, padded * pp_row_stride(layout) * item);
    scratch->sums = carve(memory, &at, sizes->sums);
    scratch->widened = carve(memory, &at, PP_PANEL_ROWS * layout->head_dim * item);
    scratch->q = carve(memory, &at, panels * sizes->q);
    scratch->groups = carve(memory, &at, sizes->groups);
    scratch->own = carve(memory, &at, sizes->own);
    return at;
}

static int64_t panel_bytes(const panel_ways *ways, const pp_kv_layout *layout, int q_parts, int32_t rows) {
    panel_scratch scratch;
    panel_sizes sizes;
    return lay_out(ways, layout, q_parts, rows, NULL, &scratch, &sizes);
}

static panel_run *begin_run(const panel_ways *ways, const pp_chunk *chunk, int32_t kv_head, int32_t rows,
                            unsigned char *memory) {
    panel_scratch scratch;
    panel_sizes sizes;
    const int q_parts = pp_query_parts(chunk->arithmetic, chunk->q_dtype);
    lay_out(ways, &chunk->pool->layout, q_parts, rows, memory, &scratch, &sizes);
    panel_run *run = scratch.run;
    run->scratch = scratch;
    run->ways = ways;
    run->layout = &chunk->pool->layout;
    run->call = make_call(chunk, kv_head, sizes.sums);
    run->count = 0;
    if (ways->begin) ways->begin(run);
    return run;
}

/* Determines which tokens of the chunk's tiles the panel's rows see. */
static void look_at_tiles(pp_panel *panel) {
    const int64_t begin = panel->chunk->begin, chunk_end = panel->chunk->end;
    int64_t low = INT64_MAX, high = 0, all_from = 0, all_to = chunk_end;
    for (int r = 0; r < panel->rows; r++) {
        const pp_row *row = &panel->row[r];
        panel->origin[r] = pp_position(row->view, 0);
        if (r > 0 && row->query == row[-1].query && row->view == row[-1].view) continue;
        const int64_t first = pp_first_seen(row->view, row->query), end = pp_end_seen(row->view, row->query);
        const int64_t until = row->view->mask && row->view->mask_first < end ? row->view->mask_first : end;
        if (first < low) low = first;
        if (first > all_from) all_from = first;
        if (end > high) high = end;
        if (until < all_to) all_to = until;
    }
    if (high > chunk_end) high = chunk_end;
    panel->first = low > begin ? (int)(low - begin < PP_CHUNK ? (low - begin) / PP_TILE : PP_TILES) : 0;
    panel->end = high > begin ? (int)((high - begin + PP_TILE - 1) / PP_TILE) : 0;
    panel->whole_panel = 1;
    for (int t = panel->first; t < panel->end; t++) {
        const int64_t at = begin + t * PP_TILE;
        panel->whole[t] = at >= all_from && at + PP_TILE <= all_to;
        if (panel->whole[t]) continue;
        panel->whole_panel = 0;
        for (int r = 0; r < panel->rows; r++) {
            const pp_row *row = &panel->row[r];
            panel->seen[t][r] = r > 0 && row->query == row[-1].query && row->view == row[-1].view
                                    ? panel->seen[t][r - 1]
                                    : pp_tile_seen(row->view, row->query, at) & pp_bits_between(0, chunk_end - at);
        }
    }
}

/* Returns 1 if the row sees a token of the chunk. */
static int sees_chunk(const pp_panel *panel, int r) {
    for (int t = panel->first; t < panel->end; t++)
        if (panel->whole[t] || panel->seen[t][r]) return 1;
    return 0;
}

/* Applies soft cap and ALiBi to the scores of row r in tile t.  Masked tokens get a score of -inf. */
static __attribute__((noinline)) void bend_scores(const pp_panel *panel, int r, int t, float *s) {
    const pp_tile *of_call = &panel->call->tile;
    const uint32_t seen = panel->whole[t] ? ALL_SEEN : panel->seen[t][r];
    if (of_call->cap != 0.0f) cap_scores(of_call, 1, s);
    if (of_call->alibi_slopes) {
        pp_tile tile = *of_call;
        tile.row = panel->row[r].row;
        tile.distance = panel->chunk->begin + t * PP_TILE - panel->origin[r];
        add_slopes(&tile, 0, 1, s);
    }
    if (seen == ALL_SEEN) return;
    for (int i = 0; i < PP_TILE; i++) s[i] = seen >> i & 1 ? s[i] : -INFINITY;
}

PP_INLINE void copy_sums(const float *from, float *to, int64_t width) {
    for (int64_t d = 0; d < width; d += PP_LANES) v_store(to + d, settled(v_load(from + d)));
}

/* Merges the panel's result of a chunk with the result of the chunks before, for each row. */
static void merge_panel(const pp_panel *panel) {
    const int64_t row_stride = panel->call->row_stride, width = row_stride - PP_GROUP;
    for (int r = 0; r < panel->rows; r++) {
        pp_running *running = &panel->running[r];
        float *sums = panel->sums + r * panel->call->sums_step, *row = panel->results + r * row_stride;
        const float total = panel->to->total[r], m = panel->to->m[r];
        if (!panel->whole_panel && !sees_chunk(panel, r)) continue;
        if (!running->some) {
            *running = (pp_running){.m = m, .total = total, .some = 1};
            copy_sums(sums, row, width);
            continue;
        }
        merged_row merged = {.total = v_set1(running->total), .m = running->m, .sum = row};
        copy_sums(sums, sums, width);
        merge_record(&merged, row, sums, total, m, width);
        running->m = merged.m;
        running->total = v_first(merged.total);
    }
}

/* Stores the panel's result of a chunk in the records of its rows. */
static void record_panel(const pp_panel *panel) {
    const int64_t width = panel->call->row_stride - PP_GROUP;
    for (int r = 0; r < panel->rows; r++) {
        const pp_row *row = &panel->row[r];
        const int sees = panel->first < panel->end && sees_chunk(panel, r);
        if (row->seen) *row->seen = sees ? 1.0f : 0.0f;
        if (!sees) continue;
        copy_sums(panel->sums + r * panel->call->sums_step, row->sums, width);
        row->sums[width] = panel->to->total[r];
        *row->m = panel->to->m[r];
    }
}

static void finish_panel(const pp_panel *panel) { (panel->running ? merge_panel : record_panel)(panel); }

/* The rows of a block of query tokens from `first` on. */
static void list_rows(const pp_query_block *work, int32_t first, pp_panel *panel) {
    const int32_t group_size = work->chunk.group_size;
    const int32_t all = (work->query_end - work->query_begin) * group_size;
    const int32_t begin = work->query_begin * group_size + first;
    int32_t query = begin / group_size, of_group = begin % group_size;
    panel->rows = all - first < PP_PANEL_ROWS ? all - first : PP_PANEL_ROWS;
    for (int r = 0; r < panel->rows; r++) {
        const int64_t head = (int64_t)work->kv_head * group_size + of_group;
        panel->row[r] = (pp_row){.view = &work->chunk.view,
                                 .query = query,
                                 .row = begin + r,
                                 .q = pp_query_at(&work->queries, query, head)};
        if (++of_group < group_size) continue;
        of_group = 0;
        query++;
    }
}

/* The struct of the next panel. */
static pp_panel *next_panel(panel_run *run, const panel_chunk *chunk, const unsigned char *q) {
    pp_panel *panel = &run->panels[run->count % IN_FLIGHT];
    panel->call = &run->call;
    panel->chunk = chunk;
    panel->to = &run->buffers[run->count % NUM_BUFFERS];
    panel->q = q;
    panel->sums = run->scratch.sums;
    panel->running = NULL;
    return panel;
}

/* Computes the next panel, or starts it.  Its rows must be set. */
static void push_panel(panel_run *run, pp_panel *panel) {
    const panel_ways *ways = run->ways;
    look_at_tiles(panel);
    if (panel->first >= panel->end) {
        if (!panel->running) record_panel(panel);
    } else if (ways->push) {
        ways->push(run, panel);
    } else {
        ways->scores(panel);
        ways->softmax(panel);
        ways->values(run, panel);
        finish_panel(panel);
    }
}

static void drain(panel_run *run) {
    if (run->ways->drain) run->ways->drain(run);
}

static void set_tokens(const pp_chunk *chunk, panel_chunk *to) {
    to->begin = chunk->first / PP_TILE * PP_TILE;
    to->first = chunk->first;
    to->end = chunk->end;
}

static void read_head(const panel_run *run, const pp_chunk *chunk, int32_t head, panel_chunk *to) {
    set_tokens(chunk, to);
    run->ways->read(run, chunk, head, to);
}

/* Number of groups of a chunk, beginning with the tile of its first token: two for each tile. */
static int count_groups(const panel_chunk *chunk) {
    return (int)((chunk->end - chunk->begin + PP_TILE - 1) / PP_TILE) * 2;
}

static void run_prefill(const pp_query_block *work, const panel_ways *ways) {
    const int32_t rows = (work->query_end - work->query_begin) * work->chunk.group_size;
    pp_chunk chunk = work->chunk;
    panel_run *run = begin_run(ways, &chunk, work->kv_head, rows, work->scratch);
    const panel_scratch *scratch = &run->scratch;
    for (int32_t r = 0; r < rows; r += PP_PANEL_ROWS) {
        pp_panel *panel = next_panel(run, NULL, NULL);
        list_rows(work, r, panel);
        ways->pack(run, panel, &chunk, work->kv_head, work->queries.dtype,
                   scratch->q + r / PP_PANEL_ROWS * scratch->q_bytes);
    }
    for (int32_t r = 0; r < rows; r++) scratch->running[r] = (pp_running){.some = 0};
    const int64_t first = pp_first_seen(&chunk.view, work->query_begin);
    const int64_t last = pp_end_seen(&chunk.view, work->query_end - 1);
    int number = 0;
    for (chunk.begin = first / PP_CHUNK * PP_CHUNK; chunk.begin < last; chunk.begin += PP_CHUNK, number++) {
        panel_chunk *at = &run->chunks[number % IN_FLIGHT];
        chunk.first = first > chunk.begin ? first : chunk.begin;
        chunk.end = chunk.begin + PP_CHUNK < last ? chunk.begin + PP_CHUNK : last;
        read_head(run, &chunk, work->kv_head, at);
        for (int32_t r = 0; r < rows; r += PP_PANEL_ROWS) {
            pp_panel *panel = next_panel(run, at, scratch->q + r / PP_PANEL_ROWS * scratch->q_bytes);
            list_rows(work, r, panel);
            panel->running = scratch->running + r;
            panel->results = scratch->results + r * run->call.row_stride;
            push_panel(run, panel);
        }
    }
    drain(run);
    write_rows_of_unit(work, scratch->running, scratch->results, run->call.row_stride);
}

/* The queries of a panel are needed only until its scores are computed, which push_panel does at once. */
static void run_shared(const pp_shared *work, const panel_ways *ways) {
    panel_run *run = begin_run(ways, &work->chunk, work->kv_head, PP_PANEL_ROWS, work->scratch);
    read_head(run, &work->chunk, work->kv_head, &run->chunks[0]);
    for (;;) {
        pp_panel *panel = next_panel(run, &run->chunks[0], run->scratch.q);
        panel->rows = work->next_rows(work->context, panel->row);
        if (!panel->rows) break;
        ways->pack(run, panel, &work->chunk, work->kv_head, work->q_dtype, run->scratch.q);
        push_panel(run, panel);
    }
    drain(run);
}
