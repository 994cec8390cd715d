/* plan.h: what plan.c and cascade.c share. */
#ifndef PP_PLAN_H
#define PP_PLAN_H

#include "kernels.h"

/* An element takes about as long to come from memory as so many products. */
enum { PRODUCTS_PER_FETCH = 4 };

/* Query tokens take the way of prefill if a kv head has so many rows: with fewer, most of a panel would be empty. */
enum { PREFILL_ROWS = 24 };

/* Sequences order[first, first + count), which share a chunk. */
struct pp_shared_run {
    int32_t first, count;
    int64_t chunk;
};

static inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* How a call computes: one of PP_WAY_... */
static inline int way_of(const pp_decode_args *args) {
    return pp_is_mixed(&args->pool->layout) ? PP_WAY_MIXED : args->arithmetic;
}

/* The chunks and blocks of a sequence of which its query tokens see something: [first, end). */
typedef struct extent {
    int64_t first_chunk, end_chunk, first_block, end_block;
} extent;

static inline extent extent_of(const pp_decode_args *args, int32_t seq_len, int32_t num_queries) {
    const pp_view view = {.seq_len = seq_len, .num_queries = num_queries, .window = args->window};
    const int64_t first = pp_first_seen(&view, 0), size = args->pool->layout.block_size;
    if (!seq_len || !num_queries) return (extent){0, 0, 0, 0};
    return (extent){first / PP_CHUNK, ceil_div(seq_len, PP_CHUNK), first / size, ceil_div(seq_len, size)};
}

static inline const pp_kernels *kernels_of(const pp_decode_args *args) {
    const pp_kernels *kernels = pp_kernels_get();
    const int way = way_of(args);
    return way == PP_WAY_EXACT ? kernels : way == PP_WAY_MIXED ? pp_kernels_mixed(kernels) : kernels->dot;
}

static inline int32_t queries_of(const pp_decode_plan *plan, int32_t s) {
    return plan->query_begin[s + 1] - plan->query_begin[s];
}

/* Whether a sequence is cut into blocks of query tokens: then nothing but its results is written.  Weights of its
 * pages' blocks are known only when all chunks are. */
static inline int takes_prefill(const pp_decode_args *args, int64_t num_queries) {
    const int64_t group_size = args->num_qo_heads / args->pool->layout.num_kv_heads;
    return num_queries > 1 && num_queries * group_size >= PREFILL_ROWS && !args->block_scores;
}

/* Whether a sequence's chunks may be shared with others: it has a whole one and is cut into chunks.  (Weights of blocks
 * are added up chunk by chunk.) */
static inline int is_shareable(const pp_decode_args *args, int32_t seq_len, int64_t num_queries) {
    return seq_len >= PP_CHUNK && num_queries > 0 && !args->block_scores && !args->no_cascade &&
           !takes_prefill(args, num_queries);
}

/* Notes a sequence's first block in `bits`, which are 0 at first; whether another one may have it, too.  Wrong only if
 * it says so. */
enum { PP_NOTED_BLOCKS = 1 << 14 };
int pp_note_first_block(uint32_t *bits, int32_t block);

/* Finds the runs of sequences that share chunks: fills in order, common, shared_chunks, shared, num_shared and
 * heads_left of a plan whose tables have been copied. */
void pp_find_shared(pp_decode_plan *plan);

#endif
