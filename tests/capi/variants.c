/* variants.c: every variant of decode, for every dtype, against a plain double loop, and every byte that is read at the
 * end of a mapping: the page behind the pool, the queries, the tables, the mask, ... may not be touched.
 *
 * A read of one byte too many ends the program by a signal, whatever the instruction set and without a sanitizer. */
#define _DEFAULT_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "scenario.h"

#define NUM_SEQS 7
#define NUM_VARIANTS 9

static const int32_t SEQ_LENS[NUM_SEQS] = {0, 1, 17, 33, 512, 530, 600};
static const int32_t COUNTS[NUM_SEQS] = {1, 1, 5, 2, 0, 9, 3};

/* `bytes` that end where a page begins that cannot be read: all of `from`.  Freed with the process. */
static void *at_the_end(const void *from, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page;
    unsigned char *mapping = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapping != MAP_FAILED && mprotect(mapping + room, page, PROT_NONE) == 0);
    if (from && bytes) memcpy(mapping + room - bytes, from, bytes);
    return mapping + room - bytes;
}

/* Bits of a mask for each sequence, every second one a tree over its query tokens, the others over all; the last is
 * causal. */
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
    uint8_t *bits = at_the_end(NULL, (size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) bits[i] = (uint8_t)scenario_hash((uint32_t)i);
    args->custom_mask = bits;
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

/* One variant with one thread, and with four: right, and the same bits. */
static void check_variant(const scenario *s, int variant, pp_arithmetic arithmetic) {
    pp_decode_args args;
    const size_t rows = (size_t)scenario_row_count(s), out_bytes = (size_t)scenario_out_count(s) * sizeof(float);
    const size_t score_bytes = rows * (size_t)s->width * sizeof(float);
    scenario_args(s, 0, at_the_end(NULL, out_bytes), at_the_end(NULL, rows * sizeof(float)), &args);
    args.block_scores = at_the_end(NULL, score_bytes);
    set_variant(s, variant, &args);
    args.arithmetic = arithmetic;
    CHECK(pp_decode(&args, 1) == PP_OK);
    scenario_check(s, &args);
    pp_decode_args again = args;
    again.out = at_the_end(NULL, out_bytes);
    again.lse = at_the_end(NULL, rows * sizeof(float));
    again.block_scores = at_the_end(NULL, score_bytes);
    CHECK(pp_decode(&again, 4) == PP_OK);
    CHECK(memcmp(args.out, again.out, out_bytes) == 0 && memcmp(args.lse, again.lse, rows * sizeof(float)) == 0);
    CHECK(memcmp(args.block_scores, again.block_scores, score_bytes) == 0);
}

/* Results that overlap each other or what is read are refused before anything is written. */
static void check_overlaps(const scenario *s) {
    pp_decode_args args, bad;
    const size_t rows = (size_t)scenario_row_count(s);
    scenario_args(s, 0, scenario_memory((size_t)scenario_out_count(s) * sizeof(float)),
                  scenario_memory(rows * sizeof(float)), &args);
    args.block_scores = scenario_memory(rows * (size_t)s->width * sizeof(float));
    args.query_start_loc = s->starts;
    const float first = args.out[0];
    for (int way = 0; way < 8; way++) {
        bad = args;
        if (way == 0) bad.out = (float *)(uintptr_t)s->q;
        if (way == 1) bad.lse = args.out + scenario_out_count(s) - 1;
        if (way == 2) bad.block_scores = args.lse;
        if (way == 3) bad.out = (float *)(s->pool.base + s->pool.num_blocks * s->pool.layout.block_bytes - 4);
        if (way == 4) bad.lse = (float *)(uintptr_t)s->tables;
        if (way == 5) bad.block_scores = (float *)(uintptr_t)s->seq_lens;
        if (way == 6) bad.lse = (float *)(uintptr_t)s->starts;
        if (way == 7) bad.sinks = bad.lse;
        CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
        CHECK(memcmp(&args.out[0], &first, sizeof first) == 0);
    }
    bad = args;
    bad.arithmetic = s->pool.layout.dtype == PP_BF16 ? PP_ROUNDED_BF16 + 1 : PP_ROUNDED_BF16;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    bad.arithmetic = -1;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    CHECK(memcmp(&args.out[0], &first, sizeof first) == 0);
    bad = args;
    s->starts[0] = 1;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    s->starts[0] = 0;
    s->starts[2]++;
    s->starts[3] = 1;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT);
    bad.query_start_loc = NULL;
    bad.custom_mask = (const uint8_t *)s->q;
    CHECK(pp_decode(&bad, 1) == PP_INVALID_ARGUMENT); /* no indptr, no widths */
    free(args.out);
    free(args.lse);
    free(args.block_scores);
}

static void count_queries(scenario *s, const int32_t *counts) {
    for (int32_t seq = 0; seq < s->num_seqs; seq++)
        s->starts[seq + 1] = s->starts[seq] + (counts ? counts[seq] : 1);
    scenario_make_q(s);
}

static void check_layout(const pp_kv_layout *layout, int32_t group) {
    scenario s, guarded;
    scenario_make_of(&s, layout, group, NUM_SEQS, SEQ_LENS);
    for (int several = 0; several < 2; several++) {
        count_queries(&s, several ? COUNTS : NULL);
        guarded = s;
        guarded.pool.base = at_the_end(s.pool.base, (size_t)(s.pool.num_blocks * layout->block_bytes));
        guarded.tables = at_the_end(s.tables, (size_t)s.num_seqs * (size_t)s.width * sizeof(int32_t));
        guarded.seq_lens = at_the_end(s.seq_lens, (size_t)s.num_seqs * sizeof(int32_t));
        guarded.starts = at_the_end(s.starts, (size_t)(s.num_seqs + 1) * sizeof(int32_t));
        guarded.q = at_the_end(s.q, (size_t)scenario_row_count(&s) * (size_t)layout->head_dim * sizeof(float));
        for (int32_t seq = 0; seq < s.num_seqs; seq++) scenario_append(&guarded, seq, 0, s.seq_lens[seq]);
        for (int variant = several ? 5 : 0; variant < (several ? NUM_VARIANTS : 5); variant++)
            for (int way = PP_EXACT; way <= (layout->dtype == PP_BF16 ? PP_ROUNDED_BF16 : PP_EXACT); way++)
                check_variant(&guarded, variant, (pp_arithmetic)way);
    }
    check_overlaps(&s);
    scenario_free(&s);
}

int main(void) {
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
    printf("ok %s\n", pp_isa());
    return 0;
}
