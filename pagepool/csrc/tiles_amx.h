/* tiles_amx.h: arithmetic "bf16" and "bf16x2" by AMX.  Included after simd_tiles.h, tiles_panel.h.
 *
 * Tiles 0 to 3 hold a square of 32 x 32 numbers.  Tiles 4 and 5 hold rows, tiles 6 and 7 hold columns.  K is read
 * directly from bf16 pages: 32 dims of a group are a tile.  V is copied into tiles, once per chunk for all panels.
 *
 * Tiles and vectors have separate execution units, which work in parallel only if their instructions are close
 * together.  Three panels are therefore in progress, one in each stage.  After each step (4 products of tiles) follows
 * an item of softmax, which takes about as long.
 *
 * Measured on Granite Rapids, for a panel of 32 rows, 512 tokens and 128 dims in "bf16": 128 steps with loads from L2
 * take 4.0 us, their softmax takes 2.4 us, and both together 5.5 us.  The whole panel takes about 10 us.  Real numbers
 * take longer than zeros, because the tile unit then needs more power.  These changes gained nothing: items of 2, 8 or
 * 16 tiles, values in runs of 4 or 8 tiles so that weights stay in L1, weights row by row, prefetches of K and V into
 * L1, more panels for each copy of V, two copies of V instead of three.
 *
 * The panels of each KV head are a pipeline of their own.  Its first and its last panel do not overlap with others.  In
 * a prompt of 128 tokens with 4 query heads per KV head, these are 2 of 16 panels, so a pipeline across KV heads would
 * gain 1 to 3 %.  A panel of up to 16 rows takes half the products. */

enum { ITEM_TILES = 4 };

/* A unit of K and V is 1 KB of each of four groups. */
enum { AHEAD_UNITS = 3, MOST_UNITS = (PP_CHUNK_GROUPS / 4) * (PP_MAX_HEAD_DIM / 32) * 2 };

/* The units of a head in the order in which they are read, then some of the next head. */
typedef struct amx_units {
    int next, count;
    struct {
        const unsigned char *const *groups; /* four */
        int64_t offset;
    } at[MOST_UNITS];
} amx_units;

/* The parts of scratch.own. */
typedef struct amx_parts {
    float *apart;
    amx_units *units;
    unsigned char *v[IN_FLIGHT], *k_tail[IN_FLIGHT];
} amx_parts;

static int64_t lay_out_parts(const pp_kv_layout *layout, unsigned char *memory, amx_parts *parts) {
    int64_t at = 0;
    const int64_t v_dims = (layout->v_head_dim + 31) / 32 * 32, page_parts = pp_parts_of(layout->dtype);
    const int64_t tails = layout->head_dim % 32 ? PP_CHUNK_GROUPS * TILE_BYTES : 0;
    parts->units = carve(memory, &at, sizeof(amx_units));
    parts->apart = carve(memory, &at, PP_PANEL_ROWS * v_dims * (int64_t)sizeof(float));
    for (int i = 0; i < IN_FLIGHT; i++) {
        parts->v[i] = carve(memory, &at, page_parts * PP_CHUNK * v_dims * 2);
        parts->k_tail[i] = carve(memory, &at, page_parts * tails);
    }
    return at;
}

static void lay_out_amx(const pp_kv_layout *layout, int q_parts, panel_sizes *sizes) {
    amx_parts parts;
    lay_out_tiles(layout, q_parts, sizes);
    sizes->own = lay_out_parts(layout, NULL, &parts);
}

/* Address of the tile of part `other` of V for 32 tokens and dims [32 d, 32 d + 16).  The next 16 dims follow. */
PP_INLINE unsigned char *v_tile_at(const panel_call *call, const panel_chunk *chunk, int other, int d, int t) {
    return chunk->v_tiles + ((int64_t)(other * call->v_squares + d) * PP_SQUARES + t) * 2 * TILE_BYTES;
}

/* Address of the tile of the last dims of part `other` of K for a group. */
PP_INLINE unsigned char *k_tail_at(const panel_chunk *chunk, int other, int group) {
    return chunk->k_tail + (int64_t)(other * PP_CHUNK_GROUPS + group) * TILE_BYTES;
}

/* The largest exponent of bf16 numbers, for each of 32 lanes. */
#define EXPONENTS _mm512_set1_epi16(0x7f80)
PP_INLINE __m512i larger_exponents(__m512i most, __m512i words) {
    return _mm512_max_epu16(most, _mm512_and_si512(words, EXPONENTS));
}
PP_INLINE int is_not_finite(__m512i most) { return _mm512_cmpeq_epi16_mask(most, EXPONENTS) != 0; }

/* Copies V of 16 tokens, 16 dims from dim `from` on, out of K into 8 rows of a tile.  In K a word has two dims of a
 * token, in V two tokens of a dim.  Tokens that are not in `seen` become zeros. */
PP_INLINE __m512i turn_v(int v_head_dim, const unsigned char *k, int from, uint32_t seen, unsigned char *to,
                         __m512i most) {
    const __m512i halves = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    pp_v a[8];
    PP_UNROLL for (int i = 0; i < 8; i++) {
        const int pair = from / 2 + i;
        const __m512i words = _mm512_maskz_loadu_epi32((__mmask16)(2 * pair < v_head_dim ? seen : 0), k + pair * 64);
        most = larger_exponents(most, words);
        a[i] = _mm512_castsi512_ps(_mm512_shuffle_epi8(words, halves));
    }
    v_transpose_pairs(a);
    PP_UNROLL for (int i = 0; i < 8; i++) _mm512_storeu_ps((float *)(to + i * TILE_ROW_BYTES), a[i]);
    return most;
}

/* Copies V of token tile t, 32 dims from 32 d on, into two tiles.  Tokens that are not in `seen` become zeros.  Returns
 * the larger exponents of V and `most`. */
PP_INLINE __m512i copy_v_square(const panel_call *call, const panel_chunk *chunk, int t, int d, uint32_t seen,
                                unsigned char *to, __m512i most) {
    const int64_t run = 32 * d / PP_V_RUN * PP_V_RUN;
    if (chunk->v_in_k) {
        for (int g = 0; g < 2; g++)
            for (int j = 0; j < 2; j++)
                most = turn_v(call->v_head_dim, chunk->k[2 * t + g], 32 * d + 16 * j, seen >> 16 * g & 0xffffu,
                              to + j * TILE_BYTES + g * TILE_BYTES / 2, most);
        return most;
    }
    if (seen != ALL_SEEN || call->v_head_dim - run < PP_V_RUN) {
        copy_v(call->v_head_dim, d, chunk->v + 2 * t, 0, seen, to, TILE_ROW_BYTES, TILE_BYTES);
        for (int i = 0; i < 2 * TILE_ROWS; i++) most = larger_exponents(most, _mm512_loadu_si512(to + i * 64));
        return most;
    }
    for (int g = 0; g < 2; g++) {
        const unsigned char *from = chunk->v[2 * t + g] + run * PP_GROUP * 2 + 32 * d % PP_V_RUN * 4;
        PP_UNROLL for (int i = 0; i < 16; i++) {
            const __m512i words = _mm512_loadu_si512(from + i / 2 * PP_V_RUN * 4 + i % 2 * 64);
            _mm512_storeu_si512(to + i % 2 * TILE_BYTES + (8 * g + i / 2) * TILE_ROW_BYTES, words);
            most = larger_exponents(most, words);
        }
    }
    return most;
}

/* Copies V of token tile t into tiles.  Tokens that are not in `seen` become zeros.  Returns 1 if V is not finite. */
static int copy_v_into_tiles(const panel_call *call, const panel_chunk *chunk, int t, uint32_t seen) {
    __m512i most = _mm512_setzero_si512();
    for (int d = 0; d < call->v_squares; d++) {
        most = copy_v_square(call, chunk, t, d, seen, v_tile_at(call, chunk, 0, d, t), most);
        for (int other = 1; other < call->page_parts; other++)
            copy_v(call->v_head_dim, d, chunk->v + 2 * t, other * call->v_step, seen,
                   v_tile_at(call, chunk, other, d, t), TILE_ROW_BYTES, TILE_BYTES);
    }
    return is_not_finite(most);
}

/* Lists the groups of a chunk, and copies the last dims of K if they are fewer than 32.  Returns the number of
 * groups. */
static int list_groups_amx(const panel_run *run, const pp_chunk *from, int32_t head, panel_chunk *chunk) {
    const panel_call *call = &run->call;
    const pp_kv_layout *layout = &from->pool->layout;
    const int tail = call->head_dim % 32;
    int count;
    chunk->v_in_k = layout->v_in_k && layout->tiled && layout->dtype == PP_BF16;
    if (chunk->v_in_k) {
        count = count_groups(chunk);
        pp_list_groups(from, from->end, chunk->k);
        for (int i = 0; i < count + 2; i++) chunk->k[i] += head * layout->head_bytes;
    } else
        count = list_groups(run, from, head, chunk);
    for (int i = 0; tail && i < call->page_parts * count; i++) {
        const int other = i / count, g = i % count;
        const unsigned char *last = chunk->k[g] + other * call->k_step + call->head_dim / 32 * PP_K_TILE;
        memset(k_tail_at(chunk, other, g), 0, TILE_BYTES);
        memcpy(k_tail_at(chunk, other, g), last, (size_t)tail / 2 * TILE_ROW_BYTES);
    }
    return count;
}

/* The tokens of tile t that are in the chunk. */
static uint32_t tokens_of(const panel_chunk *chunk, int t) {
    const int64_t at = chunk->begin + t * PP_TILE;
    return pp_bits_between(chunk->first - at, chunk->end - at);
}

/* Prepares K and V of a chunk as tiles. */
static void read_amx(const panel_run *run, const pp_chunk *from, int32_t head, panel_chunk *chunk) {
    const int count = list_groups_amx(run, from, head, chunk);
    chunk->not_finite = 0;
    for (int t = 0; 2 * t < count; t++)
        chunk->not_finite |= copy_v_into_tiles(&run->call, chunk, t, tokens_of(chunk, t));
}

/* The softmax of a panel.  Its items are spread evenly over the steps of other panels. */
typedef struct amx_softmax {
    tile_softmax next;
    int64_t items, steps, credit;
} amx_softmax;

PP_INLINE void step_done(const int PARTS, amx_softmax *x) {
    for (x->credit += x->items; x->credit >= x->steps; x->credit -= x->steps) softmax_item(PARTS, ITEM_TILES, &x->next);
}

PP_INLINE void square_zero(void) {
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
}
/* Rows are [32][32].  The second half is skipped for a panel of up to 16 rows. */
PP_INLINE void square_dot(const tile_item *rows, int two) {
    tile_load(4, rows, TILE_ROW_BYTES);
    tile_dot(0, 4, 6);
    tile_dot(1, 4, 7);
    if (!two) return;
    tile_load(5, rows + PP_SQUARE / 2, TILE_ROW_BYTES);
    tile_dot(2, 5, 6);
    tile_dot(3, 5, 7);
}
/* Stores two tiles side by side: 0 and 1, or 2 and 3. */
PP_INLINE void tile_store_pair(const int PAIR, float *to, int64_t step) {
    if (PAIR == 0) {
        tile_store(0, to, 4 * step);
        tile_store(1, to + 16, 4 * step);
    } else {
        tile_store(2, to, 4 * step);
        tile_store(3, to + 16, 4 * step);
    }
}
PP_INLINE void square_store(float *to, int64_t step, int two) {
    tile_store_pair(0, to, step);
    if (two) tile_store_pair(1, to + 16 * step, step);
}

/* Scores of 32 tokens. */
PP_INLINE void square_of_scores(const int PARTS, const pp_panel *a, int t, amx_softmax *x) {
    const panel_call *call = a->call;
    const int two = a->rows > TILE_ROWS, whole = call->head_dim / 32;
    square_zero();
    for (int i = 0; i < call->steps; i++)
        for (int other = call->page_parts - 1; other >= 0; other--) { /* smallest part first */
            const int64_t at = other * call->k_step + i * PP_K_TILE;
            const unsigned char *left = a->chunk->k[2 * t] + at, *right = a->chunk->k[2 * t + 1] + at;
            if (i == whole) {
                left = k_tail_at(a->chunk, other, 2 * t);
                right = left + TILE_BYTES;
            }
            tile_stream(6, left, TILE_ROW_BYTES);
            tile_stream(7, right, TILE_ROW_BYTES);
            for (int part = call->q_parts - 1; part >= 0; part--) {
                square_dot(queries_at(call, a->q, part, i), two);
                if (x) step_done(PARTS, x);
            }
        }
    square_store(a->to->s + t * PP_TILE, PP_SCORE_STEP, two);
}

/* Multiplies the panel's weights by 32 dims of V. */
PP_INLINE void dims_of_values(const int PARTS, const pp_panel *c, int d, float *sums, amx_softmax *x) {
    const int two = c->rows > TILE_ROWS;
    square_zero();
    for (int t = c->first; t < c->end; t++)
        for (int other = c->call->page_parts - 1; other >= 0; other--) {
            const unsigned char *v = v_tile_at(c->call, c->chunk, other, d, t);
            tile_stream(6, v, TILE_ROW_BYTES);
            tile_stream(7, v + TILE_BYTES, TILE_ROW_BYTES);
            PP_UNROLL for (int part = PARTS - 1; part >= 0; part--) {
                square_dot(c->to->p[part][t], two);
                if (x) step_done(PARTS, x);
            }
        }
    square_store(sums + 32 * d, c->call->sums_step, two);
}

/* Runs one stage of each of up to three panels: scores of a, softmax of b, values of c.  Then finishes c. */
PP_INLINE void stages(const int PARTS, const panel_run *run, const pp_panel *a, const pp_panel *b, const pp_panel *c) {
    const panel_call *call = &run->call;
    const int squares = a ? a->end - a->first : 0, v_squares = call->v_squares;
    amx_softmax x = {.steps = (int64_t)squares * call->steps * call->q_parts * call->page_parts};
    if (c) x.steps += (int64_t)v_squares * (c->end - c->first) * PARTS * call->page_parts;
    if (b) {
        x.next = (tile_softmax){.panel = b, .tile = b->first};
        x.items = (int64_t)b->rows * ((b->end - b->first + ITEM_TILES - 1) / ITEM_TILES);
    }
    if (b && x.steps) {
        for (int d = 0, t = 0; d < v_squares; d++) {
            if (c) dims_of_values(PARTS, c, d, c->sums, &x);
            for (const int end = squares * (d + 1) / v_squares; t < end; t++)
                square_of_scores(PARTS, a, a->first + t, &x);
        }
    } else {
        for (int64_t i = 0; i < x.items; i++) softmax_item(PARTS, ITEM_TILES, &x.next);
        for (int d = 0; c && d < v_squares; d++) dims_of_values(PARTS, c, d, c->sums, NULL);
        for (int t = 0; t < squares; t++) square_of_scores(PARTS, a, a->first + t, NULL);
    }
    if (c) finish_panel(c);
}
static __attribute__((noinline)) void stages_1(const panel_run *run, const pp_panel *a, const pp_panel *b,
                                               const pp_panel *c) {
    stages(1, run, a, b, c);
}
static __attribute__((noinline)) void stages_2(const panel_run *run, const pp_panel *a, const pp_panel *b,
                                               const pp_panel *c) {
    stages(2, run, a, b, c);
}
static void run_stages(const panel_run *run, const pp_panel *a, const pp_panel *b, const pp_panel *c) {
    (run->call.p_parts == 1 ? stages_1 : stages_2)(run, a, b, c);
}

/* Returns the panel that was started `back` panels ago, or NULL. */
static pp_panel *panel_before(panel_run *run, int back) {
    return run->count >= back ? &run->panels[(run->count - back) % IN_FLIGHT] : NULL;
}

/* Finishes the panels in progress. */
static void drain_amx(panel_run *run) {
    if (!run->count) return;
    run_stages(run, NULL, panel_before(run, 1), panel_before(run, 2));
    run_stages(run, NULL, NULL, panel_before(run, 1));
    run->count = 0;
}

/* Computes a panel if V of its chunk is not finite, because a weight of 0 does not mask such a V.  Computes the values
 * query by query, with masked tokens zeroed for each query. */
static void compute_apart(const panel_run *run, pp_panel *a) {
    const panel_call *call = a->call;
    amx_parts own;
    lay_out_parts(run->layout, run->scratch.own, &own);
    for (int t = a->first; t < a->end; t++)
        call->p_parts == 1 ? square_of_scores(1, a, t, NULL) : square_of_scores(2, a, t, NULL);
    softmax_of_panel(a);
    for (int from = 0, to; from < a->rows; from = to) {
        for (to = from + 1;
             to < a->rows && a->row[to].view == a->row[from].view && a->row[to].query == a->row[from].query;)
            to++;
        for (int t = a->first; t < a->end; t++)
            if (!a->whole[t]) copy_v_into_tiles(call, a->chunk, t, a->seen[t][from]);
        for (int d = 0; d < call->v_squares; d++)
            call->p_parts == 1 ? dims_of_values(1, a, d, own.apart, NULL) : dims_of_values(2, a, d, own.apart, NULL);
        memcpy(a->sums + from * call->sums_step, own.apart + from * call->sums_step,
               (size_t)((to - from) * call->sums_step) * sizeof(float));
    }
    for (int t = a->first; t < a->end; t++) copy_v_into_tiles(call, a->chunk, t, tokens_of(a->chunk, t));
    finish_panel(a);
}

/* Starts the next panel. */
static void push_amx(panel_run *run, pp_panel *a) {
    if (a->chunk->not_finite && !a->whole_panel) {
        drain_amx(run);
        compute_apart(run, a);
        return;
    }
    run_stages(run, a, panel_before(run, 1), panel_before(run, 2));
    run->count++;
}

static void begin_amx(panel_run *run) {
    amx_parts own;
    lay_out_parts(run->layout, run->scratch.own, &own);
    for (int i = 0; i < IN_FLIGHT; i++) {
        run->chunks[i].v_tiles = own.v[i];
        run->chunks[i].k_tail = own.k_tail[i];
    }
}

static const panel_ways ways_amx = {.lay_out = lay_out_amx,
                                    .begin = begin_amx,
                                    .pack = pack_tiles,
                                    .read = read_amx,
                                    .push = push_amx,
                                    .drain = drain_amx};

static void prefill_amx(const pp_query_block *work) {
    tiles_begin(TILE_ROWS);
    run_prefill(work, &ways_amx);
    tiles_end();
}

static void shared_amx(const pp_shared *work) {
    tiles_begin(TILE_ROWS);
    run_shared(work, &ways_amx);
    tiles_end();
}
