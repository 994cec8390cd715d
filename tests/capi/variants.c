/* variants.c: every variant of decode for every dtype against a plain loop in double, and prefill against decode.  Each
 * array (pool, queries, tables, mask, ...) ends at an inaccessible page.
 *
 * A read of one byte too many ends the program with a signal, on every instruction set and without a sanitizer.  For
 * each array a child process first checks that the guard works.  Argument: n runs every nth call. */
#define _DEFAULT_SOURCE
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "guarded.h"
#include "scenario.h"

#define NUM_SEQS 7
#define NUM_VARIANTS 9

static const int32_t SEQ_LENS[NUM_SEQS] = {0, 1, 17, 33, 512, 530, 600};
static const int32_t COUNTS[NUM_SEQS] = {1, 1, 5, 2, 0, 9, 3};
static const int32_t PROMPTS[NUM_SEQS] = {30, 25, 17, 33, 40, 1, 50};

/* Mask bits for each sequence: every second mask is a tree over the query tokens, the others cover all tokens.  The
 * last sequence is causal. */
static void make_masks(const scenario *s, pp_decode_args *args) {
    int64_t *indptr = at_the_end(NULL, (size_t)s->num_seqs * sizeof(int64_t)), bytes = 0;
    int32_t *widths = at_the_end(NULL, (size_t)s->num_seqs * sizeof(int32_t));
    for (int32_t seq = 0; seq < s->num_seqs; seq++) {
        int32_t count = s->starts[seq + 1] - s->starts[seq];
        widths[seq] = seq % 2 ? s->seq_lens[seq] : count;
        indptr[seq] = bytes;
        bytes += ((int64_t)count * widths[seq] + 7) / 8;
    }
    indptr[s->num_seqs - 1] = -1;
    uint8_t *mask = at_the_end(NULL, (size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) mask[i] = (uint8_t)scenario_hash((uint32_t)i);
    args->custom_mask = mask;
    args->mask_indptr = indptr;
    args->mask_widths = widths;
}

static void set_variant(const scenario *s, int variant, pp_decode_args *args) {
    float slopes[128], sinks[128];
    for (int32_t h = 0; h < s->num_qo_heads; h++) {
        slopes[h] = 0.25f / (float)(1 + h);
        sinks[h] = (float)(h % 5) - 2.0f;
    }
    size_t bytes = (size_t)s->num_qo_heads * sizeof(float);
    if (variant == 1 || variant == 7) args->window = 21;
    if (variant == 2 || variant == 7) args->logits_soft_cap = 5.0f;
    if (variant == 3 || variant == 7) args->alibi_slopes = at_the_end(slopes, bytes);
    if (variant == 4 || variant == 7) args->sinks = at_the_end(sinks, bytes);
    if (variant >= 5) args->query_start_loc = s->starts;
    if (variant == 6 || variant == 8) make_masks(s, args);
    if (variant == 8) args->window = 515;
}

/* Hash of the results of all calls (FNV). */
static uint64_t all_bits = 14695981039346656037u;
static void add_bits(const void *data, size_t bytes) {
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++) all_bits = (all_bits ^ at[i]) * 1099511628211u;
}

/* One variant with one and with four threads gives correct results and the same bits. */
static void check_variant(const scenario *s, int variant, pp_arithmetic arithmetic) {
    pp_decode_args args;
    const size_t rows = (size_t)scenario_row_count(s), out_bytes = (size_t)scenario_out_count(s) * sizeof(float);
    scenario_args(s, 0, at_the_end(NULL, out_bytes), at_the_end(NULL, rows * sizeof(float)), &args);
    set_variant(s, variant, &args);
    args.arithmetic = arithmetic;
    CHECK(pp_decode(&args, 1) == PP_OK);
    scenario_check(s, &args);
    pp_decode_args again = args;
    again.out = at_the_end(NULL, out_bytes);
    again.lse = at_the_end(NULL, rows * sizeof(float));
    CHECK(pp_decode(&again, 4) == PP_OK);
    CHECK(memcmp(args.out, again.out, out_bytes) == 0 && memcmp(args.lse, again.lse, rows * sizeof(float)) == 0);
    add_bits(args.out, out_bytes);
}

static uint16_t rounded(float value, pp_dtype dtype) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == PP_BF16) return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    const uint32_t sign = bits >> 16 & 0x8000;
    const float size = fabsf(value);
    CHECK(size < 65504.0f);
    int exponent; /* of the leading bit; f16 has 10 more bits, and none below 2^-24 */
    frexpf(size, &exponent);
    if (size < 0x1p-14f) return (uint16_t)(sign | (uint32_t)rintf(size * 0x1p24f));
    return (uint16_t)((sign | (uint32_t)(exponent + 13) << 10) + (uint32_t)rintf(ldexpf(size, 11 - exponent)));
}

/* 16-bit numbers at the end of a mapping. */
static uint16_t *narrowed(const float *from, size_t count, pp_dtype dtype) {
    uint16_t *to = at_the_end(NULL, count * sizeof *to);
    for (size_t i = 0; i < count; i++) to[i] = rounded(from[i], dtype);
    return to;
}

/* Prompts have the bits of rows that are computed apart; queries and results of every dtype. */
static void check_prompts(const scenario *s, int variant, pp_arithmetic arithmetic) {
    const size_t rows = (size_t)scenario_row_count(s), elements = (size_t)scenario_out_count(s);
    pp_decode_args right;
    scenario_args(s, 0, scenario_memory(elements * sizeof(float)), scenario_memory(rows * sizeof(float)), &right);
    set_variant(s, variant, &right);
    right.query_start_loc = s->starts;
    right.arithmetic = arithmetic;
    scenario_decode_apart(s, &right);
    for (int dtype = PP_F32; dtype <= PP_BF16; dtype++)
        for (int num_threads = dtype == PP_F32 ? 1 : 4; num_threads <= 4; num_threads += 3) {
            pp_decode_args args = right;
            const size_t item = dtype == PP_F32 ? sizeof(float) : sizeof(uint16_t);
            args.q_dtype = args.out_dtype = dtype;
            if (dtype != PP_F32) /* also exact in f32 */
                args.q = narrowed(s->q, rows * (size_t)s->pool.layout.head_dim, (pp_dtype)dtype);
            args.out = at_the_end(NULL, elements * item);
            args.lse = at_the_end(NULL, rows * sizeof(float));
            CHECK(pp_prefill(&args, num_threads) == PP_OK);
            CHECK(memcmp(args.lse, right.lse, rows * sizeof(float)) == 0);
            add_bits(args.out, elements * item);
            if (dtype == PP_F32)
                CHECK(memcmp(args.out, right.out, elements * item) == 0);
            else
                for (size_t i = 0; i < elements; i++)
                    CHECK(((uint16_t *)args.out)[i] == rounded(((float *)right.out)[i], (pp_dtype)dtype));
        }
    free(right.out);
    free(right.lse);
}

static const int32_t *zeros_within(float *memory, int32_t count) {
    memset(memory, 0, (size_t)count * sizeof(int32_t));
    return (const int32_t *)(uintptr_t)memory;
}

/* 16-bit results end exactly at their last element: lse may begin there, but not two bytes earlier. */
static void check_ends_of_results(const scenario *s, const pp_decode_args *args) {
    pp_decode_args bad = *args;
    const size_t elements = (size_t)scenario_out_count(s), rows = (size_t)scenario_row_count(s);
    unsigned char *memory = scenario_memory(elements * sizeof(float) + rows * sizeof(float)), before = memory[0];
    bad.out = memory;
    bad.out_dtype = PP_BF16;
    bad.lse = (float *)(memory + elements * sizeof(uint16_t) - sizeof(float));
    CHECK(pp_prefill(&bad, 1) == PP_INVALID_ARGUMENT && memory[0] == before);
    bad.lse = (float *)(memory + elements * sizeof(uint16_t));
    CHECK(pp_prefill(&bad, 1) == PP_OK);
    bad.q_dtype = PP_F16;
    bad.q = memory + elements * sizeof(uint16_t) - sizeof(uint16_t);
    bad.lse = NULL;
    before = memory[0];
    CHECK(pp_prefill(&bad, 1) == PP_INVALID_ARGUMENT && memory[0] == before);
    free(memory);
}

/* Results that overlap each other or an input, and missing arrays, are refused before anything is written. */
static void check_overlaps(const scenario *s) {
    pp_decode_args args, bad;
    const size_t rows = (size_t)scenario_row_count(s);
    scenario_args(s, 0, scenario_memory((size_t)scenario_out_count(s) * sizeof(float)),
                  scenario_memory(rows * sizeof(float)), &args);
    args.query_start_loc = s->starts;
    make_masks(s, &args);
    float *out = args.out, first = out[0];
    const pp_kv_pool nothing = {.num_blocks = 0};
    for (int way = 0; way < 30; way++) {
        bad = args;
        if (way == 0) bad.out = (float *)(uintptr_t)s->q;
        if (way == 1) bad.lse = out + scenario_out_count(s) - 1;
        if (way == 2) bad.out = args.lse;
        if (way == 3) bad.out = (float *)(s->pool.base + s->pool.num_blocks * s->pool.layout.block_bytes - 4);
        if (way == 4) bad.lse = (float *)(uintptr_t)s->tables;
        if (way == 5) bad.lse = (float *)(uintptr_t)s->seq_lens;
        if (way == 6) bad.lse = (float *)(uintptr_t)s->starts;
        if (way == 7) bad.sinks = bad.lse;
        if (way == 8) bad.alibi_slopes = bad.out;
        if (way == 9) bad.custom_mask = (const uint8_t *)bad.lse;
        if (way == 10) bad.mask_widths = zeros_within(bad.out, s->num_seqs);
        if (way == 11) bad.out = NULL;
        if (way == 12) bad.seq_lens = NULL;
        if (way == 13) bad.block_tables = NULL;
        if (way == 14) bad.logits_soft_cap = -1.0f;
        if (way == 15) bad.logits_soft_cap = 1e-31f;
        if (way == 16) bad.logits_soft_cap = INFINITY;
        if (way == 17) bad.logits_soft_cap = NAN;
        if (way == 18) bad.pool = NULL;
        if (way == 19) bad.pool = &nothing; /* an empty layout */
        if (way == 20) bad.block_tables_width = INT64_MAX / 2; /* exceeds the address space */
        if (way == 21) bad.block_tables_stride = INT64_MIN;
        if (way == 22) bad.q_stride_seq = INT64_MAX / 3;
        if (way == 23) bad.sm_scale = NAN;
        if (way == 24) bad.sm_scale = -INFINITY;
        if (way == 25) bad.sm_scale = 2.4e38f;
        if (way == 26) bad.q_dtype = -1;
        if (way == 27) bad.q_dtype = PP_BF16 + 1;
        if (way == 28) bad.out_dtype = -1;
        if (way == 29) bad.out_dtype = PP_BF16 + 1;
        first = out[0];
        CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
        CHECK(memcmp(out, &first, sizeof first) == 0);
    }
    bad = args;
    bad.arithmetic = s->pool.layout.dtype == PP_F32 ? PP_BF16X2 : PP_BF16X2 + 1;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    bad.arithmetic = -1;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    bad = args;
    bad.query_start_loc = NULL;
    CHECK(pp_prefill(&bad, 1) == PP_INVALID_ARGUMENT);
    check_ends_of_results(s, &args);
    CHECK(memcmp(out, &first, sizeof first) == 0);
    size_t bytes;
    pp_decode_plan plan;
    CHECK(pp_decode_workspace(&args, &bytes) == PP_OK);
    unsigned char *workspace = scenario_memory(bytes + 64), before = workspace[0];
    for (int way = 0; way < 4; way++) { /* the workspace overlaps an input or a result */
        bad = args;
        if (way == 0) bad.q = (const float *)(workspace + bytes - 4);
        if (way == 1) bad.seq_lens = zeros_within((float *)workspace, s->num_seqs);
        if (way == 2) bad.lse = (float *)workspace;
        if (way == 3) bad.alibi_slopes = (const float *)workspace;
        before = workspace[0];
        CHECK(pp_decode_plan_init(&plan, &bad, workspace, bytes) == PP_INVALID_ARGUMENT);
        CHECK(workspace[0] == before);
    }
    free(workspace);
    bad = args;
    s->starts[0] = 1;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    s->starts[0] = 0;
    s->starts[2]++;
    s->starts[3] = 1;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    s->starts[3] = INT32_MIN; /* the difference overflows 32 bits: must not become a large number of queries */
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    bad.query_start_loc = NULL;
    bad.mask_indptr = NULL;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT); /* a mask without indptr */
    memset(s->starts, 0, (size_t)(s->num_seqs + 1) * sizeof(int32_t)); /* no query token: nothing is read or written */
    bad = args;
    bad.q = bad.out = bad.lse = NULL;
    bad.custom_mask = NULL;
    CHECK(pp_decode(&bad, 1) == PP_OK && pp_decode(&bad, 4) == PP_OK);
    free(args.out);
    free(args.lse);
}

static void count_queries(scenario *s, const int32_t *counts) {
    for (int32_t seq = 0; seq < s->num_seqs; seq++)
        s->starts[seq + 1] = s->starts[seq] + (counts ? counts[seq] : 1);
    scenario_make_q(s);
}

static int step = 1;

static void check_layout(const pp_kv_layout *layout, int32_t group) {
    scenario s, guarded;
    scenario_make_of(&s, layout, group, NUM_SEQS, SEQ_LENS);
    static const int32_t *const counts[] = {NULL, COUNTS, PROMPTS};
    static int num_calls;
    for (int several = 0; several < 3; several++) {
        count_queries(&s, counts[several]);
        guarded = s;
        guarded.pool.base = at_the_end(s.pool.base, (size_t)(s.pool.num_blocks * layout->block_bytes));
        guarded.tables = at_the_end(s.tables, (size_t)s.num_seqs * (size_t)s.width * sizeof(int32_t));
        guarded.seq_lens = at_the_end(s.seq_lens, (size_t)s.num_seqs * sizeof(int32_t));
        guarded.starts = at_the_end(s.starts, (size_t)(s.num_seqs + 1) * sizeof(int32_t));
        guarded.q = at_the_end(s.q, (size_t)scenario_row_count(&s) * (size_t)layout->head_dim * sizeof(float));
        for (int32_t seq = 0; seq < s.num_seqs; seq++) scenario_append(&guarded, seq, 0, s.seq_lens[seq]);
        for (int variant = several == 1 ? 5 : 0; variant < (several ? NUM_VARIANTS : 5); variant++) {
            if (several == 2 && variant == 5) continue; /* the same call as several == 0 */
            /* Products of tiles: plain, with several queries, with all options, with masks.  Pages of f16 differ only
             * in how they are read, which is slow without vectors. */
            const int rounds =
                layout->dtype == PP_BF16 ? variant % 5 == 0 || variant >= 7 : layout->dtype == PP_F16 && !variant;
            for (int way = PP_EXACT; way <= (rounds ? PP_BF16X2 : PP_EXACT); way++)
                if (num_calls++ % step == 0)
                    (several == 2 ? check_prompts : check_variant)(&guarded, variant, (pp_arithmetic)way);
        }
    }
    count_queries(&s, COUNTS);
    check_overlaps(&s);
    scenario_free(&s);
}

/* Runs one call in a child process, which must die by an access after the end of a mapping. */
static void check_fault(const pp_decode_args *args, const volatile char *behind) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        signal(SIGSEGV, SIG_DFL); /* a sanitizer installs its own handler */
        if (behind)
            (void)*behind;
        else
            pp_decode(args, 1);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

/* Moves each array by one element (pages by 4 bytes), so that the last access is after the end of its mapping and the
 * guard catches it.  query_start_loc must begin with 0 and is not moved.  Calls decode, or prefill with `prompts`. */
static void check_guards(pp_dtype dtype, int prompts) {
    static const int32_t lens[2] = {16, 16};
    scenario s;
    pp_kv_layout layout;
    float numbers[6] = {1, 1, 1, 1, 1, 1};
    const int64_t indptr[2] = {0, prompts ? 32 : 2};
    const int32_t widths[2] = {16, 16};
    uint8_t bits[64];
    memset(bits, 0xff, sizeof bits);
    CHECK(pp_kv_layout_init(&layout, 1, 2, 64, 16, dtype) == PP_OK);
    scenario_make_of(&s, &layout, 3, 2, lens);
    if (prompts) count_queries(&s, lens);
    pp_kv_pool pool = s.pool;
    const size_t out_bytes = (size_t)scenario_out_count(&s) * sizeof(float), rows = (size_t)scenario_row_count(&s);
    pool.base = at_the_end(s.pool.base, (size_t)(pool.num_blocks * layout.block_bytes));
    pp_decode_args good;
    scenario_args(&s, 0, at_the_end(NULL, out_bytes), at_the_end(NULL, rows * sizeof(float)), &good);
    good.pool = &pool;
    const int32_t ids[2] = {s.tables[0], s.tables[s.width]};
    good.block_tables_stride = good.block_tables_width = 1;
    good.block_tables = at_the_end(ids, sizeof ids);
    good.q = at_the_end(s.q, rows * 64 * sizeof(float));
    good.seq_lens = at_the_end(s.seq_lens, sizeof lens);
    good.query_start_loc = at_the_end(s.starts, 3 * sizeof(int32_t));
    good.custom_mask = at_the_end(bits, 2 * (size_t)indptr[1]);
    good.mask_indptr = at_the_end(indptr, sizeof indptr);
    good.mask_widths = at_the_end(widths, sizeof widths);
    good.alibi_slopes = at_the_end(numbers, sizeof numbers);
    good.sinks = at_the_end(numbers, sizeof numbers);
    CHECK(pp_decode(&good, 1) == PP_OK);
    check_fault(NULL, (const char *)good.sinks + sizeof numbers);
    for (int which = 0; which < 11; which++) {
        pp_decode_args moved = good;
        pp_kv_pool moved_pool = pool;
        if (which == 0) moved_pool.base += 4;
        if (which == 1) moved.q = (const float *)good.q + 1;
        if (which == 2) moved.block_tables++;
        if (which == 3) moved.seq_lens++;
        if (which == 4) moved.custom_mask++;
        if (which == 5) moved.mask_indptr++;
        if (which == 6) moved.mask_widths++;
        if (which == 7) moved.alibi_slopes++;
        if (which == 8) moved.sinks++;
        if (which == 9) moved.out = (float *)good.out + 1;
        if (which == 10) moved.lse++;
        moved.pool = &moved_pool;
        check_fault(&moved, NULL);
    }
    scenario_free(&s);
}

int main(int argc, char **argv) {
    if (argc > 1) step = atoi(argv[1]);
    CHECK(step > 0);
    for (int dtype = PP_F32; dtype <= PP_BF16; dtype++)
        for (int prompts = 0; prompts < 2; prompts++) check_guards((pp_dtype)dtype, prompts);
    static const struct {
        int32_t num_kv_heads, group, head_dim, v_head_dim, v_in_k, block_size;
    } shapes[] = {{2, 3, 64, 64, 0, 16},  {1, 7, 8, 24, 0, 32}, {1, 16, 72, 64, 1, 16},
                  {2, 1, 40, 40, 0, 5},   {1, 2, 24, 8, 1, 7},  {1, 1, 576, 512, 1, 48},
                  {3, 5, 88, 128, 0, 16}, {1, 9, 256, 8, 0, 16}};
    for (int dtype = PP_F32; dtype <= PP_BF16; dtype++)
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
            pp_kv_layout layout;
            CHECK(pp_kv_layout_init_v(&layout, 1, shapes[i].num_kv_heads, shapes[i].head_dim, shapes[i].v_head_dim,
                                      shapes[i].v_in_k, shapes[i].block_size, (pp_dtype)dtype) == PP_OK);
            check_layout(&layout, shapes[i].group);
        }
    printf("ok %s %llx\n", pp_isa(), (unsigned long long)all_bits);
    return 0;
}
