/* tiles_amx.h: arithmetic "bf16" and "bf16x2" by AMX.  Included after simd_tiles.h, tiles_panel.h.
 *
 * Tiles 0 to 3 hold a square of 32 x 32 numbers.  Tiles 4 and 5 hold rows, tiles 6 and 7 hold columns.  K is read
 * directly from bf16 pages: 32 dims of a group are a tile.  V is copied into tiles, once per chunk for all panels.
 *
 * Tiles and vectors have separate execution units, which work in parallel only if their instructions are close
 * together.  Three jobs are therefore in progress, one in each stage.  After each step (4 products of tiles) follows an
 * item of softmax, which takes about as long.
 *
 * Measured on Granite Rapids, for a job of 32 rows, 512 tokens and 128 dims in "bf16": 128 steps with loads from L2
 * take 4.0 us, their softmax takes 2.4 us, and both together 5.5 us.  The whole job takes about 10 us.  Real numbers
 * take longer than zeros, because the tile unit then needs more power.  These changes gained nothing: items of 2, 8 or
 * 16 tiles, values in runs of 4 or 8 tiles so that weights stay in L1, weights row by row, prefetches of K and V into
 * L1, more panels for each copy of V, two copies of V instead of three.
 *
 * The jobs of each KV head are a pipeline of their own.  Its first and its last job do not overlap with others.  In a
 * prompt of 128 tokens with 4 query heads per KV head, these are 2 of 16 jobs, so a pipeline across KV heads would gain
 * 1 to 3 %.  A panel of up to 16 rows takes half the products. */

enum { ITEM_TILES = 4, NUM_JOBS = 3 };

/* K and V of one head of one chunk. */
typedef struct amx_chunk {
    const unsigned char *k[PP_CHUNK_GROUPS], *v[PP_CHUNK_GROUPS]; /* groups as in list_groups; v until the next read */
    unsigned char *v_tiles; /* [parts][v_squares][tiles of tokens][2][1 KB] */
    unsigned char *k_tail;  /* [parts][groups][1 KB]: the last dims, if they are fewer than 32 */
    int v_in_k;             /* V is read from K: v is not set */
    int not_finite;         /* V has a NaN or an infinity */
} amx_chunk;

typedef struct amx_job {
    tile_job job;
    const amx_chunk *chunk;
    pp_running *running; /* results of the panel's rows; NULL if results go to the records of the rows */
    float *rows;
} amx_job;

/* The work of a call on one head, and its scratch. */
typedef struct amx_run {
    tile_call call;
    int64_t row_stride;
    int count; /* number of jobs started */
    amx_job jobs[NUM_JOBS];
    amx_chunk chunks[NUM_JOBS];
    tile_buffers under_way[2]; /* alternate: scores of one job are written while weights of another are read */
} amx_run;

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

typedef struct amx_scratch {
    amx_run *run;
    tile_item *q;
    float *sums, *apart, *widened, *rows;
    pp_running *running;
    unsigned char *groups, *v[NUM_JOBS], *k_tail[NUM_JOBS];
    amx_units *units;
} amx_scratch;

static int64_t lay_out_amx(const pp_kv_layout *layout, int q_parts, int32_t rows, unsigned char *memory,
                           amx_scratch *scratch) {
    int64_t at = 0;
    const int64_t padded = (rows + PP_ROWS - 1) / PP_ROWS * PP_ROWS, item = sizeof(float);
    const int64_t steps = (layout->head_dim + 31) / 32, v_dims = (layout->v_head_dim + 31) / 32 * 32;
    *scratch = (amx_scratch){.run = carve(memory, &at, sizeof(amx_run))};
    scratch->units = carve(memory, &at, sizeof(amx_units));
    scratch->q = carve(memory, &at, padded * q_parts * steps * 32 * (int64_t)sizeof(tile_item));
    scratch->sums = carve(memory, &at, PP_ROWS * v_dims * item);
    scratch->apart = carve(memory, &at, PP_ROWS * v_dims * item);
    scratch->widened = carve(memory, &at, layout->head_dim * item);
    scratch->rows = carve(memory, &at, padded * pp_row_stride(layout) * item);
    scratch->running = carve(memory, &at, padded * (int64_t)sizeof(pp_running));
    scratch->groups = carve(memory, &at, groups_bytes(layout));
    for (int i = 0; i < NUM_JOBS; i++) {
        const int64_t tails = layout->head_dim % 32 ? PP_CHUNK_GROUPS * TILE_BYTES : 0;
        scratch->v[i] = carve(memory, &at, pp_parts_of(layout->dtype) * PP_CHUNK * v_dims * 2);
        scratch->k_tail[i] = carve(memory, &at, pp_parts_of(layout->dtype) * tails);
    }
    return at;
}

static int64_t amx_bytes(const pp_kv_layout *layout, int32_t arithmetic, int32_t q_dtype, int32_t rows) {
    amx_scratch scratch;
    const int64_t own = lay_out_amx(layout, pp_query_parts(arithmetic, q_dtype), rows, NULL, &scratch);
    const int64_t by_vectors = pp_tiles_avx512_wide.bytes(layout, arithmetic, q_dtype, PP_ROWS);
    return own > by_vectors ? own : by_vectors;
}

/* Address of the tile of part `other` of V for 32 tokens and dims [32 d, 32 d + 16).  The next 16 dims follow. */
PP_INLINE unsigned char *v_tile_at(const tile_call *call, const amx_chunk *chunk, int other, int d, int t) {
    return chunk->v_tiles + ((int64_t)(other * call->v_squares + d) * PP_SQUARES + t) * 2 * TILE_BYTES;
}

/* Address of the tile of the last dims of part `other` of K for a group. */
PP_INLINE unsigned char *k_tail_at(const amx_chunk *chunk, int other, int group) {
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
PP_INLINE __m512i copy_v_square(const tile_call *call, const amx_chunk *chunk, int t, int d, uint32_t seen,
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
static int copy_v_into_tiles(const tile_call *call, const amx_chunk *chunk, int t, uint32_t seen) {
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
static int list_groups_amx(const tile_call *call, const pp_chunk *from, int32_t head, unsigned char *groups,
                           amx_chunk *chunk) {
    const pp_kv_layout *layout = &from->pool->layout;
    const int tail = call->head_dim % 32;
    int count;
    chunk->v_in_k = layout->v_in_k && layout->tiled && layout->dtype == PP_BF16;
    if (chunk->v_in_k) {
        count = count_groups(from);
        pp_list_groups(from, from->end, chunk->k);
        for (int i = 0; i < count + 2; i++) chunk->k[i] += head * layout->head_bytes;
    } else
        count = list_groups(call, from, head, groups, chunk->k, chunk->v);
    for (int i = 0; tail && i < call->page_parts * count; i++) {
        const int other = i / count, g = i % count;
        const unsigned char *last = chunk->k[g] + other * call->k_step + call->head_dim / 32 * PP_K_TILE;
        memset(k_tail_at(chunk, other, g), 0, TILE_BYTES);
        memcpy(k_tail_at(chunk, other, g), last, (size_t)tail / 2 * TILE_ROW_BYTES);
    }
    return count;
}

/* Prepares K and V of a chunk as tiles.  Tile 0 begins at token `begin`. */
static void read_chunk_amx(const tile_call *call, const pp_chunk *from, int32_t head, int64_t begin,
                           unsigned char *groups, amx_chunk *chunk) {
    const int count = list_groups_amx(call, from, head, groups, chunk);
    chunk->not_finite = 0;
    for (int t = 0; 2 * t < count; t++) {
        const int64_t at = begin + t * PP_TILE;
        chunk->not_finite |= copy_v_into_tiles(call, chunk, t, pp_bits_between(from->first - at, from->end - at));
    }
}

/* The softmax of a job.  Its items are spread evenly over the steps of other jobs. */
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
PP_INLINE void square_of_scores(const int PARTS, const amx_job *a, int t, amx_softmax *x) {
    const tile_job *job = &a->job;
    const tile_call *call = job->call;
    const int two = job->rows > TILE_ROWS, whole = call->head_dim / 32;
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
                square_dot(queries_at(call, job->q, part, i), two);
                if (x) step_done(PARTS, x);
            }
        }
    square_store(job->to->s + t * PP_TILE, PP_SCORE_STEP, two);
}

/* Multiplies the panel's weights by 32 dims of V. */
PP_INLINE void dims_of_values(const int PARTS, const amx_job *c, int d, float *sums, amx_softmax *x) {
    const tile_job *job = &c->job;
    const int two = job->rows > TILE_ROWS;
    square_zero();
    for (int t = job->first; t < job->end; t++)
        for (int other = job->call->page_parts - 1; other >= 0; other--) {
            const unsigned char *v = v_tile_at(job->call, c->chunk, other, d, t);
            tile_stream(6, v, TILE_ROW_BYTES);
            tile_stream(7, v + TILE_BYTES, TILE_ROW_BYTES);
            PP_UNROLL for (int part = PARTS - 1; part >= 0; part--) {
                square_dot(job->to->p[part][t], two);
                if (x) step_done(PARTS, x);
            }
        }
    square_store(sums + 32 * d, job->call->v_squares * 32, two);
}

static void finish_job(const amx_run *run, const amx_job *c) {
    if (c->running)
        merge_job(&c->job, c->running, c->rows, run->row_stride);
    else
        record_job(&c->job, run->row_stride);
}

/* Runs one stage of each of up to three jobs: scores of a, softmax of b, values of c.  Then records the result of c. */
PP_INLINE void stages(const int PARTS, const amx_run *run, const amx_job *a, const amx_job *b, const amx_job *c) {
    const tile_call *call = &run->call;
    const int squares = a ? a->job.end - a->job.first : 0, v_squares = call->v_squares;
    amx_softmax x = {.steps = (int64_t)squares * call->steps * call->q_parts * call->page_parts};
    if (c) x.steps += (int64_t)v_squares * (c->job.end - c->job.first) * PARTS * call->page_parts;
    if (b) {
        x.next = (tile_softmax){.job = &b->job, .tile = b->job.first};
        x.items = (int64_t)b->job.rows * ((b->job.end - b->job.first + ITEM_TILES - 1) / ITEM_TILES);
    }
    if (b && x.steps) {
        for (int d = 0, t = 0; d < v_squares; d++) {
            if (c) dims_of_values(PARTS, c, d, c->job.sums, &x);
            for (const int end = squares * (d + 1) / v_squares; t < end; t++)
                square_of_scores(PARTS, a, a->job.first + t, &x);
        }
    } else {
        for (int64_t i = 0; i < x.items; i++) softmax_item(PARTS, ITEM_TILES, &x.next);
        for (int d = 0; c && d < v_squares; d++) dims_of_values(PARTS, c, d, c->job.sums, NULL);
        for (int t = 0; t < squares; t++) square_of_scores(PARTS, a, a->job.first + t, NULL);
    }
    if (c) finish_job(run, c);
}
static __attribute__((noinline)) void stages_1(const amx_run *run, const amx_job *a, const amx_job *b,
                                               const amx_job *c) {
    stages(1, run, a, b, c);
}
static __attribute__((noinline)) void stages_2(const amx_run *run, const amx_job *a, const amx_job *b,
                                               const amx_job *c) {
    stages(2, run, a, b, c);
}
static void run_stages(const amx_run *run, const amx_job *a, const amx_job *b, const amx_job *c) {
    (run->call.p_parts == 1 ? stages_1 : stages_2)(run, a, b, c);
}

/* Returns the job that was started `back` jobs ago, or NULL. */
static amx_job *job_before(amx_run *run, int back) {
    return run->count >= back ? &run->jobs[(run->count - back) % NUM_JOBS] : NULL;
}

/* Finishes the jobs in progress. */
static void drain(amx_run *run) {
    if (!run->count) return;
    run_stages(run, NULL, job_before(run, 1), job_before(run, 2));
    run_stages(run, NULL, NULL, job_before(run, 1));
    run->count = 0;
}

/* Runs a job if V of its chunk is not finite, because a weight of 0 does not mask such a V.  Computes the values query
 * by query, with masked tokens zeroed for each query. */
static void run_apart(amx_run *run, amx_job *a, float *apart) {
    tile_job *job = &a->job;
    const tile_call *call = job->call;
    const int64_t sums_step = call->v_squares * 32;
    for (int t = job->first; t < job->end; t++)
        call->p_parts == 1 ? square_of_scores(1, a, t, NULL) : square_of_scores(2, a, t, NULL);
    softmax_of_job(job);
    for (int from = 0, to; from < job->rows; from = to) {
        for (to = from + 1; to < job->rows && job->row[to].view == job->row[from].view &&
                            job->row[to].query == job->row[from].query;)
            to++;
        for (int t = job->first; t < job->end; t++)
            if (!job->whole[t]) copy_v_into_tiles(call, a->chunk, t, job->seen[t][from]);
        for (int d = 0; d < call->v_squares; d++)
            call->p_parts == 1 ? dims_of_values(1, a, d, apart, NULL) : dims_of_values(2, a, d, apart, NULL);
        memcpy(job->sums + from * sums_step, apart + from * sums_step,
               (size_t)((to - from) * sums_step) * sizeof(float));
    }
    finish_job(run, a);
}

/* Starts the next job.  Its rows and its chunk must be set. */
static void push(amx_run *run, amx_job *a, const pp_chunk *from, float *apart) {
    look_at_squares(&a->job, from->end);
    if (a->job.first >= a->job.end) {
        if (!a->running) record_job(&a->job, run->row_stride);
        return;
    }
    if (a->chunk->not_finite && !a->job.whole_panel) {
        amx_job own = *a;
        drain(run);
        run_apart(run, &own, apart);
        for (int t = own.job.first; t < own.job.end; t++) {
            const int64_t at = own.job.begin + t * PP_TILE;
            copy_v_into_tiles(&run->call, own.chunk, t, pp_bits_between(from->first - at, from->end - at));
        }
        return;
    }
    run_stages(run, a, job_before(run, 1), job_before(run, 2));
    run->count++;
}

/* Returns the struct to use for the next job. */
static amx_job *next_job(amx_run *run, const amx_scratch *scratch, const amx_chunk *chunk, int64_t begin,
                         const tile_item *q) {
    amx_job *a = &run->jobs[run->count % NUM_JOBS];
    a->job.call = &run->call;
    a->job.to = &run->under_way[run->count % 2];
    a->job.q = q;
    a->job.sums = scratch->sums;
    a->job.begin = begin;
    a->chunk = chunk;
    a->running = NULL;
    return a;
}

static amx_run *begin_run(const pp_chunk *chunk, int32_t kv_head, int rows, amx_scratch *scratch) {
    amx_run *run = scratch->run;
    run->call = begin_call(chunk, kv_head);
    run->row_stride = pp_row_stride(&chunk->pool->layout);
    run->count = 0;
    for (int i = 0; i < NUM_JOBS; i++) {
        run->chunks[i].v_tiles = scratch->v[i];
        run->chunks[i].k_tail = scratch->k_tail[i];
    }
    tiles_begin(rows);
    return run;
}

static void prefill_amx(const pp_query_block *work) {
    const pp_kv_layout *layout = &work->chunk.pool->layout;
    const int32_t rows = (work->query_end - work->query_begin) * work->chunk.group_size;
    pp_chunk chunk = work->chunk;
    amx_scratch scratch;
    lay_out_amx(layout, pp_query_parts(chunk.arithmetic, chunk.q_dtype), rows, work->scratch, &scratch);
    amx_run *run = begin_run(&chunk, work->kv_head, TILE_ROWS, &scratch);
    const int64_t q_items = (int64_t)run->call.q_parts * run->call.steps * PP_SQUARE;
    for (int32_t r = 0; r < rows; r += PP_ROWS) {
        amx_job *a = next_job(run, &scratch, NULL, 0, NULL);
        list_job_rows(work, r, &a->job);
        cut_queries(&a->job, work->queries.dtype, scratch.widened, scratch.q + r / PP_ROWS * q_items);
    }
    for (int32_t r = 0; r < rows; r++) scratch.running[r] = (pp_running){.some = 0};
    const int64_t first = pp_first_seen(&chunk.view, work->query_begin);
    const int64_t last = pp_end_seen(&chunk.view, work->query_end - 1);
    int number = 0;
    for (chunk.begin = first / PP_CHUNK * PP_CHUNK; chunk.begin < last; chunk.begin += PP_CHUNK, number++) {
        amx_chunk *at = &run->chunks[number % NUM_JOBS];
        chunk.first = first > chunk.begin ? first : chunk.begin;
        chunk.end = chunk.begin + PP_CHUNK < last ? chunk.begin + PP_CHUNK : last;
        const int64_t begin = chunk.first / PP_TILE * PP_TILE;
        read_chunk_amx(&run->call, &chunk, work->kv_head, begin, scratch.groups, at);
        for (int32_t r = 0; r < rows; r += PP_ROWS) {
            amx_job *a = next_job(run, &scratch, at, begin, scratch.q + r / PP_ROWS * q_items);
            list_job_rows(work, r, &a->job);
            a->running = scratch.running + r;
            a->rows = scratch.rows + r * run->row_stride;
            push(run, a, &chunk, scratch.apart);
        }
    }
    drain(run);
    tiles_end();
    write_rows_of_unit(work, scratch.running, scratch.rows, run->row_stride);
}

/* Panels of up to 32 rows.  The queries of a panel are needed only until its scores are computed, which is
 * immediately. */
static void shared_amx(const pp_shared *work) {
    const pp_chunk *chunk = &work->chunk;
    const int64_t begin = chunk->first / PP_TILE * PP_TILE;
    amx_scratch scratch;
    const int q_parts = pp_query_parts(chunk->arithmetic, work->q_dtype);
    lay_out_amx(&chunk->pool->layout, q_parts, PP_ROWS, work->scratch, &scratch);
    amx_run *run = begin_run(chunk, work->kv_head, TILE_ROWS, &scratch);
    read_chunk_amx(&run->call, chunk, work->kv_head, begin, scratch.groups, &run->chunks[0]);
    for (;;) {
        amx_job *a = next_job(run, &scratch, &run->chunks[0], begin, scratch.q);
        a->job.rows = work->next_rows(work->context, a->job.row);
        if (!a->job.rows) break;
        cut_queries(&a->job, work->q_dtype, scratch.widened, scratch.q);
        push(run, a, chunk, scratch.apart);
    }
    drain(run);
    tiles_end();
}
