/* tiles_run.h: arithmetic "bf16" and "bf16x2" by vectors: prefill, chunks that sequences share, and decode.  Once per
 * ISA, after tiles_vectors.h and tiles_panel.h.
 *
 * Reads K and V of tiled bf16 pages in place.  Values are computed tile by tile for all dims, so that pages are read
 * sequentially; the sums stay in L1. */

/* The parts of a unit's scratch. */
typedef struct tile_scratch {
    pp_running *running;   /* of all rows */
    float *rows;
    unsigned char *groups; /* for list_groups */
    tile_buffers *buffers;
    tile_job *job;
    tile_item *q; /* of all panels */
    float *sums, *widened;
    unsigned char *v; /* of one tile: [v_squares][16 pairs][32 dims] */
} tile_scratch;

/* Assigns the parts for `rows` rows in `memory`, and returns their size in bytes. */
static int64_t lay_out_tiles(const pp_kv_layout *layout, int q_parts, int32_t rows, unsigned char *memory,
                             tile_scratch *scratch) {
    int64_t at = 0;
    const int64_t padded = (rows + PP_ROWS - 1) / PP_ROWS * PP_ROWS, item = sizeof(float), k_dims = layout->head_dim;
    const int64_t v_dims = (layout->v_head_dim + 31) / 32 * 32, steps = (k_dims + 31) / 32;
    *scratch = (tile_scratch){.buffers = carve(memory, &at, sizeof(tile_buffers))};
    scratch->job = carve(memory, &at, sizeof(tile_job));
    scratch->q = carve(memory, &at, padded * q_parts * steps * 32 * (int64_t)sizeof(tile_item));
    scratch->sums = carve(memory, &at, PP_ROWS * v_dims * item);
    scratch->widened = carve(memory, &at, k_dims * item);
    scratch->v = carve(memory, &at, v_dims * PP_TILE * 2);
    scratch->running = carve(memory, &at, padded * (int64_t)sizeof(pp_running));
    scratch->rows = carve(memory, &at, padded * pp_row_stride(layout) * item);
    scratch->groups = carve(memory, &at, groups_bytes(layout));
    return at;
}

static int64_t tiles_bytes(const pp_kv_layout *layout, int32_t arithmetic, int32_t q_dtype, int32_t rows) {
    tile_scratch scratch;
    return lay_out_tiles(layout, pp_query_parts(arithmetic, q_dtype), rows, NULL, &scratch);
}

/* Distance in groups from the group that is read to the group that is prefetched into L2. */
enum { FAR = 6, BEHIND = FAR + 2 };

/* Scores of all tiles.  Called while subnormals are flushed. */
static __attribute__((noinline)) void scores_of_job(const tile_job *job, const unsigned char *const *k) {
    const tile_call *call = job->call;
    for (int t = job->first; t < job->end; t++) {
        int fresh = 1;
        for (int i = 0; i < call->steps; i++)
            for (int other = call->page_parts - 1; other >= 0; other--) {
                const int pairs = (call->head_dim - 32 * i) / 2;
                tile_columns b = {.step = 64, .pairs = pairs < 16 ? pairs : 16};
                for (int j = 0; j < 2; j++) {
                    b.at[0][j] = k[2 * t + j] + other * call->k_step + i * PP_K_TILE;
                    b.at[1][j] = b.at[0][j] + PP_K_TILE / 2;
                    b.near[0][j] = b.near[1][j] = distance_of(k[2 * t + 2 + j], k[2 * t + j]);
                    b.far[0][j] = b.far[1][j] = distance_of(k[2 * t + FAR + j], k[2 * t + j]);
                }
                for (int part = call->q_parts - 1; part >= 0; part--, fresh = 0)
                    add_product(job->rows, queries_at(call, job->q, part, i), 32, &b, job->to->s + t * PP_TILE,
                                PP_SCORE_STEP, fresh);
            }
    }
}

/* Adds weights times part `other` of V of a tile to the sums of rows [from, to), smallest part first.  `square`
 * describes the part of V. */
static void add_values(const tile_job *job, int from, int to, int t, int d, int other, const tile_columns *square) {
    const int64_t sums_step = job->call->v_squares * 32;
    int fresh = t == job->first && other == job->call->page_parts - 1;
    for (int part = job->call->p_parts - 1; part >= 0; part--, fresh = 0)
        add_product(to - from, job->to->p[part][t] + from * 32, 32, square, job->sums + from * sums_step + 32 * d,
                    sums_step, fresh);
}

/* The same for a copy of V in which masked tokens are zeros. */
static void add_copied_values(const tile_job *job, int from, int to, int t, int d, const unsigned char *const *v,
                              uint32_t seen, unsigned char *copy) {
    tile_columns b = {.step = 128, .pairs = 16};
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 2; j++) b.at[h][j] = copy + h * PP_HALF_PAIRS * 128 + j * 64;
    for (int other = job->call->page_parts - 1; other >= 0; other--) {
        copy_v(job->call->v_head_dim, d, v + 2 * t, other * job->call->v_step, seen, copy, 128, 64);
        add_values(job, from, to, t, d, other, &b);
    }
}

/* Returns 1 if some bf16 number in `bytes` bytes is a NaN or an infinity. */
static int some_not_finite(const unsigned char *words, int64_t bytes) {
    uint32_t found = 0;
    for (int64_t i = 0; i < bytes; i += 4) {
        uint32_t word;
        memcpy(&word, words + i, sizeof word);
        found |= ((word & 0x7f80u) == 0x7f80u) | ((word & 0x7f800000u) == 0x7f800000u);
    }
    return found != 0;
}

/* Returns 1 if V of a tile has a NaN or an infinity.  Only the first part of each value is tested: it is not finite if
 * the value is not. */
static int tile_not_finite(const tile_call *call, const unsigned char *const *v) {
    const int64_t bytes = (int64_t)call->v_head_dim * PP_GROUP * 2;
    return some_not_finite(v[0], bytes) || some_not_finite(v[1], bytes);
}

/* Weights times V of all tiles.  Called while subnormals are flushed. */
static __attribute__((noinline)) void values_of_job(const tile_job *job, const unsigned char *const *v,
                                                    unsigned char *copy) {
    const tile_call *call = job->call;
    for (int t = job->first; t < job->end; t++) {
        /* A weight of 0 masks V only if V is finite.  Otherwise masked tokens are zeroed for each run of rows. */
        const int apart = !job->whole[t] && tile_not_finite(call, v + 2 * t);
        for (int d = 0; d < call->v_squares; d++) {
            const int run = 32 * d / PP_V_RUN * PP_V_RUN, left = call->v_head_dim - run;
            const int64_t width = left < PP_V_RUN ? left : PP_V_RUN, column = 32 * d % PP_V_RUN;
            for (int from = 0, to; apart && from < job->rows; from = to) {
                for (to = from + 1; to < job->rows && job->seen[t][to] == job->seen[t][from];) to++;
                add_copied_values(job, from, to, t, d, v, job->seen[t][from], copy);
            }
            if (apart) continue;
            if (column + 32 > width) {
                add_copied_values(job, 0, job->rows, t, d, v, ALL_SEEN, copy);
                continue;
            }
            tile_columns b = {.step = width * 4, .pairs = 16};
            for (int other = call->page_parts - 1; other >= 0; other--) {
                for (int h = 0; h < 2; h++)
                    for (int j = 0; j < 2; j++) {
                        b.at[h][j] =
                            v[2 * t + h] + other * call->v_step + (int64_t)run * PP_GROUP * 2 + column * 4 + j * 64;
                        b.near[h][j] = distance_of(v[2 * t + 2 + h], v[2 * t + h]);
                        b.far[h][j] = distance_of(v[2 * t + FAR + h], v[2 * t + h]);
                    }
                add_values(job, 0, job->rows, t, d, other, &b);
            }
        }
    }
}

/* Runs all stages of a job.  Returns 1 if a row sees a token of the chunk. */
static int run_job(tile_job *job, int64_t chunk_end, const unsigned char *const *k, const unsigned char *const *v,
                   unsigned char *copy) {
    look_at_squares(job, chunk_end);
    if (job->first >= job->end) return 0;
    unsigned before = flush_begin();
    scores_of_job(job, k);
    flush_end(before);
    softmax_of_job(job);
    before = flush_begin();
    values_of_job(job, v, copy);
    flush_end(before);
    return 1;
}

/* The groups of K and V of a head in a chunk, `count` of each, followed by the groups that are read next. */
typedef struct tile_groups {
    int count;
    const unsigned char *k[PP_CHUNK_GROUPS + BEHIND], *v[PP_CHUNK_GROUPS + BEHIND];
} tile_groups;

/* Lists the groups, followed by a copy of the last two. */
static void read_groups(const tile_call *call, const pp_chunk *chunk, int32_t head, unsigned char *laid_out,
                        tile_groups *groups) {
    groups->count = list_groups(call, chunk, head, laid_out, groups->k, groups->v);
    for (int i = groups->count; i < groups->count + BEHIND; i++) {
        groups->k[i] = groups->k[i - 2];
        groups->v[i] = groups->v[i - 2];
    }
}

/* Lists V after K, and after V the K of the next head or of the next chunk, in the order in which they are read. */
static void follow_on(const pp_chunk *work, int has_next, tile_groups *groups) {
    if (groups_bytes(&work->pool->layout)) return; /* they are copies */
    for (int i = 0; i < BEHIND; i++) {
        const int at = i < groups->count ? i : i % 2;
        groups->k[groups->count + i] = groups->v[at];
        if (has_next)
            groups->v[groups->count + i] = at_distance(groups->k[at], work->pool->layout.head_bytes);
        else if (work->next[0])
            groups->v[groups->count + i] = work->next[i % 4];
    }
}

static void tiles_prefill(const pp_query_block *work) {
    const pp_kv_layout *layout = &work->chunk.pool->layout;
    const int32_t rows = (work->query_end - work->query_begin) * work->chunk.group_size;
    pp_chunk chunk = work->chunk;
    const tile_call call = begin_call(&chunk, work->kv_head);
    const int64_t q_items = (int64_t)call.q_parts * call.steps * PP_SQUARE, row_stride = pp_row_stride(layout);
    tile_scratch scratch;
    tile_groups groups;
    lay_out_tiles(layout, call.q_parts, rows, work->scratch, &scratch);
    tile_job *job = scratch.job;
    *job = (tile_job){.call = &call, .to = scratch.buffers, .sums = scratch.sums};
    for (int32_t r = 0; r < rows; r += PP_ROWS) {
        list_job_rows(work, r, job);
        cut_queries(job, work->queries.dtype, scratch.widened, scratch.q + r / PP_ROWS * q_items);
    }
    for (int32_t r = 0; r < rows; r++) scratch.running[r] = (pp_running){.some = 0};
    const int64_t first = pp_first_seen(&chunk.view, work->query_begin);
    const int64_t last = pp_end_seen(&chunk.view, work->query_end - 1);
    for (chunk.begin = first / PP_CHUNK * PP_CHUNK; chunk.begin < last; chunk.begin += PP_CHUNK) {
        chunk.first = first > chunk.begin ? first : chunk.begin;
        chunk.end = chunk.begin + PP_CHUNK < last ? chunk.begin + PP_CHUNK : last;
        read_groups(&call, &chunk, work->kv_head, scratch.groups, &groups);
        job->begin = chunk.first / PP_TILE * PP_TILE;
        for (int32_t r = 0; r < rows; r += PP_ROWS) {
            list_job_rows(work, r, job);
            job->q = scratch.q + r / PP_ROWS * q_items;
            if (run_job(job, chunk.end, groups.k, groups.v, scratch.v))
                merge_job(job, scratch.running + r, scratch.rows + r * row_stride, row_stride);
        }
    }
    write_rows_of_unit(work, scratch.running, scratch.rows, row_stride);
}

static void tiles_shared(const pp_shared *work) {
    const pp_kv_layout *layout = &work->chunk.pool->layout;
    const tile_call call = begin_call(&work->chunk, work->kv_head);
    tile_scratch scratch;
    tile_groups groups;
    lay_out_tiles(layout, call.q_parts, PP_ROWS, work->scratch, &scratch);
    tile_job *job = scratch.job;
    *job = (tile_job){.call = &call,
                      .to = scratch.buffers,
                      .q = scratch.q,
                      .sums = scratch.sums,
                      .begin = work->chunk.first / PP_TILE * PP_TILE};
    read_groups(&call, &work->chunk, work->kv_head, scratch.groups, &groups);
    while ((job->rows = work->next_rows(work->context, job->row)) > 0) {
        cut_queries(job, work->q_dtype, scratch.widened, scratch.q);
        run_job(job, work->chunk.end, groups.k, groups.v, scratch.v);
        record_job(job, pp_row_stride(layout));
    }
}

/* Decode: a chunk of one sequence for some parts of its rows.  Queries are rows of f32. */
static void tiles_chunk(const pp_chunk *work) {
    const pp_kv_layout *layout = &work->pool->layout;
    const int32_t head_rows = work->group_size * work->view.num_queries;
    const int32_t first = row_of_part(head_rows, work->part_begin), last = row_of_part(head_rows, work->part_end);
    const int64_t row_stride = work->row_stride;
    tile_scratch scratch;
    tile_groups groups;
    lay_out_tiles(layout, pp_query_parts(work->arithmetic, work->q_dtype), PP_ROWS, work->scratch, &scratch);
    tile_job *job = scratch.job;
    tile_call call = begin_call(work, 0);
    *job = (tile_job){.call = &call,
                      .to = scratch.buffers,
                      .q = scratch.q,
                      .sums = scratch.sums,
                      .begin = work->first / PP_TILE * PP_TILE};
    for (int32_t from = first, to; from < last; from = to) {
        const int32_t head = from / head_rows, head_end = (head + 1) * head_rows;
        to = head_end < last ? head_end : last;
        if (work->alibi_slopes) call.tile.alibi_slopes = work->alibi_slopes + head * work->group_size;
        read_groups(&call, work, head, scratch.groups, &groups);
        follow_on(work, to < last, &groups);
        for (int32_t row = from; row < to; row += PP_ROWS) {
            list_chunk_rows(work, head, row, to, job);
            cut_queries(job, PP_F32, scratch.widened, scratch.q);
            run_job(job, work->end, groups.k, groups.v, scratch.v);
            record_job(job, row_stride);
        }
    }
}

const pp_tile_kernels PP_CAT(pp_tiles_, PP_ISA, ) = {tiles_chunk,  tiles_prefill, tiles_shared,
                                                      PP_ROWS,      8 * PP_ROWS,   tiles_bytes,
                                                      PP_PRODUCT_ROWS, 30};
