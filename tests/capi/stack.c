/* stack.c: units need at most the 20 KB of stack that the header promises, with the largest heads and any layout. */
#include <pthread.h>

#include "scenario.h"

enum { STACK = 20 << 10, SYSTEM = 32 << 10 }; /* SYSTEM: stack used by pthread and the signal guard */

static void *run_all(void *plan) {
    pp_decode_run(plan, 0, ((pp_decode_plan *)plan)->num_units);
    return NULL;
}

static void check(int32_t block_size, int v_in_k, pp_dtype dtype, pp_arithmetic arithmetic) {
    static const int32_t seq_lens[] = {530, 40};
    pp_kv_layout layout;
    scenario s;
    pp_decode_args args;
    pp_decode_plan plan;
    pthread_attr_t attributes;
    pthread_t thread;
    size_t bytes;
    CHECK(pp_kv_layout_init_v(&layout, 1, 1, PP_MAX_HEAD_DIM, PP_MAX_HEAD_DIM, v_in_k, block_size, dtype) == PP_OK);
    scenario_make_of(&s, &layout, 9, 2, seq_lens);
    for (int32_t seq = 0; seq < 2; seq++) {
        scenario_append(&s, seq, 0, seq_lens[seq]);
        s.starts[seq + 1] = s.starts[seq] + 3;
    }
    scenario_make_q(&s);
    float *out = (float *)scenario_memory((size_t)scenario_out_count(&s) * sizeof(float));
    scenario_args(&s, 0, out, NULL, &args);
    args.query_start_loc = s.starts;
    args.arithmetic = arithmetic;
    CHECK(pp_decode_workspace(&args, &bytes) == PP_OK);
    void *workspace = scenario_memory(bytes);
    CHECK(pp_decode_plan_init(&plan, &args, workspace, bytes) == PP_OK);
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, STACK + SYSTEM) == 0);
    CHECK(pthread_create(&thread, &attributes, run_all, &plan) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(pthread_attr_destroy(&attributes) == 0);
    free(workspace);
    free(out);
    scenario_free(&s);
}

int main(void) {
    for (int v_in_k = 0; v_in_k < 2; v_in_k++)
        for (int32_t block_size = 16; block_size >= 15; block_size--) {
            check(block_size, v_in_k, PP_F32, PP_EXACT);
            check(block_size, v_in_k, PP_F16, PP_EXACT);
            check(block_size, v_in_k, PP_BF16, PP_EXACT);
            check(block_size, v_in_k, PP_BF16, PP_ROUNDED_BF16);
            check(block_size, v_in_k, PP_BF16, PP_BF16X2);
            check(block_size, v_in_k, PP_F16, PP_BF16X2);
        }
    printf("ok %s\n", pp_isa());
    return 0;
}
