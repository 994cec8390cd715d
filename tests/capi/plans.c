/* plans.c: random plans.  Their ranges run in random order on random threads, on more threads than planned for, and
 * concurrently with another plan of the same pool, which may stop early.  Results are correct and have the same bits as
 * with one thread and as rows that are computed apart.  A refused call changes neither results nor plan.
 * Arrays begin at random alignments and end, for sanitizers, at the end of their allocation.
 * Arguments: rounds (default 200), number of the first round (default 0).  Prints a checksum of all results. */
#include <pthread.h>

#include "scenario.h"

#define MOST_SEQS 5
#define MOST_RANGES 8

static uint32_t state;

static int32_t below(int32_t n) {
    state += 0x9e3779b9u;
    return (int32_t)(scenario_hash(state) % (uint32_t)n);
}

static int32_t one_of(const int32_t *numbers, int32_t count) { return numbers[below(count)]; }
#define ONE_OF(...) one_of((const int32_t[]){__VA_ARGS__}, (int32_t)(sizeof(int32_t[]){__VA_ARGS__} / sizeof(int32_t)))

static void *taken[128];
static int num_taken;

/* Returns `bytes` bytes of 0xff, up to 60 bytes after the start of an allocation. */
static void *take(size_t bytes) {
    const size_t before = 4 * (size_t)below(16);
    CHECK(num_taken < 128);
    unsigned char *memory = taken[num_taken++] = malloc(before + bytes);
    CHECK(memory != NULL || before + bytes == 0);
    if (memory) memset(memory, 0xff, before + bytes);
    return memory + before;
}

static void give_back(int kept) {
    while (num_taken > kept) free(taken[--num_taken]);
}

static void *take_copy(const void *from, size_t bytes) {
    void *memory = take(bytes);
    if (bytes) memcpy(memory, from, bytes);
    return memory;
}

/* A random layout, lengths and numbers of query tokens, also more query tokens than tokens. */
static void draw_scenario(scenario *s) {
    const int32_t head_dim = ONE_OF(8, 24, 64, 72, 128, 136), num_seqs = below(MOST_SEQS), lone = below(3) == 0;
    const int v_in_k = below(4) == 0;
    int32_t seq_lens[MOST_SEQS], v_head_dim = ONE_OF(8, 24, 64, 72, 128, 136);
    pp_kv_layout layout;
    if (v_in_k && v_head_dim > head_dim) v_head_dim = head_dim;
    CHECK(pp_kv_layout_init_v(&layout, 1, 1 + below(3), head_dim, v_head_dim, v_in_k, ONE_OF(1, 5, 16, 48, 500, 1024),
                              (pp_dtype)below(3)) == PP_OK);
    for (int32_t seq = 0; seq < num_seqs; seq++) seq_lens[seq] = ONE_OF(0, 1, 16, 33, 64, 100, 512, 530, 1025);
    scenario_make_of(s, &layout, 1 + below(9), num_seqs, seq_lens);
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        scenario_append(s, seq, 0, seq_lens[seq]);
        s->starts[seq + 1] = s->starts[seq] + (lone ? 1 : below(4) ? below(4) : below(40));
    }
    scenario_make_q(s);
}

static void draw_mask(const scenario *s, pp_decode_args *args) {
    int64_t indptr[MOST_SEQS], bytes = 0;
    int32_t widths[MOST_SEQS];
    for (int32_t seq = 0; seq < s->num_seqs; seq++) {
        const int32_t count = s->starts[seq + 1] - s->starts[seq];
        widths[seq] = below(2) ? count : below(s->seq_lens[seq] + count + 1);
        indptr[seq] = below(4) ? bytes : -1 - below(3);
        if (indptr[seq] >= 0) bytes += ((int64_t)count * widths[seq] + 7) / 8;
    }
    uint8_t *bits = take((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) bits[i] = (uint8_t)(below(256) & below(256));
    args->custom_mask = bits;
    args->mask_indptr = memcpy(scenario_memory(sizeof indptr), indptr, sizeof indptr);
    taken[num_taken++] = (void *)(uintptr_t)args->mask_indptr;
    args->mask_widths = take_copy(widths, (size_t)s->num_seqs * sizeof(int32_t));
}

static void draw_args(const scenario *s, pp_decode_args *args) {
    static const int64_t windows[] = {1, 16, 33, 512, 600, INT32_MAX, INT64_MAX - 1, INT64_MAX};
    const size_t heads = (size_t)s->num_qo_heads, seqs = (size_t)s->num_seqs;
    int32_t several = 0;
    float *slopes = take(heads * sizeof(float)), *sinks = take(heads * sizeof(float));
    for (int32_t h = 0; h < s->num_qo_heads; h++) {
        slopes[h] = 0.004f * (float)(h % 7 - 3);
        sinks[h] = h % 4 ? (float)(h % 5) - 2.0f : -INFINITY;
    }
    for (int32_t seq = 0; seq < s->num_seqs; seq++) several |= s->starts[seq + 1] != seq + 1;
    scenario_args(s, 0, NULL, NULL, args);
    args->q = take_copy(s->q, (size_t)(scenario_row_count(s) * s->pool.layout.head_dim) * sizeof(float));
    args->block_tables = take_copy(s->tables, seqs * (size_t)s->width * sizeof(int32_t));
    args->seq_lens = take_copy(s->seq_lens, seqs * sizeof(int32_t));
    if (several || below(2)) args->query_start_loc = take_copy(s->starts, (seqs + 1) * sizeof(int32_t));
    if (below(2)) args->window = windows[below(8)];
    if (below(3) == 0) args->logits_soft_cap = 5.0f;
    if (below(3) == 0) args->alibi_slopes = slopes;
    if (below(3) == 0) args->sinks = sinks;
    if (below(3) == 0) draw_mask(s, args);
    if (s->pool.layout.dtype != PP_F32) args->arithmetic = ONE_OF(PP_EXACT, PP_ROUNDED_BF16, PP_BF16X2);
}

typedef struct results {
    size_t out, lse; /* bytes */
} results;

/* Buffers for all results. */
static void take_results(const results *sizes, pp_decode_args *args) {
    args->out = take(sizes->out);
    args->lse = take(sizes->lse);
}

static int same(const results *sizes, const pp_decode_args *a, const pp_decode_args *b) {
    return !memcmp(a->out, b->out, sizes->out) && !memcmp(a->lse, b->lse, sizes->lse);
}

/* Queries in a dtype that represents them exactly. */
static const void *take_queries(const float *q, size_t count, pp_dtype dtype) {
    if (dtype == PP_F32) return take_copy(q, count * sizeof(float));
    uint16_t *to = take(count * sizeof *to);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &q[i], sizeof bits);
        const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
        to[i] = (uint16_t)(dtype == PP_BF16 ? bits >> 16 : size ? sign | ((size - (112u << 23)) >> 13) : sign);
    }
    return to;
}

/* A plan, the ranges of its units in the order in which they run, and how far it has run. */
typedef struct running {
    pp_decode_args args;
    pp_decode_plan plan;
    void *workspace;
    int num_ranges, next;
    int64_t begin[MOST_RANGES], end[MOST_RANGES];
} running;

/* A copy of an array that is passed to a plan and then freed. */
typedef struct lent {
    void *copy;
    size_t bytes;
} lent;

/* Copies `count` elements of 4 bytes; NULL if `from` is NULL. */
static const void *lend(const void *array, size_t count, lent *copy) {
    *copy = (lent){array ? take_copy(array, 4 * count) : NULL, array ? 4 * count : 0};
    return copy->copy;
}

static void start(const scenario *s, running *run, const pp_decode_args *args, const results *sizes) {
    const size_t seqs = (size_t)s->num_seqs, heads = (size_t)s->num_qo_heads;
    const size_t numbers = (size_t)(scenario_row_count(s) * s->pool.layout.head_dim);
    size_t bytes;
    int64_t cut = 0;
    lent lost[4]; /* the plan has copied these arrays: they are freed before it runs */
    run->args = *args;
    take_results(sizes, &run->args);
    run->args.q_dtype = below(3);
    run->args.q = take_queries(args->q, numbers, (pp_dtype)run->args.q_dtype);
    run->args.num_threads = ONE_OF(-5, 0, 1, 2, 3, 5, 8, 64, 100000, INT32_MAX);
    run->args.block_tables = lend(args->block_tables, seqs * (size_t)s->width, &lost[0]);
    run->args.seq_lens = lend(args->seq_lens, seqs, &lost[1]);
    run->args.query_start_loc = lend(args->query_start_loc, seqs + 1, &lost[2]);
    run->args.alibi_slopes = lend(args->alibi_slopes, heads, &lost[3]);
    CHECK(pp_decode_workspace(&run->args, &bytes) == PP_OK && bytes > 0 && bytes % 64 == 0);
    run->workspace = taken[num_taken++] = scenario_memory(bytes);
    CHECK(pp_decode_plan_init(&run->plan, &run->args, run->workspace, bytes) == PP_OK);
    for (int i = 0; i < 4; i++)
        if (lost[i].bytes) memset(lost[i].copy, 0xff, lost[i].bytes);
    run->num_ranges = 1 + below(MOST_RANGES);
    run->next = 0;
    for (int i = 0; i < run->num_ranges; i++) {
        const int64_t left = run->plan.num_units - cut;
        const int other = below(i + 1);
        run->begin[i] = run->begin[other];
        run->end[i] = run->end[other];
        run->begin[other] = cut;
        cut += i + 1 == run->num_ranges || left == 0 ? left : below((int32_t)left + 1);
        run->end[other] = cut;
    }
}

static void run_next(running *run) {
    const int range = run->next++;
    pp_decode_run(&run->plan, run->begin[range], run->end[range]);
}

/* Runs all ranges of both plans, each range on its own thread. */
static void run_on_threads(running *runs) {
    pthread_t threads[2 * MOST_RANGES];
    scenario_range ranges[2 * MOST_RANGES];
    int count = 0;
    for (int i = 0; i < 2; i++)
        for (; runs[i].next < runs[i].num_ranges; runs[i].next++)
            ranges[count++] = (scenario_range){&runs[i].plan, runs[i].begin[runs[i].next], runs[i].end[runs[i].next]};
    for (int i = 0; i < count; i++) CHECK(pthread_create(&threads[i], NULL, scenario_run_range, &ranges[i]) == 0);
    for (int i = 0; i < count; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void check_plans(const scenario *s, const pp_decode_args *args, const results *sizes) {
    running runs[2];
    const int way = below(4);
    for (int i = 0; i < 2; i++) start(s, &runs[i], args, sizes);
    if (way == 0) run_on_threads(runs);
    while (runs[0].next < runs[0].num_ranges) { /* interleaved with the other plan, which may stop early */
        run_next(&runs[0]);
        if (runs[1].next < runs[1].num_ranges && below(2)) run_next(&runs[1]);
    }
    while (way < 3 && runs[1].next < runs[1].num_ranges) run_next(&runs[1]);
    for (int i = 0; i < (way < 3 ? 2 : 1); i++) CHECK(same(sizes, &runs[i].args, args));
}

/* One argument is wrong: neither results nor the plan are written. */
static void check_refused(const scenario *s, const pp_decode_args *args, const results *sizes) {
    pp_decode_args bad = *args, before = *args;
    pp_decode_plan plan, untouched;
    pp_status status = PP_INVALID_ARGUMENT;
    const int32_t seq = below(s->num_seqs), blocks = scenario_blocks_of(s, seq), way = below(8);
    int32_t *lens = take_copy(s->seq_lens, (size_t)s->num_seqs * sizeof(int32_t));
    int32_t *tables = take_copy(s->tables, (size_t)s->num_seqs * (size_t)s->width * sizeof(int32_t));
    size_t bytes;
    take_results(sizes, &bad);
    take_results(sizes, &before);
    CHECK(pp_decode_workspace(&bad, &bytes) == PP_OK);
    void *workspace = taken[num_taken++] = scenario_memory(bytes);
    if (way == 0) lens[seq] = ONE_OF(-1, INT32_MIN, s->width * s->pool.layout.block_size + 1);
    if (way == 1) bad.window = below(2) ? -1 : INT64_MIN;
    if (way == 2) bytes -= 64;
    if (way == 3) bad.num_seqs = -1;
    if (way == 6) bad.q_dtype = ONE_OF(-1, 3, INT32_MAX);
    if (way == 7) bad.out_dtype = ONE_OF(-1, 3, INT32_MIN);
    if (way == 4) bad.num_qo_heads = ONE_OF(0, -s->num_qo_heads);
    if (way == 5 && blocks && s->starts[seq + 1] > s->starts[seq]) { /* the last block is read, also under a mask */
        tables[seq * s->width + blocks - 1] = ONE_OF(-1, INT32_MAX, (int32_t)s->pool.num_blocks);
        status = PP_INVALID_BLOCK;
    } else if (way == 5) {
        bad.layer = 1;
    }
    bad.seq_lens = lens;
    bad.block_tables = tables;
    memset(&plan, 0xab, sizeof plan);
    memset(&untouched, 0xab, sizeof untouched);
    CHECK(pp_decode_plan_init(&plan, &bad, workspace, bytes) == status);
    CHECK(memcmp(&plan, &untouched, sizeof plan) == 0 && same(sizes, &bad, &before));
    if (way != 2) CHECK(pp_decode(&bad, 1 + below(4)) == status && same(sizes, &bad, &before));
}

static uint32_t mixed(uint32_t sum, const void *results, size_t bytes) {
    for (size_t i = 0; i < bytes / 4; i++) {
        uint32_t word;
        memcpy(&word, (const unsigned char *)results + 4 * i, 4);
        sum = sum * 0x01000193u ^ word;
    }
    return sum;
}

int main(int argc, char **argv) {
    uint32_t sum = 0;
    const int rounds = argc > 1 ? atoi(argv[1]) : 200, first = argc > 2 ? atoi(argv[2]) : 0;
    for (int round = first; round < first + rounds; round++) {
        scenario s;
        pp_decode_args args;
        state = scenario_hash((uint32_t)round);
        draw_scenario(&s);
        draw_args(&s, &args);
        const size_t rows = (size_t)scenario_row_count(&s);
        const results sizes = {(size_t)scenario_out_count(&s) * sizeof(float), rows * sizeof(float)};
        take_results(&sizes, &args);
        scenario_decode_apart(&s, &args);
        if (round % 4 == 0) scenario_check(&s, &args);
        sum = mixed(mixed(sum, args.out, sizes.out), args.lse, sizes.lse);
        const int kept = num_taken;
        for (int i = 0; i < 4; i++, give_back(kept)) check_plans(&s, &args, &sizes);
        for (int i = 0; i < 3 && s.num_seqs; i++, give_back(kept)) check_refused(&s, &args, &sizes);
        give_back(0);
        scenario_free(&s);
    }
    printf("ok %s %08x\n", pp_isa(), (unsigned)sum);
    return 0;
}
