/* stress.c: threads that share one pool and the worker threads, for the sanitizers.
 *
 * Each thread owns one sequence.  It appends a few tokens, decodes without workers, and compares the bits with an
 * earlier single-threaded decode of the same length.  Some calls use the shared workers, so that callers compete for
 * them. Argument: rounds (default 40). */
#include <pthread.h>

#include "scenario.h"

#define NUM_THREADS 4
#define MAX_LEN 600

static scenario shared;
static int rounds = 40;

static void decode_one(int32_t seq, int32_t length, int num_threads, float *out) {
    pp_decode_args args;
    scenario_args(&shared, 0, out, NULL, &args);
    args.num_seqs = 1;
    args.q = (const float *)args.q + seq * args.q_stride_seq;
    args.block_tables += seq * args.block_tables_stride;
    args.seq_lens = &length;
    CHECK(pp_decode(&args, num_threads) == PP_OK);
}

static void *own_sequence(void *argument) {
    int32_t seq = *(const int32_t *)argument, dims = shared.num_qo_heads * shared.pool.layout.head_dim;
    size_t bytes = (size_t)dims * sizeof(float);
    float *out = scenario_memory(bytes), *again = scenario_memory(bytes);
    for (int round = 0; round < rounds; round++) {
        int32_t length = 0;
        while (length < MAX_LEN) {
            int32_t step = 1 + (int32_t)(scenario_hash((uint32_t)(round * 7919 + length + seq)) % 97u);
            int32_t end = length + step < MAX_LEN ? length + step : MAX_LEN;
            scenario_append(&shared, seq, length, end);
            length = end;
            decode_one(seq, length, 1, out);
            decode_one(seq, length, 1 + round % 3, again);
            CHECK(memcmp(out, again, bytes) == 0);
        }
    }
    free(out);
    free(again);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc > 1) rounds = atoi(argv[1]);
    int32_t seq_lens[NUM_THREADS], seqs[NUM_THREADS];
    pthread_t threads[NUM_THREADS];
    for (int32_t i = 0; i < NUM_THREADS; i++) seq_lens[seqs[i] = i] = MAX_LEN;
    scenario_make(&shared, 1, 2, 3, 64, 16, PP_BF16, NUM_THREADS, seq_lens);
    for (int i = 0; i < NUM_THREADS; i++) CHECK(pthread_create(&threads[i], NULL, own_sequence, &seqs[i]) == 0);
    for (int i = 0; i < NUM_THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);

    float *out = scenario_memory((size_t)scenario_out_count(&shared) * sizeof(float));
    pp_decode_args args;
    scenario_args(&shared, 0, out, NULL, &args);
    CHECK(pp_decode(&args, NUM_THREADS) == PP_OK);
    scenario_check(&shared, &args);
    free(out);
    scenario_free(&shared);
    printf("ok %d rounds of %d threads\n", rounds, NUM_THREADS);
    return 0;
}
