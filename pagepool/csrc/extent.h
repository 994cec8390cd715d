/* extent.h: questions about the arguments of decode and about its plan: which chunks and blocks a sequence sees, and
 * how it is computed.  For measure.c, plan.c, unit.c, cascade.c and run.c. */
#ifndef PP_EXTENT_H
#define PP_EXTENT_H

#include "kernels.h"

/* Cost model: loading one element from memory costs about 4 multiply-adds. */
enum { PRODUCTS_PER_FETCH = 4 };

/* The fewest rows of a kv head for which query tokens are computed by prefill: with fewer, most of a panel is empty. */
enum { PREFILL_ROWS = 24 };

/* Sequences order[first, first + count), which share a chunk. */
struct pp_shared_run {
    int32_t first, count;
    int64_t chunk;
};

static inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* The way to compute a call: one of PP_WAY_... */
static inline int way_of(const pp_decode_args *args) {
    if (pp_is_quantised(args->pool->layout.dtype)) return PP_WAY_QUANTISED;
    return args->arithmetic == PP_EXACT ? PP_WAY_EXACT : PP_WAY_TILES;
}

/* The range [first, end) of chunks (of blocks) of a sequence that its query tokens see. */
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
    return way_of(args) == PP_WAY_QUANTISED ? pp_kernels_quantised(kernels) : kernels;
}

static inline const pp_way *own_way(const pp_decode_args *args) { return kernels_of(args)->ways[way_of(args)]; }

/* Bytes of scratch for `rows` rows of a block of query tokens. */
static inline size_t panel_bytes_of(const pp_decode_args *args, int32_t rows) {
    return (size_t)own_way(args)->bytes(&args->pool->layout, args->arithmetic, args->q_dtype, rows);
}

static inline int32_t queries_of(const pp_decode_plan *plan, int32_t s) {
    return plan->query_begin[s + 1] - plan->query_begin[s];
}

/* Whether a sequence is cut into blocks of query tokens, which write results and no records.
 *
 * A single query token is a block if its rows fill tiles and threads get several sequences each: records of a latent
 * cache with 128 query heads are half as large as its K.  A long sequence stays cut into chunks for all threads. */
enum { DECODE_ROWS = 64, DECODE_CHUNKS = 8, DECODE_UNITS = 4 };
static inline int takes_prefill(const pp_decode_args *args, int32_t seq_len, int64_t num_queries) {
    const int64_t heads = args->pool->layout.num_kv_heads, group_size = args->num_qo_heads / heads;
    if (num_queries == 1)
        return way_of(args) == PP_WAY_TILES && group_size >= DECODE_ROWS && seq_len <= DECODE_CHUNKS * PP_CHUNK &&
               args->num_seqs * heads >= (int64_t)DECODE_UNITS * args->num_threads;
    return num_queries > 1 && num_queries * group_size >= PREFILL_ROWS;
}

/* Whether a sequence may share chunks: it has a whole chunk and is cut into chunks. */
static inline int is_shareable(const pp_decode_args *args, int32_t seq_len, int64_t num_queries) {
    return seq_len >= PP_CHUNK && num_queries > 0 && !args->no_cascade && !takes_prefill(args, seq_len, num_queries);
}

/* Bytes of scratch for two groups of one head, if the kernel reorders them before it reads them: K and V of plain
 * pages, V that is a part of K, and dtypes that the kernels of quantised pages cannot read in place. */
static inline size_t scratch_of(const pp_decode_args *args) {
    const pp_kv_layout *layout = &args->pool->layout;
    if (way_of(args) == PP_WAY_TILES) return panel_bytes_of(args, own_way(args)->panel_rows);
    if (pp_is_quantised(layout->dtype)) return (size_t)(2 * pp_brought_in_bytes_of(layout));
    const int64_t k_dims = layout->tiled ? 0 : layout->head_dim;
    const int64_t dims = k_dims + (layout->tiled && !layout->v_in_k ? 0 : layout->v_head_dim);
    return (size_t)(2 * PP_GROUP * dims * layout->item_bytes);
}

/* Whether query tokens of a sequence may see different tokens.  Records then store which rows have seen a token. */
static inline int may_differ(const pp_decode_args *args) { return args->query_start_loc || args->custom_mask; }

/* The tokens that the query tokens of a sequence see. */
static inline pp_view view_of(const pp_decode_args *args, int32_t s, int32_t seq_len, int32_t num_queries) {
    pp_view view = {.seq_len = seq_len, .num_queries = num_queries, .window = args->window};
    if (args->custom_mask && args->mask_indptr[s] >= 0) {
        view.mask = args->custom_mask + args->mask_indptr[s];
        view.mask_width = args->mask_widths[s];
        view.mask_first = seq_len - view.mask_width;
    }
    return view;
}

/* Elements of the record of a chunk. */
static inline int64_t record_of(int64_t row_elements, int32_t num_qo_heads, int32_t num_queries) {
    return ((int64_t)num_qo_heads * num_queries * row_elements + 15) / 16 * 16;
}

/* Parts of the rows of a kv head. */
static inline int32_t parts_of(const pp_decode_args *args, int32_t head_rows) {
    return pp_num_parts(head_rows, kernels_of(args)->max_rows);
}

/* Blocks of query tokens of a sequence that is cut into these, or 0. */
static inline int64_t blocks_of(const pp_decode_plan *plan, int32_t s) {
    if (!plan->block_queries || !takes_prefill(&plan->args, plan->seq_lens[s], queries_of(plan, s))) return 0;
    return ceil_div(queries_of(plan, s), plan->block_queries);
}

/* The first chunk of a sequence that it does not share, counted from its first visible chunk. */
static inline int64_t own_begin(const pp_decode_plan *plan, int32_t s) {
    return plan->num_shared ? plan->shared_chunks[s] : 0;
}

#endif
