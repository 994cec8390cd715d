/* cascade.c: sequences with a common prefix of blocks.  Shared chunks become separate units, and a plan has fewer units
 * than without cascade.  For any assignment of ranges to threads, results have the same bits as sequences without
 * shared blocks.  Arrays end at the end of their allocation. */
#include <pthread.h>

#include "scenario.h"

enum { NUM_SEQS = 7, GROUP = 6, HEAD_DIM = 72, SHARED = 1536, MOST_LENGTH = 2100 };

/* Makes sequence `to` start with the first `tokens` tokens of sequence `from`. */
static void share(scenario *s, int32_t to, int32_t from, int32_t tokens) {
    const size_t blocks = (size_t)(tokens / s->pool.layout.block_size);
    memcpy(s->tables + to * s->width, s->tables + from * s->width, blocks * sizeof(int32_t));
}

/* Runs a plan in `threads` concurrent ranges; returns its number of units. */
static int64_t attend(const pp_decode_args *args, int threads) {
    pp_decode_plan plan;
    pthread_t ids[8];
    scenario_range ranges[8];
    size_t bytes;
    CHECK(pp_decode_workspace(args, &bytes) == PP_OK);
    void *workspace = scenario_memory(bytes);
    CHECK(pp_decode_plan_init(&plan, args, workspace, bytes) == PP_OK);
    for (int i = 0; i < threads; i++)
        ranges[i] = (scenario_range){&plan, plan.num_units * i / threads, plan.num_units * (i + 1) / threads};
    for (int i = 0; i < threads; i++) CHECK(pthread_create(&ids[i], NULL, scenario_run_range, &ranges[i]) == 0);
    for (int i = 0; i < threads; i++) CHECK(pthread_join(ids[i], NULL) == 0);
    free(workspace);
    return plan.num_units;
}

static void check(pp_dtype dtype, pp_arithmetic arithmetic, int32_t kv_heads, int32_t block_size) {
    static const int32_t lengths[NUM_SEQS] = {1600, 2100, 1536, 1537, 700, 2048, 1540};
    scenario s;
    pp_decode_args args;
    scenario_make(&s, 1, kv_heads, GROUP, HEAD_DIM, block_size, dtype, NUM_SEQS, lengths);
    for (int32_t seq = 0; seq < NUM_SEQS; seq++) scenario_append(&s, seq, 0, lengths[seq]);
    for (int32_t seq = 1; seq < NUM_SEQS; seq++) share(&s, seq, 0, lengths[seq] < SHARED ? 512 : SHARED);
    const size_t numbers = (size_t)scenario_out_count(&s);
    float *alone = malloc(numbers * sizeof(float)), *together = malloc(numbers * sizeof(float));
    CHECK(alone && together);
    scenario_args(&s, 0, alone, NULL, &args);
    args.arithmetic = (int32_t)arithmetic;
    args.no_cascade = 1;
    args.num_threads = 1;
    const int64_t units = attend(&args, 1);
    args.no_cascade = 0;
    args.out = together;
    for (int threads = 1; threads <= 8; threads *= 2) {
        args.num_threads = threads > 2 ? 2 : threads; /* scratch for 2 ranges: a third one waits */
        memset(together, 0xff, numbers * sizeof(float));
        const int64_t fewer = attend(&args, threads);
        /* With one thread a unit is a chunk of a sequence, or a chunk of all that share it: seven, then twice six. */
        if (threads == 1 && kv_heads == 1) CHECK(units - fewer == 6 + 2 * 5);
        CHECK(memcmp(alone, together, numbers * sizeof(float)) == 0);
    }
    free(alone);
    free(together);
    scenario_free(&s);
}

int main(void) {
    check(PP_F32, PP_EXACT, 1, 16);
    check(PP_F16, PP_EXACT, 2, 64);
    check(PP_BF16, PP_EXACT, 1, 16);
    check(PP_BF16, PP_ROUNDED_BF16, 2, 16);
    check(PP_BF16, PP_BF16X2, 2, 16);
    check(PP_F16, PP_BF16X2, 2, 16);
    check(PP_F32, PP_EXACT, 1, 1);
    printf("ok %s\n", pp_isa());
    return 0;
}
