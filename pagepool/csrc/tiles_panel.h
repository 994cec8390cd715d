/* tiles_panel.h: attention by products of tiles, for arithmetic "bf16" and "bf16x2", except the products.
 *
 * A panel is up to 32 rows of one KV head (a row: one query head of one query token, of any sequence).  A job is a
 * panel and a chunk of 512 tokens, in three stages:
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
 * reference/canonical.py specifies the order of every sum.  No sum runs across rows, so the bits of a row do not depend
 * on its panel.  Vectors (tiles_run.h) and AMX (tiles_amx.h) compute the same bits.
 *
 * Included once per implementation, after the definitions of tile_item, cut_into_parts and add_rounded_weights.  A
 * square has 32 rows x 32 columns; its elements are stored as [32 rows][32]. */

enum {
    PP_ROWS = 32,
    PP_SQUARE = PP_ROWS * PP_TILE,
    PP_SQUARES = PP_CHUNK / PP_TILE,
    PP_SCORE_STEP = PP_CHUNK + 16, /* with rows 2 KB apart, all rows would map to a few sets of L1 */
    PP_K_TILE = 32 * PP_GROUP * 2  /* bytes of 32 dims of K of a group */
};

/* Scores and weights of a job. */
typedef struct tile_buffers {
    float s[PP_ROWS * PP_SCORE_STEP] __attribute__((aligned(64))); /* [32 rows][PP_SCORE_STEP] */
    tile_item p[2][PP_SQUARES][PP_SQUARE] __attribute__((aligned(64)));
    float m[PP_ROWS], total[PP_ROWS]; /* the shift and the sum of the weights of each row */
} tile_buffers;

/* Data that all jobs of a call share. */
typedef struct tile_call {
    int head_dim, v_head_dim;
    int steps, v_squares;     /* in units of 32 dims; the last unit may have fewer */
    int q_parts, p_parts, page_parts; /* parts of a query, a weight, and an element of K or V */
    int64_t k_step, v_step;   /* bytes between the parts of K, and of V, of a group */
    int bends;                /* scale scores and apply soft cap or ALiBi before finding the shift */
    float factor;             /* otherwise the factor that scales scores while they become weights */
    pp_tile tile;             /* arguments of cap_scores and add_slopes */
} tile_call;

typedef struct tile_job {
    const tile_call *call;
    tile_buffers *to;
    const tile_item *q;       /* [q_parts][steps][32 rows][32] */
    float *sums;              /* [32 rows][v_squares * 32]: of weights times V */
    int64_t begin;            /* the first token of tile 0 */
    int first, end;           /* range of tiles with a token that a row sees */
    int rows;
    int whole_panel;          /* all rows see all tokens of all these tiles */
    uint8_t whole[PP_SQUARES];            /* all rows see all tokens of the tile */
    uint32_t seen[PP_SQUARES][PP_ROWS];   /* the tokens that a row sees, if a row does not see all */
    int64_t origin[PP_ROWS];              /* the position of the first query token of the row's sequence */
    pp_row row[PP_ROWS];      /* `view` may be invalid after look_at_squares */
} tile_job;

static tile_call begin_call(const pp_chunk *chunk, int32_t kv_head) {
    const pp_kv_layout *layout = &chunk->pool->layout;
    tile_call call = {
        .head_dim = layout->head_dim,
        .v_head_dim = layout->v_head_dim,
        .steps = (layout->head_dim + 31) / 32,
        .v_squares = (layout->v_head_dim + 31) / 32,
        .q_parts = pp_query_parts(chunk->arithmetic, chunk->q_dtype),
        .p_parts = pp_weight_parts(chunk->arithmetic),
        .page_parts = pp_parts_of(layout->dtype),
        .k_step = PP_GROUP * (int64_t)layout->head_dim * 2,
        .v_step = PP_GROUP * (int64_t)layout->v_head_dim * 2,
        .factor = 1.0f,
        .tile = {.scale = pp_in_base_2(chunk->sm_scale),
                 .cap = pp_in_base_2(chunk->logits_soft_cap),
                 .alibi_slopes = chunk->alibi_slopes ? chunk->alibi_slopes + kv_head * chunk->group_size : NULL,
                 .group_size = chunk->group_size}};
    /* Scaling preserves the maximum of the scores only if the factor is above 0. */
    call.bends = call.tile.cap != 0.0f || call.tile.alibi_slopes || !(call.tile.scale > 0.0f);
    if (!call.bends) call.factor = call.tile.scale;
    if (call.tile.cap != 0.0f) call.tile.inverse_cap = 1.0f / call.tile.cap;
    return call;
}

/* Address of the queries of a part and of 32 dims, [32 rows][32]. */
PP_INLINE const tile_item *queries_at(const tile_call *call, const tile_item *q, int part, int step) {
    return q + (part * call->steps + step) * PP_SQUARE;
}

/* Copies a query in bf16.  Dims after the last one are zeros. */
static inline void copy_query(const tile_call *call, const unsigned char *q, tile_item *to) {
    int i = 0;
    for (; i < call->head_dim / 32; i++) memcpy(to + i * PP_SQUARE, q + 64 * i, 64);
    if (i == call->steps) return;
    memset(to + i * PP_SQUARE, 0, 64);
    memcpy(to + i * PP_SQUARE, q + 64 * i, (size_t)(call->head_dim - 32 * i) * 2);
}

/* Splits the queries of the job's rows into parts at `to`.  Dims after the last one are zeros. */
static void cut_queries(const tile_job *job, int32_t q_dtype, float *widened, tile_item *to) {
    const tile_call *call = job->call;
    const int64_t step = (int64_t)call->steps * PP_SQUARE;
    for (int r = 0; r < job->rows; r++) {
        if (sizeof(tile_item) == 2 && q_dtype == PP_BF16) { /* they are items already, in one part */
            copy_query(call, job->row[r].q, to + r * 32);
            continue;
        }
        const float *q = row_in_f32(q_dtype, job->row[r].q, widened, call->head_dim);
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

/* Determines which tokens of the chunk's tiles the job's rows see.  Tile 0 begins at token job->begin. */
static void look_at_squares(tile_job *job, int64_t chunk_end) {
    const int64_t begin = job->begin;
    int64_t low = INT64_MAX, high = 0, all_from = 0, all_to = chunk_end;
    for (int r = 0; r < job->rows; r++) {
        const pp_row *row = &job->row[r];
        job->origin[r] = pp_position(row->view, 0);
        if (r > 0 && row->query == row[-1].query && row->view == row[-1].view) continue;
        const int64_t first = pp_first_seen(row->view, row->query), end = pp_end_seen(row->view, row->query);
        const int64_t until = row->view->mask && row->view->mask_first < end ? row->view->mask_first : end;
        if (first < low) low = first;
        if (first > all_from) all_from = first;
        if (end > high) high = end;
        if (until < all_to) all_to = until;
    }
    if (high > chunk_end) high = chunk_end;
    job->first = low > begin ? (int)(low - begin < PP_CHUNK ? (low - begin) / PP_TILE : PP_SQUARES) : 0;
    job->end = high > begin ? (int)((high - begin + PP_TILE - 1) / PP_TILE) : 0;
    job->whole_panel = 1;
    for (int t = job->first; t < job->end; t++) {
        const int64_t at = begin + t * PP_TILE;
        job->whole[t] = at >= all_from && at + PP_TILE <= all_to;
        if (job->whole[t]) continue;
        job->whole_panel = 0;
        for (int r = 0; r < job->rows; r++) {
            const pp_row *row = &job->row[r];
            job->seen[t][r] = r > 0 && row->query == row[-1].query && row->view == row[-1].view
                                  ? job->seen[t][r - 1]
                                  : pp_tile_seen(row->view, row->query, at) & pp_bits_between(0, chunk_end - at);
        }
    }
}

/* Returns 1 if the row sees a token of the chunk. */
static int sees_job(const tile_job *job, int r) {
    for (int t = job->first; t < job->end; t++)
        if (job->whole[t] || job->seen[t][r]) return 1;
    return 0;
}

/* Scales the scores of a row, and applies soft cap and ALiBi if the call has them.  Masked tokens get a score of
 * -inf. */
static __attribute__((noinline)) void bend_row(const tile_job *job, int r) {
    const tile_call *call = job->call;
    float *s = job->to->s + r * PP_SCORE_STEP;
    if (call->bends) {
        pp_tile tile = call->tile;
        const pp_v scale = v_set1(tile.scale);
        for (int t = job->first * PP_TILE; t < job->end * PP_TILE; t += PP_LANES)
            v_store(s + t, v_mul(v_load(s + t), scale));
        if (tile.cap != 0.0f) cap_scores(&tile, job->end - job->first, s + job->first * PP_TILE);
        tile.row = job->row[r].row;
        for (int t = job->first; tile.alibi_slopes && t < job->end; t++) {
            tile.distance = job->begin + t * PP_TILE - job->origin[r];
            add_slopes(&tile, 0, 1, s + t * PP_TILE);
        }
    }
    for (int t = job->first; t < job->end; t++) {
        const uint32_t seen = job->whole[t] ? ALL_SEEN : job->seen[t][r];
        float *at = s + t * PP_TILE;
        if (seen == ALL_SEEN) continue;
        for (int i = 0; i < PP_TILE; i++) at[i] = seen >> i & 1 ? at[i] : -INFINITY;
    }
}

/* State of the softmax of a job: the next item is tile `tile` of row `row`. */
typedef struct tile_softmax {
    const tile_job *job;
    int row, tile;
    float m;
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
    const tile_job *job = x->job;
    const int r = x->row;
    float *s = job->to->s + r * PP_SCORE_STEP;
    tile_item *p = job->to->p[0][0] + r * 32;
    if (x->tile == job->first) {
        if (job->call->bends || !job->whole_panel) bend_row(job, r);
        pp_v highest[PP_TILE / PP_LANES];
        PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++) highest[j] = v_set1(-INFINITY);
        for (int t = job->first; t < job->end; t++)
            PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++)
                highest[j] = v_max(v_load(s + t * PP_TILE + j * PP_LANES), highest[j]); /* ignores NaN */
        for (int j = 1; j < PP_TILE / PP_LANES; j++) highest[0] = v_max(highest[j], highest[0]);
        const float m = v_highest(highest[0]) * job->call->factor;
        x->m = m > -FLT_MAX ? m : -FLT_MAX; /* -inf - (-inf) is NaN */
        for (int j = 0; j < PP_GROUP / PP_LANES; j++) x->sum[j] = v_set1(0.0f);
    }
    const int from = x->tile, end = from + TILES < job->end ? from + TILES : job->end;
    const pp_v factor = v_set1(job->call->factor), shift = v_set1(-x->m);
    pp_v sum[PP_GROUP / PP_LANES];
    PP_UNROLL for (int j = 0; j < PP_GROUP / PP_LANES; j++) sum[j] = x->sum[j];
    if (end - from == TILES)
        PP_UNROLL for (int i = 0; i < TILES; i++)
            weigh_tile(PARTS, s + (from + i) * PP_TILE, p + (from + i) * PP_SQUARE, factor, shift, sum);
    else
        for (int t = from; t < end; t++)
            weigh_tile(PARTS, s + t * PP_TILE, p + t * PP_SQUARE, factor, shift, sum);
    x->tile = end;
    if (end == job->end) {
        job->to->m[r] = x->m;
        job->to->total[r] = tree_sum(sum);
        x->row++;
        x->tile = job->first;
    } else
        PP_UNROLL for (int j = 0; j < PP_GROUP / PP_LANES; j++) x->sum[j] = sum[j];
}

/* The softmax of all rows, at once. */
static __attribute__((noinline)) void softmax_of_job(const tile_job *job) {
    tile_softmax x = {.job = job, .tile = job->first};
    while (x.row < job->rows)
        if (job->call->p_parts == 1)
            softmax_item(1, PP_SQUARES, &x);
        else
            softmax_item(2, PP_SQUARES, &x);
}

/* Copies a row of sums.  Replaces -0 by 0, because the sign of a zero after underflow can depend on masked tokens. */
PP_INLINE void copy_sums(const float *from, float *to, int64_t width) {
    for (int64_t d = 0; d < width; d += PP_LANES) v_store(to + d, v_add(v_load(from + d), v_set1(0.0f)));
}

/* Merges the job's result with the result of the chunks before, for each row. */
static void merge_job(const tile_job *job, pp_running *running, float *rows, int64_t row_stride) {
    const int64_t width = row_stride - PP_GROUP, sums_step = job->call->v_squares * 32;
    for (int r = 0; r < job->rows; r++) {
        float *sums = job->sums + r * sums_step, *row = rows + r * row_stride;
        const float total = job->to->total[r], m = job->to->m[r];
        if (!job->whole_panel && !sees_job(job, r)) continue;
        if (!running[r].some) {
            running[r] = (pp_running){.m = m, .total = total, .some = 1};
            copy_sums(sums, row, width);
            continue;
        }
        merged_row merged = {.total = v_set1(running[r].total), .m = running[r].m, .sum = row};
        copy_sums(sums, sums, width);
        merge_record(&merged, row, sums, total, m, width);
        running[r].m = merged.m;
        running[r].total = v_first(merged.total);
    }
}

/* Stores the job's result in the records of its rows. */
static void record_job(const tile_job *job, int64_t row_stride) {
    const int64_t width = row_stride - PP_GROUP, sums_step = job->call->v_squares * 32;
    for (int r = 0; r < job->rows; r++) {
        const pp_row *row = &job->row[r];
        const int sees = job->first < job->end && sees_job(job, r);
        if (row->seen) *row->seen = sees ? 1.0f : 0.0f;
        if (!sees) continue;
        copy_sums(job->sums + r * sums_step, row->sums, width);
        row->sums[width] = job->to->total[r];
        *row->m = job->to->m[r];
    }
}

/* The rows of a block of query tokens from `first` on. */
static void list_job_rows(const pp_query_block *work, int32_t first, tile_job *job) {
    const int32_t group_size = work->chunk.group_size;
    const int32_t all = (work->query_end - work->query_begin) * group_size;
    const int32_t begin = work->query_begin * group_size + first;
    int32_t query = begin / group_size, of_group = begin % group_size;
    job->rows = all - first < PP_ROWS ? all - first : PP_ROWS;
    for (int r = 0; r < job->rows; r++) {
        const int64_t head = (int64_t)work->kv_head * group_size + of_group;
        job->row[r] = (pp_row){.view = &work->chunk.view,
                               .query = query,
                               .row = begin + r,
                               .q = pp_query_at(&work->queries, query, head)};
        if (++of_group < group_size) continue;
        of_group = 0;
        query++;
    }
}

/* Lists the rows of one head in a chunk, from row `row` of all rows up to `to`.  Their queries are rows of f32. */
static void list_chunk_rows(const pp_chunk *work, int32_t head, int32_t row, int32_t to, tile_job *job) {
    const int32_t head_rows = work->group_size * work->view.num_queries;
    job->rows = to - row < PP_ROWS ? to - row : PP_ROWS;
    for (int r = 0; r < job->rows; r++) {
        const int32_t at = row + r, of_head = at - head * head_rows;
        job->row[r] = (pp_row){.view = &work->view,
                               .query = of_head / work->group_size,
                               .row = of_head,
                               .q = work->q + (int64_t)at * work->pool->layout.head_dim,
                               .sums = work->rows + at * work->row_stride,
                               .m = work->m + at,
                               .seen = work->seen ? work->seen + at : NULL};
    }
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

/* Number of groups of a chunk, beginning with the tile of its first token: two for each tile. */
static int count_groups(const pp_chunk *chunk) {
    const int64_t begin = chunk->first / PP_TILE * PP_TILE;
    return (int)((chunk->end - begin + PP_TILE - 1) / PP_TILE) * 2;
}

/* Lists K and V of a head for the groups of a chunk, beginning with the tile of its first token, in the order of bf16
 * pages: in the pages, or in `groups`.  The first part is listed, and the other follows it.  Returns the number of
 * groups. */
static int list_groups(const tile_call *call, const pp_chunk *chunk, int32_t head, unsigned char *groups,
                       const unsigned char **k, const unsigned char **v) {
    const pp_kv_layout *layout = &chunk->pool->layout;
    const int count = count_groups(chunk);
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
