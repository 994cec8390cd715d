/* no_threads.c: if pthread_create fails for some or all workers, the calling thread does their work. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "scenario.h"

enum { UNITS = 50 };

static int asked_for;
static atomic_int runs[UNITS];

/* Replaces the C library's function, also for pagepool. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*begin)(void *), void *context) {
    (void)thread, (void)attributes, (void)begin, (void)context;
    asked_for++;
    return EAGAIN;
}

static void count(void *context, int64_t begin, int64_t end) {
    CHECK(context == runs);
    for (int64_t unit = begin; unit < end; unit++) atomic_fetch_add(&runs[unit], 1);
}

int main(void) {
    static const int32_t seq_lens[2] = {3000, 700};
    scenario s;
    pp_decode_args args;
    pp_parallel_for(8, UNITS, count, runs);
    for (int unit = 0; unit < UNITS; unit++) CHECK(atomic_load(&runs[unit]) == 1);
    CHECK(asked_for == 1);

    scenario_make(&s, 1, 2, 4, 64, 16, PP_F32, 2, seq_lens);
    for (int32_t seq = 0; seq < 2; seq++) scenario_append(&s, seq, 0, seq_lens[seq]);
    const size_t bytes = (size_t)scenario_out_count(&s) * sizeof(float);
    float *one = scenario_memory(bytes), *eight = scenario_memory(bytes);
    scenario_args(&s, 0, one, NULL, &args);
    CHECK(pp_decode(&args, 1) == PP_OK);
    scenario_check(&s, &args);
    args.out = eight;
    CHECK(pp_decode(&args, 8) == PP_OK && asked_for == 2);
    CHECK(memcmp(one, eight, bytes) == 0);
    pp_threads_quiesce(); /* returns at once without workers */
    free(one);
    free(eight);
    scenario_free(&s);
    printf("ok\n");
    return 0;
}
