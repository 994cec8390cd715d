/* program.c: a C program with the installed headers and libpagepool.a: layout, append, gather, page copy, decode
 * against a plain loop in double, a plan split over threads in odd ranges, and the status of every kind of bad input.
 * */
#include <pthread.h>

#include "scenario.h"

static const int32_t SEQ_LENS[] = {0, 1, 15, 16, 17, 33, 511, 512, 513, 1100};
#define NUM_SEQS 10

static void check_versions(void) {
    CHECK(pp_abi_version() == PP_ABI_VERSION);
    CHECK(pp_isa() != NULL && pp_isa_available(0) != NULL);
    CHECK(pp_default_num_threads() >= 1);
}

static void check_layout(void) {
    pp_kv_layout layout;
    CHECK(pp_kv_layout_init(&layout, 3, 2, 64, 32, PP_BF16) == PP_OK);
    CHECK(layout.tiled && layout.item_bytes == 2);
    CHECK(layout.k_bytes == 64 * 16 * 2 && layout.head_bytes == 2 * layout.k_bytes);
    CHECK(layout.group_bytes == 2 * layout.head_bytes && layout.layer_bytes == 2 * layout.group_bytes);
    CHECK(layout.block_bytes == 3 * layout.layer_bytes);
    CHECK(pp_dtype_bytes(PP_F32) == 4 && pp_dtype_bytes(PP_F16) == 2 && pp_dtype_bytes(PP_BF16) == 2);

    pp_kv_layout before = layout;
    CHECK(pp_kv_layout_init(&layout, 0, 2, 64, 16, PP_F32) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_layout_init(&layout, 1, 0, 64, 16, PP_F32) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_layout_init(&layout, 1, 2, 60, 16, PP_F32) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_layout_init(&layout, 1, 2, PP_MAX_HEAD_DIM + 8, 16, PP_F32) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_layout_init(&layout, 1, 2, 64, 0, PP_F32) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_layout_init(&layout, 1, 2, 64, PP_MAX_BLOCK_SIZE + 1, PP_F32) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_layout_init(&layout, INT32_MAX, INT32_MAX, 256, 1024, PP_F32) == PP_INVALID_ARGUMENT);
    CHECK(memcmp(&before, &layout, sizeof layout) == 0);
}

static void check_gather(const scenario *s) {
    const pp_kv_layout *layout = &s->pool.layout;
    int64_t heads = layout->num_kv_heads, dims = layout->head_dim;
    for (int32_t layer = 0; layer < layout->num_layers; layer++)
        for (int32_t seq = 0; seq < s->num_seqs; seq++) {
            int64_t count = s->seq_lens[seq] * heads * dims, i = 0;
            float *k = scenario_memory((size_t)count * sizeof(float));
            float *v = scenario_memory((size_t)count * sizeof(float));
            const int32_t *blocks = s->tables + (int64_t)seq * s->width;
            CHECK(pp_kv_gather(&s->pool, layer, blocks, scenario_blocks_of(s, seq), s->seq_lens[seq], k, v) == PP_OK);
            for (int32_t t = 0; t < s->seq_lens[seq]; t++)
                for (int64_t h = 0; h < heads; h++)
                    for (int64_t d = 0; d < dims; d++, i++) {
                        CHECK(k[i] == scenario_number(0, seq + 1000 * layer, t, h, d));
                        CHECK(v[i] == scenario_number(1, seq + 1000 * layer, t, h, d));
                    }
            free(k);
            free(v);
        }
}

static void check_copy(const scenario *s) {
    pp_kv_pool two = s->pool;
    two.num_blocks = 2;
    two.base = scenario_memory((size_t)(2 * two.layout.block_bytes));
    memcpy(two.base, s->pool.base, (size_t)two.layout.block_bytes);
    CHECK(pp_kv_copy_block(&two, 1, 0) == PP_OK);
    CHECK(memcmp(two.base, two.base + two.layout.block_bytes, (size_t)two.layout.block_bytes) == 0);
    CHECK(pp_kv_copy_block(&two, 2, 0) == PP_INVALID_BLOCK);
    CHECK(pp_kv_copy_block(&two, 0, -1) == PP_INVALID_BLOCK);
    free(two.base);
}

/* Every call below must be refused and leave the pool's bytes, out and lse as they were. */
static void check_bad_input(scenario *s, pp_decode_args *args) {
    pp_kv_pool *pool = &s->pool;
    int64_t num_slots = pool->num_blocks * pool->layout.block_size, heads = pool->layout.num_kv_heads;
    int64_t dims = pool->layout.head_dim;
    size_t pool_bytes = (size_t)(pool->num_blocks * pool->layout.block_bytes);
    unsigned char *before = scenario_memory(pool_bytes);
    memcpy(before, pool->base, pool_bytes);
    float *row = scenario_memory((size_t)(2 * heads * dims) * sizeof(float));
    memset(row, 0, (size_t)(2 * heads * dims) * sizeof(float));
    int64_t past[] = {0, num_slots}, below[] = {0, -2}, good[] = {0, 1};
    pp_dtype other = PP_INT8; /* a dtype of pages, not of sources */
    CHECK(pp_kv_append(pool, 0, past, 2, row, row, PP_F32, heads * dims, dims) == PP_INVALID_SLOT);
    CHECK(pp_kv_append(pool, 0, below, 2, row, row, PP_F32, heads * dims, dims) == PP_INVALID_SLOT);
    CHECK(pp_kv_append(pool, -1, good, 2, row, row, PP_F32, heads * dims, dims) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_append(pool, pool->layout.num_layers, good, 2, row, row, PP_F32, heads * dims, dims) ==
          PP_INVALID_ARGUMENT);
    CHECK(pp_kv_append(pool, 0, good, 2, row, row, other, heads * dims, dims) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_append(pool, 0, NULL, 2, row, row, PP_F32, heads * dims, dims) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_append(pool, 0, good, 2, NULL, row, PP_F32, heads * dims, dims) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_append(pool, 0, good, 2, row, NULL, PP_F32, heads * dims, dims) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_append(pool, 0, NULL, 0, NULL, NULL, PP_F32, heads * dims, dims) == PP_OK);

    int32_t bad_block[] = {(int32_t)pool->num_blocks};
    CHECK(pp_kv_gather(pool, 0, bad_block, 1, 1, row, row) == PP_INVALID_BLOCK);
    CHECK(pp_kv_gather(pool, 0, s->tables, 0, 1, row, row) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_gather(pool, 0, NULL, 1, 1, row, row) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_gather(pool, 0, s->tables, 1, 1, NULL, row) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_gather(pool, 0, s->tables, 1, 1, row, NULL) == PP_INVALID_ARGUMENT);

    pp_kv_pool without = *pool; /* as after an unchecked failed allocation */
    without.base = NULL;
    pp_decode_args nowhere = *args;
    nowhere.pool = &without;
    CHECK(pp_kv_append(&without, 0, good, 2, row, row, PP_F32, heads * dims, dims) == PP_INVALID_ARGUMENT);
    CHECK(pp_kv_gather(&without, 0, s->tables, 1, 1, row, row) == PP_INVALID_ARGUMENT);
    CHECK(pp_decode(&nowhere, 1) == PP_INVALID_ARGUMENT);

    size_t out_bytes = (size_t)scenario_out_count(s) * sizeof(float);
    float *out_before = scenario_memory(out_bytes);
    memcpy(out_before, args->out, out_bytes);
    pp_decode_args bad = *args;
    bad.num_qo_heads = (int32_t)heads * 2 - 1;
    if (heads > 1) CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    bad = *args;
    bad.layer = pool->layout.num_layers;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    bad = *args;
    bad.num_seqs = -1;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    int32_t last = s->num_seqs - 1, kept = s->seq_lens[last];
    s->seq_lens[last] = -1;
    CHECK(pp_decode(args, 1) == PP_INVALID_ARGUMENT);
    s->seq_lens[last] = s->width * pool->layout.block_size + 1;
    CHECK(pp_decode(args, 1) == PP_INVALID_ARGUMENT);
    s->seq_lens[last] = kept;
    int32_t *entry = s->tables + (int64_t)last * s->width + scenario_blocks_of(s, last) - 1, id = *entry;
    *entry = (int32_t)pool->num_blocks;
    CHECK(pp_decode(args, 1) == PP_INVALID_BLOCK);
    *entry = -1;
    CHECK(pp_decode(args, 1) == PP_INVALID_BLOCK);
    *entry = id;
    CHECK(memcmp(out_before, args->out, out_bytes) == 0);
    CHECK(memcmp(before, pool->base, pool_bytes) == 0);
    free(out_before);
    free(before);
    free(row);
}

/* Runs one plan on three threads: ranges have uneven sizes, and the last ranges start first. */
static void decode_in_ranges(const pp_decode_args *args) {
    size_t bytes;
    CHECK(pp_decode_workspace(args, &bytes) == PP_OK && bytes > 0 && bytes % 64 == 0);
    void *workspace = scenario_memory(bytes);
    pp_decode_plan plan;
    CHECK(pp_decode_plan_init(&plan, args, workspace, bytes) == PP_OK);
    int64_t cut[] = {0, plan.num_units / 5, plan.num_units / 2 + 1, plan.num_units};
    if (cut[2] > cut[3]) cut[2] = cut[3];
    scenario_range jobs[3];
    pthread_t threads[3];
    for (int i = 2; i >= 0; i--) {
        jobs[i] = (scenario_range){&plan, cut[i], cut[i + 1]};
        CHECK(pthread_create(&threads[i], NULL, scenario_run_range, &jobs[i]) == 0);
    }
    for (int i = 0; i < 3; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    free(workspace);
}

/* Runs the units one by one, backwards: the order must not matter. */
static void decode_backwards(const pp_decode_args *args) {
    size_t bytes;
    CHECK(pp_decode_workspace(args, &bytes) == PP_OK);
    void *workspace = scenario_memory(bytes);
    pp_decode_plan plan;
    CHECK(pp_decode_plan_init(&plan, args, workspace, bytes) == PP_OK);
    for (int64_t unit = plan.num_units; unit-- > 0;) pp_decode_run(&plan, unit, unit + 1);
    free(workspace);
}

static void check_decode(scenario *s, pp_arithmetic arithmetic) {
    size_t out_bytes = (size_t)scenario_out_count(s) * sizeof(float);
    size_t lse_bytes = (size_t)(s->num_seqs * s->num_qo_heads) * sizeof(float);
    float *out = scenario_memory(out_bytes), *lse = scenario_memory(lse_bytes);
    float *one_out = scenario_memory(out_bytes), *one_lse = scenario_memory(lse_bytes);
    pp_decode_args args, one;
    scenario_args(s, s->pool.layout.num_layers - 1, one_out, one_lse, &one);
    one.arithmetic = arithmetic;
    CHECK(pp_decode(&one, 1) == PP_OK);
    scenario_check(s, &one);

    scenario_args(s, s->pool.layout.num_layers - 1, out, lse, &args);
    args.arithmetic = arithmetic;
    for (int way = 0; way < 3; way++) {
        memset(out, 0xff, out_bytes);
        memset(lse, 0xff, lse_bytes);
        if (way == 0) CHECK(pp_decode(&args, 4) == PP_OK);
        if (way == 1) decode_in_ranges(&args);
        if (way == 2) decode_backwards(&args);
        CHECK(memcmp(out, one_out, out_bytes) == 0 && memcmp(lse, one_lse, lse_bytes) == 0);
    }
    check_bad_input(s, &args);
    free(out);
    free(lse);
    free(one_out);
    free(one_lse);
}

/* Number of units for `tokens` tokens, 4 kv heads and 32 query heads of 64 dims. */
static int64_t units_of(int32_t tokens, int num_threads) {
    pp_kv_pool pool = {.num_blocks = tokens / 16};
    CHECK(pp_kv_layout_init(&pool.layout, 1, 4, 64, 16, PP_BF16) == PP_OK);
    pool.base = scenario_memory((size_t)(pool.num_blocks * pool.layout.block_bytes));
    float *q = scenario_memory(32 * 64 * sizeof(float)), *out = scenario_memory(32 * 64 * sizeof(float));
    int32_t *table = scenario_memory((size_t)pool.num_blocks * sizeof(int32_t));
    for (int32_t b = 0; b < pool.num_blocks; b++) table[b] = b;
    pp_decode_args args = {.pool = &pool, .num_seqs = 1, .num_qo_heads = 32, .q = q, .q_stride_seq = 32 * 64,
                           .q_stride_head = 64, .block_tables = table, .block_tables_stride = pool.num_blocks,
                           .block_tables_width = pool.num_blocks, .seq_lens = &tokens, .sm_scale = 0.125f,
                           .num_threads = num_threads, .out = out};
    size_t bytes;
    pp_decode_plan plan;
    CHECK(pp_decode_workspace(&args, &bytes) == PP_OK);
    void *workspace = scenario_memory(bytes);
    CHECK(pp_decode_plan_init(&plan, &args, workspace, bytes) == PP_OK);
    free(workspace);
    free(table);
    free(out);
    free(q);
    free(pool.base);
    return plan.num_units;
}

/* Little work gives one unit per thread, more work several.  With enough chunks each chunk is a unit. */
static void check_units(void) {
    CHECK(units_of(512, 1) == 1);
    CHECK(units_of(512, 2) == 2);
    CHECK(units_of(512, 4) == 4);
    CHECK(units_of(1024, 2) == 4);
    CHECK(units_of(2048, 2) == 8);
    CHECK(units_of(8192, 2) == 16);
}

int main(void) {
    static const struct {
        int32_t num_kv_heads, group, head_dim, block_size;
    } shapes[] = {{2, 4, 64, 16}, {1, 7, 8, 32}, {3, 1, 128, 16}, {2, 2, 72, 5}};
    check_versions();
    check_layout();
    check_units();
    for (int dtype = PP_F32; dtype <= PP_BF16; dtype++)
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
            scenario s;
            scenario_make(&s, 2, shapes[i].num_kv_heads, shapes[i].group, shapes[i].head_dim, shapes[i].block_size,
                          (pp_dtype)dtype, NUM_SEQS, SEQ_LENS);
            for (int32_t seq = 0; seq < s.num_seqs; seq++) scenario_append(&s, seq, 0, s.seq_lens[seq]);
            check_gather(&s);
            check_copy(&s);
            check_decode(&s, PP_EXACT);
            if (dtype != PP_F32) check_decode(&s, PP_ROUNDED_BF16);
            if (dtype != PP_F32) check_decode(&s, PP_BF16X2);
            scenario_free(&s);
        }
    printf("ok %s", pp_isa());
    for (int i = 0; pp_isa_available(i) != NULL; i++) printf(" %s", pp_isa_available(i));
    printf("\n");
    return 0;
}
