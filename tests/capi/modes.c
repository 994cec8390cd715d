/* modes.c: a thread's rounding mode and flush-to-zero change no bit of a result.  A library compiled with -ffast-math
 * can set such modes when it is loaded.  The modes are the same after each call. */
#include <fenv.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "scenario.h"

enum { SEQS = 3, DIMS = 72, GROUP = 5, TOKENS = 40, PARTS = 2, ROWS = 4 };

static const int32_t SEQ_LENS[SEQS] = {1100, 33, 7};

typedef struct mode {
    int rounding, flush;
} mode;

static const mode MODES[] = {{FE_TONEAREST, 0}, {FE_UPWARD, 0}, {FE_DOWNWARD, 0}, {FE_TOWARDZERO, 0},
                             {FE_TONEAREST, 1}, {FE_UPWARD, 1}};

static void set_mode(mode wanted) {
    CHECK(fesetround(wanted.rounding) == 0);
#if defined(__x86_64__)
    _mm_setcsr((_mm_getcsr() & ~0x8040u) | (wanted.flush ? 0x8040u : 0u));
#endif
}

static void check_mode(mode wanted) {
    CHECK(fegetround() == wanted.rounding);
#if defined(__x86_64__)
    CHECK(((_mm_getcsr() & 0x8040u) == 0x8040u) == wanted.flush);
#endif
}

/* The results of one call; structures of two calls are compared byte by byte. */
typedef struct results {
    float *out, *lse, *gathered;
    float merged[ROWS * DIMS], merged_lse[ROWS];
} results;

typedef struct job {
    scenario s;
    pp_arithmetic arithmetic;
    float *k;       /* (TOKENS, kv heads, DIMS), every second value subnormal in f32 and f16 */
    int64_t *slots; /* of the last TOKENS tokens of the first sequence */
} job;

static results run(job *job, int num_threads) {
    scenario *s = &job->s;
    const pp_kv_layout *layout = &s->pool.layout;
    const size_t rows = (size_t)scenario_row_count(s), kv = (size_t)(TOKENS * layout->num_kv_heads * DIMS);
    results got;
    pp_decode_args args;
    memset(&got, 0, sizeof got);
    got.out = (float *)scenario_memory((size_t)scenario_out_count(s) * sizeof(float));
    got.lse = (float *)scenario_memory(rows * sizeof(float));
    got.gathered = (float *)scenario_memory(2 * kv * sizeof(float));
    CHECK(pp_kv_append(&s->pool, 0, job->slots, TOKENS, job->k, job->k, PP_F32, layout->num_kv_heads * DIMS, DIMS) ==
          PP_OK);
    const int32_t first = (SEQ_LENS[0] - TOKENS) / layout->block_size;
    CHECK(pp_kv_gather(&s->pool, 0, s->tables + first, s->width - 2 - first, TOKENS, got.gathered, got.gathered + kv) ==
          PP_OK);
    scenario_args(s, 0, got.out, got.lse, &args);
    args.sm_scale = 0.125f; /* exact in every rounding mode */
    args.logits_soft_cap = 20.0f;
    args.arithmetic = job->arithmetic;
    CHECK(pp_decode(&args, num_threads) == PP_OK);
    const pp_merge_args merge = {.num_rows = ROWS,
                                 .num_parts = PARTS,
                                 .head_dim = DIMS,
                                 .v = got.out,
                                 .v_stride_row = DIMS,
                                 .v_stride_part = ROWS * DIMS,
                                 .s = got.lse,
                                 .s_stride_row = 1,
                                 .s_stride_part = ROWS,
                                 .out = got.merged,
                                 .lse = got.merged_lse};
    CHECK(pp_merge_states(&merge) == PP_OK);
    return got;
}

static void check_same(const job *job, const results *a, const results *b) {
    const scenario *s = &job->s;
    const size_t rows = (size_t)scenario_row_count(s), kv = (size_t)(TOKENS * s->pool.layout.num_kv_heads * DIMS);
    CHECK(memcmp(a->gathered, b->gathered, 2 * kv * sizeof(float)) == 0);
    CHECK(memcmp(a->out, b->out, (size_t)scenario_out_count(s) * sizeof(float)) == 0);
    CHECK(memcmp(a->lse, b->lse, rows * sizeof(float)) == 0);
    CHECK(memcmp(a->merged, b->merged, sizeof a->merged) == 0);
    CHECK(memcmp(a->merged_lse, b->merged_lse, sizeof a->merged_lse) == 0);
}

static void free_results(results *got) {
    free(got->out);
    free(got->lse);
    free(got->gathered);
}

static void check_dtype(pp_dtype dtype, pp_arithmetic arithmetic, int32_t block_size) {
    job job = {.arithmetic = arithmetic};
    scenario *s = &job.s;
    scenario_make(s, 1, 2, GROUP, DIMS, block_size, dtype, SEQS, SEQ_LENS);
    for (int32_t seq = 0; seq < SEQS; seq++) scenario_append(s, seq, 0, SEQ_LENS[seq]);
    const int32_t kv = TOKENS * 2 * DIMS;
    job.k = (float *)scenario_memory((size_t)kv * sizeof(float));
    job.slots = (int64_t *)scenario_memory(TOKENS * sizeof(int64_t));
    for (int32_t i = 0; i < kv; i++) {
        job.k[i] = scenario_number(3, 0, i, 0, 0) * 1.2345678f;
        if (i % 2) job.k[i] *= i % 4 == 1 ? 0x1.3p-16f : 0x1.3p-128f;
    }
    for (int64_t t = 0; t < TOKENS; t++) {
        const int64_t token = SEQ_LENS[0] - TOKENS + t;
        job.slots[t] = s->tables[token / block_size] * (int64_t)block_size + token % block_size;
    }
    results right = run(&job, 1);
    for (size_t i = 0; i < sizeof MODES / sizeof *MODES; i++)
        for (int num_threads = 1; num_threads <= 4; num_threads += 3) {
            set_mode(MODES[i]);
            results got = run(&job, num_threads);
            check_mode(MODES[i]);
            set_mode(MODES[0]);
            check_same(&job, &right, &got);
            free_results(&got);
        }
    free_results(&right);
    free(job.k);
    free(job.slots);
    scenario_free(s);
}

int main(void) {
    for (int32_t block_size = 16; block_size >= 5; block_size -= 11) {
        check_dtype(PP_F32, PP_EXACT, block_size);
        check_dtype(PP_F16, PP_EXACT, block_size);
        check_dtype(PP_BF16, PP_EXACT, block_size);
        check_dtype(PP_BF16, PP_ROUNDED_BF16, block_size);
        check_dtype(PP_BF16, PP_BF16X2, block_size);
        check_dtype(PP_F16, PP_BF16X2, block_size);
    }
    printf("ok %s\n", pp_isa());
    return 0;
}
