/* prefill.c: the scratch of prefill grows with threads, not with tokens; surplus threads wait for it.
 *
 * Argument: rounds (default 8). */
#include <pthread.h>

#include "scenario.h"

enum { RANGES = 8, SEQS = 3, MOST_SCRATCH = 8 << 20 };

static const int32_t SEQ_LENS[SEQS] = {600, 40, 200};
static const int32_t COUNTS[SEQS] = {200, 40, 1};

static size_t rounded_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Workspace of a prompt of `tokens` tokens with 32 query and 8 kv heads of 128 dims, without its block table. */
static size_t scratch_of(int32_t tokens, int num_threads, pp_dtype dtype, pp_dtype v_dtype, int32_t block_size,
                         pp_arithmetic arithmetic) {
    static unsigned char page; /* the call reads no page, query or table */
    static float q, out;
    const int32_t starts[2] = {0, tokens};
    pp_kv_pool pool = {.num_blocks = 1, .base = &page};
    size_t bytes;
    CHECK(pp_kv_layout_init_dtypes(&pool.layout, 1, 8, 128, 128, block_size, dtype, v_dtype) == PP_OK);
    const int32_t blocks = (tokens + block_size - 1) / block_size;
    pp_decode_args args = {.pool = &pool, .num_seqs = 1, .num_qo_heads = 32, .q = &q, .q_stride_seq = 32 * 128,
                           .q_stride_head = 128, .query_start_loc = starts, .block_tables = &blocks,
                           .block_tables_stride = blocks, .block_tables_width = blocks, .seq_lens = &tokens,
                           .sm_scale = 0.125f, .num_threads = num_threads, .out = &out, .arithmetic = arithmetic};
    CHECK(pp_decode_workspace(&args, &bytes) == PP_OK && bytes % 64 == 0);
    const size_t table = rounded_up((size_t)blocks * sizeof(int32_t));
    CHECK(bytes > table);
    return bytes - table;
}

static void check_scratch_of(int num_threads, pp_dtype dtype, pp_dtype v_dtype, int32_t block_size,
                             pp_arithmetic arithmetic) {
    static const int32_t lengths[] = {4096, 32768, 1 << 20};
    const size_t right = scratch_of(lengths[0], num_threads, dtype, v_dtype, block_size, arithmetic);
    CHECK(right < (size_t)num_threads * MOST_SCRATCH);
    for (int i = 1; i < 3; i++)
        CHECK(scratch_of(lengths[i], num_threads, dtype, v_dtype, block_size, arithmetic) == right);
}

static void check_scratch(void) {
    for (int num_threads = 1; num_threads <= 64; num_threads *= 2) {
        for (int dtype = PP_F32; dtype <= PP_INT4; dtype++)
            check_scratch_of(num_threads, (pp_dtype)dtype, (pp_dtype)dtype, 16, PP_EXACT);
        check_scratch_of(num_threads, PP_INT8, PP_INT4, 16, PP_EXACT);
        for (int dtype = PP_F32; dtype <= PP_BF16; dtype++)
            check_scratch_of(num_threads, (pp_dtype)dtype, (pp_dtype)dtype, 15, PP_EXACT);
        for (int32_t block_size = 16; block_size >= 15; block_size--)
            for (int arithmetic = PP_ROUNDED_BF16; arithmetic <= PP_BF16X2; arithmetic++)
                for (int dtype = PP_F16; dtype <= PP_BF16; dtype++)
                    check_scratch_of(num_threads, (pp_dtype)dtype, (pp_dtype)dtype, block_size,
                                     (pp_arithmetic)arithmetic);
    }
    /* Threads without work get no scratch. */
    const size_t right = scratch_of(64, 1000, PP_F32, PP_F32, 16, PP_EXACT);
    CHECK(scratch_of(64, INT32_MAX, PP_F32, PP_F32, 16, PP_EXACT) == right);
}

typedef struct range {
    pp_decode_plan *plan;
    int64_t begin, end;
    pthread_barrier_t *together;
} range;

static void *run_range(void *argument) {
    const range *own = argument;
    const int last = pthread_barrier_wait(own->together);
    CHECK(last == 0 || last == PTHREAD_BARRIER_SERIAL_THREAD);
    pp_decode_run(own->plan, own->begin, own->end);
    return NULL;
}

/* Runs more concurrent threads than the plan has scratch for. */
static void check_threads(const scenario *s, const pp_decode_args *right, int num_threads) {
    const size_t rows = (size_t)scenario_row_count(s), out_bytes = (size_t)scenario_out_count(s) * sizeof(float);
    pp_decode_args args = *right;
    pp_decode_plan plan;
    pthread_barrier_t together;
    pthread_t threads[RANGES];
    range ranges[RANGES];
    size_t bytes;
    args.num_threads = num_threads;
    args.out = scenario_memory(out_bytes);
    args.lse = (float *)scenario_memory(rows * sizeof(float));
    CHECK(pp_decode_workspace(&args, &bytes) == PP_OK);
    void *workspace = scenario_memory(bytes);
    CHECK(pp_decode_plan_init(&plan, &args, workspace, bytes) == PP_OK && plan.num_units >= RANGES);
    CHECK(pthread_barrier_init(&together, NULL, RANGES) == 0);
    for (int i = 0; i < RANGES; i++) {
        ranges[i] = (range){&plan, plan.num_units * i / RANGES, plan.num_units * (i + 1) / RANGES, &together};
        CHECK(pthread_create(&threads[i], NULL, run_range, &ranges[i]) == 0);
    }
    for (int i = 0; i < RANGES; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(memcmp(args.out, right->out, out_bytes) == 0 && memcmp(args.lse, right->lse, rows * sizeof(float)) == 0);
    CHECK(pthread_barrier_destroy(&together) == 0);
    free(workspace);
    free(args.out);
    free(args.lse);
}

static void check_dtype(pp_dtype dtype, int32_t block_size, int rounds) {
    scenario s;
    pp_decode_args right;
    scenario_make(&s, 1, 4, 3, 24, block_size, dtype, SEQS, SEQ_LENS);
    for (int32_t seq = 0; seq < SEQS; seq++) {
        scenario_append(&s, seq, 0, SEQ_LENS[seq]);
        s.starts[seq + 1] = s.starts[seq] + COUNTS[seq];
    }
    scenario_make_q(&s);
    const size_t rows = (size_t)scenario_row_count(&s);
    scenario_args(&s, 0, (float *)scenario_memory((size_t)scenario_out_count(&s) * sizeof(float)),
                  (float *)scenario_memory(rows * sizeof(float)), &right);
    right.query_start_loc = s.starts;
    scenario_decode_apart(&s, &right);
    for (int round = 0; round < rounds; round++) check_threads(&s, &right, round % 4);
    free(right.out);
    free(right.lse);
    scenario_free(&s);
}

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 8;
    check_scratch();
    for (int dtype = PP_F32; dtype <= PP_BF16; dtype++)
        for (int32_t block_size = 16; block_size >= 5; block_size -= 11)
            check_dtype((pp_dtype)dtype, block_size, rounds);
    printf("ok %s\n", pp_isa());
    return 0;
}
