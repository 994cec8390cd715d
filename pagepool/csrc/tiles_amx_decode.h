/* tiles_amx_decode.h: decode by AMX.  Included after tiles_amx.h.
 *
 * With up to 16 rows per head, memory bandwidth is the limit.  Each line is prefetched into L1 a little before it is
 * read.  On Granite Rapids, S1 took 1.1 times as long with prefetches into L2 in addition, and 1.3 times without any.
 * K and V are read four groups at a time, because the hardware prefetchers follow several pages at once.
 *
 * Heads are read one after another, because the weights of a chunk need all its scores.  The exact kernels read all
 * heads of a tile.  That order alone was up to 1.05 times as fast on this CPU. */

static void add_units(amx_units *units, const unsigned char *const *groups, int64_t offset, int count) {
    for (int i = 0; i < count; i++, units->count++) {
        units->at[units->count].groups = groups;
        units->at[units->count].offset = offset + i * TILE_BYTES;
    }
}

/* Adds the units of a job to the empty list.  `next_head` is the distance to the next head in the pages, or 0. */
static void list_units(const amx_job *a, int64_t next_head, amx_units *units) {
    const tile_call *call = a->job.call;
    const int begin = a->job.first & ~1, end = a->job.end, v_squares = a->chunk->v_in_k ? 0 : call->v_squares;
    for (int t = begin; t < end; t += 2) add_units(units, a->chunk->k + 2 * t, 0, call->steps);
    for (int d = 0; d < v_squares; d += 2) /* V is read 64 dims at a time */
        for (int t = begin; t < end; t += 2)
            add_units(units, a->chunk->v + 2 * t, d * TILE_BYTES, d + 1 < v_squares ? 2 : 1);
    for (int i = 0; i < AHEAD_UNITS; i += call->steps)
        add_units(units, a->chunk->k + 2 * begin, next_head, call->steps);
}

/* Prefetches half `half` of the unit that is read AHEAD_UNITS units after unit `next`. */
PP_INLINE void prefetch_unit(const amx_units *units, int next, int half) {
    const unsigned char *ahead[4];
    if (next + AHEAD_UNITS >= units->count) return;
    const unsigned char *const *groups = units->at[next + AHEAD_UNITS].groups;
    const int64_t offset = units->at[next + AHEAD_UNITS].offset + half * (TILE_BYTES / 2);
    PP_UNROLL for (int g = 0; g < 4; g++) ahead[g] = groups[g] + offset;
    PP_UNROLL for (int line = 0; line < 8; line++)
        PP_UNROLL for (int g = 0; g < 4; g++) prefetch_into_l1(ahead[g] + line * 64);
}

/* Scores of all tiles. */
static __attribute__((noinline)) void scores_of_few(const amx_job *a, amx_units *units) {
    const tile_job *job = &a->job;
    const tile_call *call = job->call;
    const int whole = call->head_dim / 32;
    for (int t = job->first & ~1; t < job->end; t += 2) {
        square_zero();
        for (int i = 0; i < call->steps; i++, units->next++) {
            const unsigned char *k[4];
            for (int g = 0; g < 4; g++)
                k[g] = i == whole ? k_tail_at(a->chunk, 0, 2 * t + g) : a->chunk->k[2 * t + g] + i * PP_K_TILE;
            for (int part = call->q_parts - 1; part >= 0; part--) {
                tile_load(4, queries_at(call, job->q, part, i), TILE_ROW_BYTES);
                tile_load(6, k[0], TILE_ROW_BYTES);
                tile_load(7, k[1], TILE_ROW_BYTES);
                tile_dot(0, 4, 6);
                tile_dot(1, 4, 7);
                if (!part) prefetch_unit(units, units->next, 0);
                tile_load(6, k[2], TILE_ROW_BYTES);
                tile_load(7, k[3], TILE_ROW_BYTES);
                tile_dot(2, 4, 6);
                tile_dot(3, 4, 7);
                if (!part) prefetch_unit(units, units->next, 1);
            }
        }
        tile_store_pair(0, job->to->s + t * PP_TILE, PP_SCORE_STEP);
        tile_store_pair(1, job->to->s + (t + 1) * PP_TILE, PP_SCORE_STEP);
    }
}

/* Copies V of a tile of tokens, 64 dims from 32 d on, into tiles.  Tokens from chunk_end on become zeros.  Returns 1 if
 * V is not finite and some rows do not see all tokens. */
PP_INLINE int copy_v_of_few(const amx_job *a, int d, int t, int64_t chunk_end, unsigned char *to) {
    const __m512i none = _mm512_setzero_si512();
    const int both = d + 1 < a->job.call->v_squares;
    if (a->job.whole[t]) {
        copy_v_square(a->job.call, a->chunk, t, d, ALL_SEEN, to, none);
        if (both) copy_v_square(a->job.call, a->chunk, t, d + 1, ALL_SEEN, to + 2 * TILE_BYTES, none);
        return 0;
    }
    const uint32_t seen = pp_bits_between(0, chunk_end - a->job.begin - t * PP_TILE);
    __m512i most = copy_v_square(a->job.call, a->chunk, t, d, seen, to, none);
    if (both) most = copy_v_square(a->job.call, a->chunk, t, d + 1, seen, to + 2 * TILE_BYTES, most);
    return is_not_finite(most);
}

/* Adds the products of the weights in tiles 4 and 5 (the smaller part) and of columns to tile C. */
#define ADD_VALUES(C, B, from) \
    do { \
        tile_load(B, from, TILE_ROW_BYTES); \
        if (PARTS == 2) tile_dot(C, 5, B); \
        tile_dot(C, 4, B); \
    } while (0)

/* Weights times V of all tiles of a job.  V of a tile of tokens is copied while the tile before is multiplied.  Returns
 * 1 if the result is wrong, because V is not finite and masked for a row. */
PP_INLINE int values_of_few(const int PARTS, const amx_job *a, int64_t chunk_end, amx_units *units) {
    enum { BYTES = 4 * TILE_BYTES };
    const tile_job *job = &a->job;
    const tile_call *call = job->call;
    unsigned char *v = a->chunk->v_tiles; /* V of two tiles of tokens: [2][4][1 KB] */
    const int64_t step = call->v_squares * 32;
    int wrong = 0;
    for (int d = 0; d < call->v_squares; d += 2) {
        const int both = d + 1 < call->v_squares;
        square_zero();
        wrong |= copy_v_of_few(a, d, job->first, chunk_end, v + job->first % 2 * BYTES);
        for (int t = job->first; t < job->end; t++) {
            const unsigned char *at = v + t % 2 * BYTES;
            if (t + 1 < job->end) wrong |= copy_v_of_few(a, d, t + 1, chunk_end, v + (t + 1) % 2 * BYTES);
            tile_load(4, job->to->p[0][t], TILE_ROW_BYTES);
            if (PARTS == 2) tile_load(5, job->to->p[1][t], TILE_ROW_BYTES);
            ADD_VALUES(0, 6, at);
            ADD_VALUES(1, 7, at + TILE_BYTES);
            prefetch_unit(units, units->next, t % 2);
            if (both) {
                ADD_VALUES(2, 6, at + 2 * TILE_BYTES);
                ADD_VALUES(3, 7, at + 3 * TILE_BYTES);
                prefetch_unit(units, units->next + 1, t % 2);
            }
            if (t % 2 || t + 1 == job->end) units->next += 1 + both;
        }
        tile_store_pair(0, job->sums + 32 * d, step);
        if (both) tile_store_pair(1, job->sums + 32 * (d + 1), step);
    }
    return wrong;
}
#undef ADD_VALUES
static __attribute__((noinline)) int values_of_few_1(const amx_job *a, int64_t chunk_end, amx_units *units) {
    return values_of_few(1, a, chunk_end, units);
}
static __attribute__((noinline)) int values_of_few_2(const amx_job *a, int64_t chunk_end, amx_units *units) {
    return values_of_few(2, a, chunk_end, units);
}

/* The part of a head that begins at a row. */
static int32_t part_of_row(int32_t head_rows, int32_t row) {
    const int32_t parts = num_parts(head_rows);
    int32_t part = row / head_rows * parts;
    while (row_of_part(head_rows, part) < row) part++;
    return part;
}

static void few_amx(const pp_chunk *work, int32_t head_rows, int32_t first, int32_t last) {
    const pp_kv_layout *layout = &work->pool->layout;
    const int64_t begin = work->first / PP_TILE * PP_TILE;
    amx_scratch scratch;
    lay_out_amx(layout, pp_query_parts(work->arithmetic, work->q_dtype), PP_ROWS, work->scratch, &scratch);
    amx_run *run = begin_run(work, 0, head_rows, &scratch);
    amx_chunk *chunk = &run->chunks[0];
    amx_units *units = scratch.units;
    amx_job *a = next_job(run, &scratch, chunk, begin, scratch.q);
    for (int32_t from = first, to; from < last; from = to) {
        const int32_t head = from / head_rows, head_end = (head + 1) * head_rows;
        int wrong = 0;
        to = head_end < last ? head_end : last;
        if (work->alibi_slopes) run->call.tile.alibi_slopes = work->alibi_slopes + head * work->group_size;
        list_groups_amx(&run->call, work, head, scratch.groups, chunk);
        list_chunk_rows(work, head, from, to, &a->job);
        cut_queries(&a->job, PP_F32, scratch.widened, scratch.q);
        look_at_squares(&a->job, work->end);
        for (int r = 0; r < a->job.rows; r++)
            for (int64_t i = 0; i < run->row_stride; i += PP_GROUP) __builtin_prefetch(a->job.row[r].sums + i, 1);
        if (a->job.first < a->job.end) {
            const int reads_pages = chunk->v_in_k || !groups_bytes(layout);
            units->next = units->count = 0;
            if (reads_pages) list_units(a, to < last ? layout->head_bytes : 0, units);
            scores_of_few(a, units);
            softmax_of_job(&a->job);
            wrong = (run->call.p_parts == 1 ? values_of_few_1 : values_of_few_2)(a, work->end, units);
        }
        record_job(&a->job, run->row_stride);
        if (!wrong) continue;
        pp_chunk again = *work; /* vectors mask V for each row */
        again.part_begin = part_of_row(head_rows, from);
        again.part_end = part_of_row(head_rows, to);
        pp_tiles_avx512_wide.chunk(&again); /* it overwrites the scratch memory */
        begin_run(work, 0, head_rows, &scratch);
        next_job(run, &scratch, chunk, begin, scratch.q);
    }
    tiles_end();
}

/* Decode.  A few rows over pages of f16 are computed by vectors. */
static void chunk_amx(const pp_chunk *work) {
    const pp_kv_layout *layout = &work->pool->layout;
    const int32_t head_rows = work->group_size * work->view.num_queries;
    const int32_t first = row_of_part(head_rows, work->part_begin), last = row_of_part(head_rows, work->part_end);
    const int64_t begin = work->first / PP_TILE * PP_TILE;
    amx_scratch scratch;
    if (head_rows < TILE_ROWS && layout->dtype != PP_BF16) {
        pp_tiles_avx512_wide.chunk(work);
        return;
    }
    if (head_rows <= TILE_ROWS && layout->dtype == PP_BF16) {
        few_amx(work, head_rows, first, last);
        return;
    }
    lay_out_amx(layout, pp_query_parts(work->arithmetic, work->q_dtype), PP_ROWS, work->scratch, &scratch);
    for (int32_t from = first, to; from < last; from = to) {
        const int32_t head = from / head_rows, head_end = (head + 1) * head_rows;
        to = head_end < last ? head_end : last;
        amx_run *run = begin_run(work, head, TILE_ROWS, &scratch);
        read_chunk_amx(&run->call, work, head, begin, scratch.groups, &run->chunks[0]);
        for (int32_t row = from; row < to; row += PP_ROWS) {
            amx_job *a = next_job(run, &scratch, &run->chunks[0], begin, scratch.q);
            list_chunk_rows(work, head, row, to, &a->job);
            cut_queries(&a->job, PP_F32, scratch.widened, scratch.q);
            push(run, a, work, scratch.apart);
        }
        drain(run);
        tiles_end();
    }
}

const pp_tile_kernels pp_tiles_amx = {chunk_amx,    prefill_amx, shared_amx, PP_ROWS,
                                      16 * PP_ROWS, amx_bytes,   TILE_ROWS, 6};
