/* check_decode.c: see check_decode.h. */
#include "check_decode.h"

#include <math.h>

#include "page.h"

pp_status pp_check_decode(const pp_decode_args *args) {
    if (!args->pool || (!args->pool->base && args->pool->num_blocks > 0)) return PP_INVALID_ARGUMENT;
    const pp_kv_layout *layout = &args->pool->layout;
    const float cap = args->logits_soft_cap;   /* 1 / cap must be finite */
    const float scale = fabsf(args->sm_scale); /* scale * log2(e) must be finite */
    int64_t bytes; /* the first ids are read before all spans are checked */
    if (__builtin_mul_overflow(args->block_tables_stride, 4 * (int64_t)args->num_seqs, &bytes))
        return PP_INVALID_ARGUMENT;
    if (args->layer < 0 || args->layer >= layout->num_layers || args->num_seqs < 0 || args->num_qo_heads < 1 ||
        args->num_qo_heads % layout->num_kv_heads || args->block_tables_width < 0 || args->window < 0 ||
        (args->query_start_loc && args->query_start_loc[0]) ||
        !(scale <= 2e38f) || (cap != 0.0f && !(cap >= 1e-30f && cap <= 1e30f)) ||
        (args->num_seqs && (!args->seq_lens || (args->block_tables_width && !args->block_tables))) ||
        args->arithmetic < PP_EXACT || args->arithmetic > PP_BF16X2 ||
        (args->arithmetic != PP_EXACT && (pp_is_quantised(layout->dtype) || layout->dtype == PP_F32)) ||
        args->q_dtype < PP_F32 || args->q_dtype > PP_BF16 || args->out_dtype < PP_F32 || args->out_dtype > PP_BF16 ||
        (args->custom_mask && (!args->mask_indptr || !args->mask_widths)))
        return PP_INVALID_ARGUMENT;
    for (int32_t s = 0; args->custom_mask && s < args->num_seqs; s++)
        if (args->mask_widths[s] < 0) return PP_INVALID_ARGUMENT;
    return PP_OK;
}

/* Bytes [begin, end).  Empty if begin is 0. */
typedef struct span {
    uintptr_t begin, end;
} span;

/* Returns a * b for sizes and offsets in memory.  Returns 0 and sets *beyond if the product exceeds every possible
 * memory.  The sum of three results does not overflow. */
static int64_t times(int64_t a, int64_t b, int *beyond) {
    const int64_t most = (int64_t)1 << 60;
    int64_t product;
    if (!__builtin_mul_overflow(a, b, &product) && product >= -most && product <= most) return product;
    *beyond = 1;
    return 0;
}

static span span_of(const void *data, int64_t bytes) {
    return (span){data && bytes > 0 ? (uintptr_t)data : 0, (uintptr_t)data + (uintptr_t)bytes};
}

static int overlap(span a, span b) { return a.begin && b.begin && a.begin < b.end && b.begin < a.end; }

/* The span from the lowest to the highest of `rows` x `columns` pieces, for strides of either sign.  All sizes are in
 * elements of `item` bytes. */
static span span_of_pieces(const void *data, int64_t item, int64_t piece, int64_t rows, int64_t row_stride,
                           int64_t columns, int64_t column_stride, int *beyond) {
    if (rows < 1 || columns < 1 || piece < 1) return span_of(NULL, 0);
    const int64_t steps[2] = {times(times(rows - 1, row_stride, beyond), item, beyond),
                              times(times(columns - 1, column_stride, beyond), item, beyond)};
    int64_t below = 0, above = times(piece, item, beyond);
    for (int axis = 0; axis < 2; axis++)
        if (steps[axis] < 0)
            below -= steps[axis];
        else
            above += steps[axis];
    return (span){(uintptr_t)data - (uintptr_t)below, (uintptr_t)data + (uintptr_t)above};
}

/* Returns the size of all masks in bytes, or -1 if it exceeds the address space. */
static int64_t mask_bytes(const pp_decode_args *args) {
    int64_t most = 0;
    for (int32_t s = 0; args->custom_mask && s < args->num_seqs; s++) {
        const int64_t queries =
            args->query_start_loc ? args->query_start_loc[s + 1] - (int64_t)args->query_start_loc[s] : 1;
        int64_t end;
        if (args->mask_indptr[s] < 0 || queries < 0) continue;
        if (__builtin_add_overflow(args->mask_indptr[s], (queries * args->mask_widths[s] + 7) / 8, &end)) return -1;
        if (end > most) most = end;
    }
    return most;
}

/* Returns 1 if one of the first `written` spans overlaps any other span of `all`. */
static int some_overlap(const span *spans, int written, int all) {
    for (int i = 0; i < written; i++)
        for (int j = i + 1; j < all; j++)
            if (overlap(spans[i], spans[j])) return 1;
    return 0;
}

pp_status pp_check_apart(const pp_decode_args *args, int64_t num_queries, const void *workspace, size_t bytes) {
    const pp_kv_pool *pool = args->pool;
    const int64_t item = sizeof(float), ids = sizeof(int32_t), seqs = args->num_seqs, width = args->block_tables_width;
    const int64_t heads = args->num_qo_heads, masked = args->custom_mask ? seqs : 0, bits = mask_bytes(args);
    int beyond = bits < 0;
    const int64_t rows = times(num_queries, heads, &beyond), row_bytes = times(rows, item, &beyond);
    const int64_t out_item = pp_dtype_bytes((pp_dtype)args->out_dtype);
    const int64_t of_layer = (int64_t)pool->layout.num_kv_heads * pool->layout.head_dim;
    const int64_t scales = times(pool->layout.num_layers, of_layer, &beyond);
    enum { WRITTEN = 3, ALL = 14 };
    const span spans[ALL] = {
        span_of(args->out, times(rows, pool->layout.v_head_dim * out_item, &beyond)),
        span_of(args->lse, row_bytes),
        span_of(workspace, (int64_t)bytes),
        span_of_pieces(args->q, pp_dtype_bytes((pp_dtype)args->q_dtype), pool->layout.head_dim, num_queries,
                       args->q_stride_seq, heads, args->q_stride_head, &beyond),
        span_of(pool->base, times(pool->num_blocks, pool->layout.block_bytes, &beyond)),
        span_of_pieces(args->block_tables, ids, width, seqs, args->block_tables_stride, 1, 0, &beyond),
        span_of(args->seq_lens, seqs * ids),
        span_of(args->query_start_loc, (seqs + 1) * ids),
        span_of(pool->k_channel_scale, times(scales, item, &beyond)),
        span_of(args->alibi_slopes, heads * item),
        span_of(args->sinks, heads * item),
        span_of(args->custom_mask, bits),
        span_of(args->mask_indptr, masked * (int64_t)sizeof(int64_t)),
        span_of(args->mask_widths, masked * ids)};
    if (beyond || (rows && (!args->q || !args->out))) return PP_INVALID_ARGUMENT;
    return some_overlap(spans, WRITTEN, ALL) ? PP_INVALID_ARGUMENT : PP_OK;
}

pp_status pp_check_merge(const pp_merge_args *args) {
    const int64_t item = sizeof(float), rows = args->num_rows, parts = args->num_parts, dim = args->head_dim;
    if (rows < 0 || parts < 0 || dim < 0 || dim > 1 << 24) return PP_INVALID_ARGUMENT;
    if (rows && ((dim && !args->out) || (parts && (!args->s || (dim && !args->v))))) return PP_INVALID_ARGUMENT;
    int beyond = 0;
    const int64_t row_bytes = times(rows, item, &beyond);
    enum { WRITTEN = 2, ALL = 4 };
    const span spans[ALL] = {
        span_of(args->out, times(row_bytes, dim, &beyond)), span_of(args->lse, row_bytes),
        span_of_pieces(args->v, item, dim, rows, args->v_stride_row, parts, args->v_stride_part, &beyond),
        span_of_pieces(args->s, item, 1, rows, args->s_stride_row, parts, args->s_stride_part, &beyond)};
    return beyond || some_overlap(spans, WRITTEN, ALL) ? PP_INVALID_ARGUMENT : PP_OK;
}
