/* quantised.c: every dtype, and every pair of dtypes of K and V.  The pages end at the end of a mapping and first
 * contain garbage. Appended rows are read back within the error of their dtype.  Attention matches a plain loop in
 * double.  Its bits do not depend on threads, the order of units, blocks of queries or shared prefixes.
 *
 * Prints the instruction set and a hash of all results, the same for all sets with fma.  Argument: n, to run only every
 * n-th case (default 1). */
#define _DEFAULT_SOURCE
#include <pthread.h>

#include "guarded.h"
#include "scenario.h"

enum { NUM_SEQS = 16, LAYERS = 2, SHARED = 4, PREFIX = PP_CHUNK, NUM_DIMS = 6, MOST_THREADS = 8, MOST_TOKENS = 600 };

/* Sequences from number SHARED on begin with the same chunk: enough sequences that cascade pays off. */
static const int32_t SEQ_LENS[NUM_SEQS] = {0, 1, 17, 33, 512, 513, 520, 530, 512, 514, 545, 512, 517, 528, 512, 600};
static const int32_t COUNTS[NUM_SEQS] = {2, 1, 17, 5, 0, 9, 2, 1, 1, 2, 1, 1, 3, 1, 1, 30};
static const int32_t PIECES[] = {1, 7, 12, 16, 40, 3};
static const int32_t DIMS[NUM_DIMS] = {8, 24, 64, 72, 128, 136};

static int64_t num_shared; /* shared chunks of all plans so far */
static uint64_t hash = 0xcbf29ce484222325u;

static void add_to_hash(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
}

static int is_quantised(int32_t dtype) { return dtype == PP_INT8 || dtype == PP_INT4; }

static int is_pair(int32_t dtype, int32_t v_dtype) {
    return dtype == v_dtype || (dtype == PP_INT8 && v_dtype == PP_INT4);
}

/* Initial content of the pages: NaN as a float, or numbers close to the largest. */
static void fill_with_garbage(const pp_kv_pool *pool, int which) {
    memset(pool->base, which ? 0x7f : 0xff, (size_t)(pool->num_blocks * pool->layout.block_bytes));
}

/* Appends all sequences, in one call or in pieces. */
static void append_all(const scenario *s, int in_pieces) {
    for (int32_t seq = 0, piece = 0; seq < s->num_seqs; seq++)
        for (int32_t t = seq > SHARED ? PREFIX : 0, end; t < s->seq_lens[seq]; t = end, piece++) {
            end = in_pieces ? t + PIECES[piece % (int32_t)(sizeof PIECES / sizeof PIECES[0])] : s->seq_lens[seq];
            if (end > s->seq_lens[seq]) end = s->seq_lens[seq];
            scenario_append(s, seq, t, end);
        }
}

/* Checks a row that was read back from pages of `dtype`; its channel scales may be NULL. */
static void check_row(const float *got, const float *appended, int32_t dims, int32_t dtype, const float *channels) {
    const float most = dtype == PP_INT4 ? 7.0f : 127.0f;
    float largest = 0.0f;
    for (int32_t d = 0; d < dims; d++) largest = fmaxf(largest, fabsf(appended[d] / (channels ? channels[d] : 1.0f)));
    for (int32_t d = 0; d < dims; d++) {
        const float off = fabsf(got[d] - appended[d]) / (channels ? channels[d] : 1.0f);
        const float roundings = 6.0f * 0x1p-24f * largest; /* f32 rounding of append, gather and this check */
        CHECK(is_quantised(dtype) ? off <= 0.5f * largest / most + roundings : got[d] == appended[d]);
    }
}

/* Reads K and V of a sequence from the pool and compares them with the appended values. */
static void gather(const scenario *s, int32_t layer, int32_t seq, float *k, float *v) {
    const pp_kv_layout *layout = &s->pool.layout;
    const int32_t heads = layout->num_kv_heads, dims = layout->head_dim, v_dims = layout->v_head_dim;
    float row[PP_MAX_HEAD_DIM];
    CHECK(pp_kv_gather(&s->pool, layer, s->tables + seq * s->width, scenario_blocks_of(s, seq), s->seq_lens[seq], k,
                       v) == PP_OK);
    for (int32_t t = 0; t < s->seq_lens[seq]; t++)
        for (int32_t h = 0; h < heads; h++) {
            const int32_t owner = (seq > SHARED && t < PREFIX ? SHARED : seq) + 1000 * layer;
            const float *channels = s->pool.k_channel_scale;
            for (int32_t d = 0; d < dims; d++) row[d] = scenario_number(0, owner, t, h, d);
            check_row(k + (t * heads + h) * dims, row, dims, layout->dtype,
                      channels ? channels + (layer * heads + h) * dims : NULL);
            for (int32_t d = 0; d < v_dims; d++) row[d] = scenario_number(1, owner, t, h, d);
            check_row(v + (t * heads + h) * v_dims, row, v_dims, layout->v_dtype, NULL);
        }
}

/* Computes the expected result of a row over the first `seen` tokens; returns the lse. */
static double attend(const float *q, const float *k, const float *v, const pp_kv_layout *layout, int32_t seen,
                     double scale, double *out) {
    const int64_t heads = layout->num_kv_heads, dims = layout->head_dim, v_dims = layout->v_head_dim;
    double weights[MOST_TOKENS], largest = -INFINITY, sum = 0.0;
    for (int64_t d = 0; d < v_dims; d++) out[d] = 0.0;
    for (int64_t t = 0; t < seen; t++) {
        double score = 0.0;
        for (int64_t d = 0; d < dims; d++) score += (double)q[d] * (double)k[t * heads * dims + d];
        weights[t] = score * scale;
        largest = fmax(largest, weights[t]);
    }
    for (int64_t t = 0; t < seen; t++) sum += weights[t] = exp(weights[t] - largest);
    for (int64_t t = 0; t < seen; t++)
        for (int64_t d = 0; d < v_dims; d++) out[d] += weights[t] / sum * (double)v[t * heads * v_dims + d];
    return largest + log(sum);
}

/* Checks every `step`-th row of the results. */
static void check_results(const scenario *s, const pp_decode_args *args, int step) {
    const pp_kv_layout *layout = &s->pool.layout;
    const int32_t heads = layout->num_kv_heads, group = s->num_qo_heads / heads, v_dims = layout->v_head_dim;
    double expected[PP_MAX_HEAD_DIM], error = 0.0, size = 0.0;
    float *k = scenario_memory((size_t)(MOST_TOKENS * heads * layout->head_dim) * sizeof(float));
    float *v = scenario_memory((size_t)(MOST_TOKENS * heads * v_dims) * sizeof(float));
    int64_t row = 0;
    for (int32_t seq = 0; seq < s->num_seqs; seq++) {
        const int32_t count = s->starts[seq + 1] - s->starts[seq];
        gather(s, args->layer, seq, k, v);
        for (int32_t i = 0; i < count; i++)
            for (int32_t head = 0; head < s->num_qo_heads; head++, row++) {
                const int32_t seen = s->seq_lens[seq] - count + i + 1;
                const float *out = (const float *)args->out + row * v_dims;
                if (row % step) continue;
                const double lse = attend(s->q + row * layout->head_dim, k + head / group * layout->head_dim,
                                          v + head / group * v_dims, layout, seen, (double)args->sm_scale, expected);
                CHECK(seen > 0 ? fabs(lse - args->lse[row]) < 1e-3 : isinf(args->lse[row]) && args->lse[row] < 0.0f);
                for (int32_t d = 0; d < v_dims; d++) {
                    error += (out[d] - expected[d]) * (out[d] - expected[d]);
                    size += expected[d] * expected[d];
                }
            }
    }
    CHECK(sqrt(error) <= 1e-4 * sqrt(size));
    free(k);
    free(v);
}

/* Runs a plan's units one by one in a shuffled order, or in ranges by three threads. */
static void run_units(pp_decode_plan *plan, int by_threads) {
    enum { RANGES = 3 };
    const int64_t units = plan->num_units;
    if (by_threads) {
        pthread_t threads[RANGES];
        scenario_range ranges[RANGES];
        for (int i = RANGES - 1; i >= 0; i--) {
            ranges[i] = (scenario_range){plan, units * i / RANGES, units * (i + 1) / RANGES};
            CHECK(pthread_create(&threads[i], NULL, scenario_run_range, &ranges[i]) == 0);
        }
        for (int i = 0; i < RANGES; i++) CHECK(pthread_join(threads[i], NULL) == 0);
        return;
    }
    int64_t *order = scenario_memory((size_t)units * sizeof *order);
    for (int64_t i = 0; i < units; i++) {
        const int64_t other = scenario_hash((uint32_t)i) % (uint32_t)(i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    for (int64_t i = 0; i < units; i++) pp_decode_run(plan, order[i], order[i] + 1);
    free(order);
}

/* Plans for 1 to 8 threads, with and without cascade, give the same bits. */
static void check_plans(const pp_decode_args *right, size_t out_bytes, size_t lse_bytes, int step) {
    pp_decode_args args = *right;
    args.out = scenario_memory(out_bytes);
    args.lse = scenario_memory(lse_bytes);
    for (int num_threads = 1; num_threads <= MOST_THREADS; num_threads += step)
        for (int no_cascade = 0; no_cascade < 2; no_cascade++) {
            size_t bytes;
            pp_decode_plan plan;
            args.num_threads = num_threads;
            args.no_cascade = no_cascade;
            memset(args.out, 0xff, out_bytes);
            memset(args.lse, 0xff, lse_bytes);
            CHECK(pp_decode_workspace(&args, &bytes) == PP_OK);
            void *workspace = at_the_end(NULL, bytes);
            CHECK(pp_decode_plan_init(&plan, &args, workspace, bytes) == PP_OK);
            CHECK(!no_cascade || !plan.num_shared);
            num_shared += plan.num_shared;
            run_units(&plan, (num_threads + no_cascade) % 2);
            CHECK(memcmp(args.out, right->out, out_bytes) == 0 && memcmp(args.lse, right->lse, lse_bytes) == 0);
            free_at_the_end(workspace, bytes);
        }
    free(args.out);
    free(args.lse);
}

/* One or several query tokens per sequence: results of rows that are computed apart, then of plans. */
static void check_attention(scenario *s, int32_t layer) {
    pp_decode_args args;
    for (int several = 0; several < 2; several++) {
        for (int32_t seq = 0; seq < NUM_SEQS; seq++) s->starts[seq + 1] = s->starts[seq] + (several ? COUNTS[seq] : 1);
        scenario_make_q(s);
        const size_t rows = (size_t)scenario_row_count(s), out_bytes = (size_t)scenario_out_count(s) * sizeof(float);
        scenario_args(s, layer, scenario_memory(out_bytes), scenario_memory(rows * sizeof(float)), &args);
        if (several) args.query_start_loc = s->starts;
        scenario_decode_apart(s, &args);
        check_results(s, &args, several ? 23 : 5);
        check_plans(&args, out_bytes, rows * sizeof(float), several ? 3 : 1);
        add_to_hash(args.out, out_bytes);
        free(args.out);
        free(args.lse);
    }
}

/* Gives the sequences from number SHARED on the same first blocks.  The last of these blocks is the last block of the
 * pool, so that reads reach the end of the mapping. */
static void share_prefix(scenario *s) {
    const int32_t count = PREFIX / s->pool.layout.block_size, last = (int32_t)s->pool.num_blocks - 1;
    int32_t *first = s->tables + SHARED * s->width;
    for (int32_t i = 0; i < s->num_seqs * s->width; i++)
        if (s->tables[i] == last) s->tables[i] = first[count - 1];
    first[count - 1] = last;
    for (int32_t seq = SHARED + 1; seq < s->num_seqs; seq++)
        memcpy(s->tables + seq * s->width, first, (size_t)count * sizeof(int32_t));
}

static void check_pair(const pp_kv_layout *layout, int32_t group, int32_t layer, int has_channels) {
    scenario s;
    scenario_make_of(&s, layout, group, NUM_SEQS, SEQ_LENS);
    share_prefix(&s);
    const size_t count = (size_t)(LAYERS * layout->num_kv_heads * layout->head_dim);
    float *channels = at_the_end(NULL, count * sizeof(float));
    for (size_t i = 0; i < count; i++) channels[i] = (float)(8 + scenario_hash((uint32_t)i) % 25) / 16.0f;
    if (has_channels) s.pool.k_channel_scale = channels;
    const size_t bytes = (size_t)(s.pool.num_blocks * layout->block_bytes);
    unsigned char *at_once = s.pool.base;
    fill_with_garbage(&s.pool, layer);
    append_all(&s, 0);
    s.pool.base = at_the_end(NULL, bytes);
    fill_with_garbage(&s.pool, layer);
    append_all(&s, 1);
    CHECK(memcmp(s.pool.base, at_once, bytes) == 0);
    check_attention(&s, layer);
    free_at_the_end(s.pool.base, bytes);
    free_at_the_end(channels, count * sizeof(float));
    s.pool.base = at_once;
    scenario_free(&s);
}

/* Every number of dims for each dtype of K and of V.  Channel scales are 1/2 to 2.  The keys here have the same range
 * in all channels, so calibrated scales would be equal, and other scales cost precision of the queries' integers. */
static void check_pairs(int step) {
    static const int32_t groups[] = {1, 2, 3, 4, 5, 7, 12}, block_sizes[] = {16, 32, 128};
    int which = 0;
    for (int dtype = PP_F32; dtype <= PP_INT4; dtype++)
        for (int v_dtype = PP_F32; v_dtype <= PP_INT4; v_dtype++) {
            if (!is_pair(dtype, v_dtype)) continue;
            num_shared = 0;
            for (int i = 0; i < 3; i++, which++) {
                pp_kv_layout layout;
                const int32_t group = groups[which % 7];
                if (which % step) continue;
                CHECK(pp_kv_layout_init_dtypes(&layout, LAYERS, group > 4 ? 1 : 2, DIMS[(2 * i + v_dtype) % NUM_DIMS],
                                               DIMS[(2 * i + dtype + 1) % NUM_DIMS], block_sizes[i], (pp_dtype)dtype,
                                               (pp_dtype)v_dtype) == PP_OK);
                check_pair(&layout, group, which % LAYERS, is_quantised(dtype) && i < 2);
            }
            CHECK(num_shared > 0 || step > 1);
        }
}

/* With channel scales of 1 the results have the same bits as without channel scales.  With scales of 2 as well: the
 * kernel multiplies queries by the number that keys were divided by. */
static void check_channel_scales(void) {
    static const int32_t lens[] = {20};
    for (int dtype = PP_INT8; dtype <= PP_INT4; dtype++) {
        pp_kv_layout layout;
        scenario s;
        pp_decode_args args;
        float scales[2 * 64], k[3][20 * 2 * 64], v[20 * 2 * 64], out[3][6 * 64];
        CHECK(pp_kv_layout_init(&layout, 1, 2, 64, 32, (pp_dtype)dtype) == PP_OK);
        scenario_make_of(&s, &layout, 3, 1, lens);
        for (int i = 0; i < 3; i++) {
            for (int d = 0; d < 2 * 64; d++) scales[d] = i == 2 ? 2.0f : 1.0f;
            s.pool.k_channel_scale = i ? scales : NULL;
            scenario_append(&s, 0, 0, 20);
            CHECK(pp_kv_gather(&s.pool, 0, s.tables, 1, 20, k[i], v) == PP_OK);
            scenario_args(&s, 0, out[i], NULL, &args);
            CHECK(pp_decode(&args, 1) == PP_OK);
            CHECK(memcmp(k[0], k[i], sizeof k[i]) == 0 && memcmp(out[0], out[i], sizeof out[i]) == 0);
        }
        args.out = scales; /* results would overwrite scales that the call reads */
        CHECK(pp_decode(&args, 1) == PP_INVALID_ARGUMENT && scales[0] == 2.0f);
        scenario_free(&s);
    }
}

static void check_refusals(void) {
    pp_kv_layout layout, before;
    CHECK(pp_kv_layout_init_dtypes(&layout, 1, 2, 64, 24, 32, PP_INT8, PP_INT4) == PP_OK);
    CHECK(layout.tiled && !layout.v_in_k && layout.item_bytes == 1);
    CHECK(layout.k_bytes == 64 * 16 + 64 && layout.v_bytes == 24 * 8 + 64);
    CHECK(layout.block_bytes == 2 * 2 * (layout.k_bytes + layout.v_bytes));
    before = layout;
    for (int dtype = PP_F32; dtype <= PP_INT4; dtype++)
        for (int v_dtype = PP_F32; v_dtype <= PP_INT4; v_dtype++)
            for (int32_t size = 1; size <= 40; size++) {
                pp_kv_layout made = before;
                const pp_status status = pp_kv_layout_init_dtypes(&made, 1, 2, 64, 24, size, (pp_dtype)dtype,
                                                                  (pp_dtype)v_dtype);
                const int fits = is_pair(dtype, v_dtype) && (!is_quantised(dtype) || size % 16 == 0);
                CHECK(status == (fits ? PP_OK : PP_INVALID_ARGUMENT));
                CHECK(status == PP_OK || memcmp(&made, &before, sizeof made) == 0);
            }
    for (int way = 0; way < 9; way++) {
        const int32_t layers = way == 0 ? 0 : 1, heads = way == 1 ? 0 : 2, dims = way == 2 ? 60 : 64;
        const int32_t v_dims = way == 3 ? 0 : way == 4 ? PP_MAX_HEAD_DIM + 8 : 24;
        const int dtype = way == 5 ? -1 : way == 6 ? PP_INT4 + 1 : PP_INT8;
        const int v_dtype = way == 7 ? -1 : way == 8 ? PP_INT4 + 1 : PP_INT4;
        CHECK(pp_kv_layout_init_dtypes(&layout, layers, heads, dims, v_dims, 32, (pp_dtype)dtype, (pp_dtype)v_dtype) ==
              PP_INVALID_ARGUMENT);
    }
    CHECK(pp_kv_layout_init_v(&layout, 1, 2, 64, 24, 1, 32, PP_INT8) == PP_INVALID_ARGUMENT); /* V in K */
    CHECK(memcmp(&layout, &before, sizeof layout) == 0);

    static const int32_t lens[] = {20};
    for (int dtype = PP_F32; dtype <= PP_INT4; dtype++)
        for (int v_dtype = PP_F32; v_dtype <= PP_INT4; v_dtype++) {
            scenario s;
            pp_decode_args args;
            float out[2 * 64];
            if (!is_pair(dtype, v_dtype)) continue;
            CHECK(pp_kv_layout_init_dtypes(&layout, 1, 1, 64, 64, 32, (pp_dtype)dtype, (pp_dtype)v_dtype) == PP_OK);
            scenario_make_of(&s, &layout, 2, 1, lens);
            scenario_append(&s, 0, 0, 20);
            scenario_args(&s, 0, out, NULL, &args);
            args.arithmetic = PP_ROUNDED_BF16;
            memset(out, 0xff, sizeof out);
            const int takes_it = dtype == PP_F16 || dtype == PP_BF16;
            CHECK(pp_decode(&args, 1) == (takes_it ? PP_OK : PP_INVALID_ARGUMENT));
            CHECK(takes_it || isnan(out[0]));
            const int64_t slot = 0;
            for (int src = PP_INT8; src <= PP_INT4; src++) /* dtypes of pages, not of sources */
                CHECK(pp_kv_append(&s.pool, 0, &slot, 1, s.q, s.q, (pp_dtype)src, 64, 64) == PP_INVALID_ARGUMENT);
            scenario_free(&s);
        }
}

int main(int argc, char **argv) {
    const int step = argc > 1 ? atoi(argv[1]) : 1;
    CHECK(step > 0);
    check_refusals();
    check_channel_scales();
    check_pairs(step);
    printf("ok %s %016llx\n", pp_isa(), (unsigned long long)hash);
    return 0;
}
