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

/* Adds the units of a panel to the empty list.  `next_head` is the distance to the next head in the pages, or 0. */
static void list_units(const pp_panel *a, int64_t next_head, amx_units *units) {
    const panel_call *call = a->call;
    const int begin = a->first & ~1, end = a->end, v_squares = a->chunk->v_in_k ? 0 : call->v_squares;
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
static __attribute__((noinline)) void scores_of_few(const pp_panel *a, amx_units *units) {
    const panel_call *call = a->call;
    const int whole = call->head_dim / 32;
    for (int t = a->first & ~1; t < a->end; t += 2) {
        square_zero();
        for (int i = 0; i < call->steps; i++, units->next++) {
            const unsigned char *k[4];
            for (int g = 0; g < 4; g++)
                k[g] = i == whole ? k_tail_at(a->chunk, 0, 2 * t + g) : a->chunk->k[2 * t + g] + i * PP_K_TILE;
            for (int part = call->q_parts - 1; part >= 0; part--) {
                tile_load(4, queries_at(call, a->q, part, i), TILE_ROW_BYTES);
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
        tile_store_pair(0, a->to->s + t * PP_TILE, PP_SCORE_STEP);
        tile_store_pair(1, a->to->s + (t + 1) * PP_TILE, PP_SCORE_STEP);
    }
}

/* Copies V of a tile of tokens, 64 dims from 32 d on, into tiles.  Tokens after the chunk become zeros.  Returns 1 if V
 * is not finite and some rows do not see all tokens. */
PP_INLINE int copy_v_of_few(const pp_panel *a, int d, int t, unsigned char *to) {
    const __m512i none = _mm512_setzero_si512();
    const int both = d + 1 < a->call->v_squares;
    if (a->whole[t]) {
        copy_v_square(a->call, a->chunk, t, d, ALL_SEEN, to, none);
        if (both) copy_v_square(a->call, a->chunk, t, d + 1, ALL_SEEN, to + 2 * TILE_BYTES, none);
        return 0;
    }
    const uint32_t seen = pp_bits_between(0, a->chunk->end - a->chunk->begin - t * PP_TILE);
    __m512i most = copy_v_square(a->call, a->chunk, t, d, seen, to, none);
    if (both) most = copy_v_square(a->call, a->chunk, t, d + 1, seen, to + 2 * TILE_BYTES, most);
    return is_not_finite(most);
}

/* Adds the products of the weights in tiles 4 and 5 (the smaller part) and of columns to tile C. */
#define ADD_VALUES(C, B, from) \
    do { \
        tile_load(B, from, TILE_ROW_BYTES); \
        if (PARTS == 2) tile_dot(C, 5, B); \
        tile_dot(C, 4, B); \
    } while (0)

/* Weights times V of all tiles of a panel.  V of a tile of tokens is copied while the tile before is multiplied.
 * Returns 1 if the result is wrong, because V is not finite and masked for a row. */
PP_INLINE int values_of_few(const int PARTS, const pp_panel *a, amx_units *units) {
    enum { BYTES = 4 * TILE_BYTES };
    const panel_call *call = a->call;
    unsigned char *v = a->chunk->v_tiles; /* V of two tiles of tokens: [2][4][1 KB] */
    int wrong = 0;
    for (int d = 0; d < call->v_squares; d += 2) {
        const int both = d + 1 < call->v_squares;
        square_zero();
        wrong |= copy_v_of_few(a, d, a->first, v + a->first % 2 * BYTES);
        for (int t = a->first; t < a->end; t++) {
            const unsigned char *at = v + t % 2 * BYTES;
            if (t + 1 < a->end) wrong |= copy_v_of_few(a, d, t + 1, v + (t + 1) % 2 * BYTES);
            tile_load(4, a->to->p[0][t], TILE_ROW_BYTES);
            if (PARTS == 2) tile_load(5, a->to->p[1][t], TILE_ROW_BYTES);
            ADD_VALUES(0, 6, at);
            ADD_VALUES(1, 7, at + TILE_BYTES);
            prefetch_unit(units, units->next, t % 2);
            if (both) {
                ADD_VALUES(2, 6, at + 2 * TILE_BYTES);
                ADD_VALUES(3, 7, at + 3 * TILE_BYTES);
                prefetch_unit(units, units->next + 1, t % 2);
            }
            if (t % 2 || t + 1 == a->end) units->next += 1 + both;
        }
        tile_store_pair(0, a->sums + 32 * d, call->sums_step);
        if (both) tile_store_pair(1, a->sums + 32 * (d + 1), call->sums_step);
    }
    return wrong;
}
#undef ADD_VALUES
static __attribute__((noinline)) int values_of_few_1(const pp_panel *a, amx_units *units) {
    return values_of_few(1, a, units);
}
static __attribute__((noinline)) int values_of_few_2(const pp_panel *a, amx_units *units) {
    return values_of_few(2, a, units);
}

static panel_run *begin_few(const pp_chunk *work, int32_t head_rows) {
    panel_run *run = begin_run(&ways_amx, work, 0, PP_PANEL_ROWS, work->scratch);
    next_panel(run, &run->chunks[0], run->scratch.q);
    tiles_begin(head_rows);
    return run;
}

/* Decode of up to 16 rows per head over pages of bf16. */
static void few_amx(const pp_chunk *work) {
    const pp_kv_layout *layout = &work->pool->layout;
    const int32_t head_rows = work->group_size * work->view.num_queries;
    panel_run *run = begin_few(work, head_rows);
    panel_chunk *chunk = &run->chunks[0];
    pp_panel *a = &run->panels[0];
    amx_parts own;
    lay_out_parts(layout, run->scratch.own, &own);
    for (int32_t from = work->row_begin, to; from < work->row_end; from = to) {
        const int32_t head = from / head_rows, head_end = (head + 1) * head_rows;
        int wrong = 0;
        to = head_end < work->row_end ? head_end : work->row_end;
        if (work->alibi_slopes) run->call.tile.alibi_slopes = work->alibi_slopes + head * work->group_size;
        set_tokens(work, chunk);
        list_groups_amx(run, work, head, chunk);
        list_chunk_rows(work, head, from, to, a);
        pack_tiles(run, a, work, head, PP_F32, run->scratch.q);
        look_at_tiles(a);
        for (int r = 0; r < a->rows; r++)
            for (int64_t i = 0; i < run->call.row_stride; i += PP_GROUP) __builtin_prefetch(a->row[r].sums + i, 1);
        if (a->first < a->end) {
            const int reads_pages = chunk->v_in_k || !groups_bytes(layout);
            own.units->next = own.units->count = 0;
            if (reads_pages) list_units(a, to < work->row_end ? layout->head_bytes : 0, own.units);
            scores_of_few(a, own.units);
            softmax_of_panel(a);
            wrong = (run->call.p_parts == 1 ? values_of_few_1 : values_of_few_2)(a, own.units);
        }
        record_panel(a);
        if (!wrong) continue;
        pp_chunk again = *work;
        again.row_begin = from;
        again.row_end = to;
        pp_tiles_avx2.chunk(&again); /* the next way masks V for each row; it overwrites the scratch memory */
        begin_few(work, head_rows);
    }
    tiles_end();
}

static void decode_amx(const pp_chunk *work) {
    if (work->group_size * work->view.num_queries <= TILE_ROWS && work->pool->layout.dtype == PP_BF16) {
        few_amx(work);
        return;
    }
    tiles_begin(TILE_ROWS);
    run_decode(work, &ways_amx);
    tiles_end();
}

/* Also enough for the next way. */
static int64_t bytes_amx(const pp_kv_layout *layout, int32_t arithmetic, int32_t q_dtype, int32_t rows) {
    const int64_t own = panel_bytes(&ways_amx, layout, pp_query_parts(arithmetic, q_dtype), rows);
    const int64_t next = pp_tiles_avx2.bytes(layout, arithmetic, q_dtype, PP_PANEL_ROWS);
    return own > next ? own : next;
}

const pp_way pp_tiles_amx = {decode_amx,    prefill_amx,        shared_amx, bytes_amx,
                             PP_PANEL_ROWS, 16 * PP_PANEL_ROWS, TILE_ROWS,  6};
