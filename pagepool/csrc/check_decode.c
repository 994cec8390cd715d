/* check_decode.c: see check_decode.h. */
#include "check_decode.h"

pp_status pp_check_decode(const pp_decode_args *args) {
    const pp_kv_layout *layout = &args->pool->layout;
    if (args->layer < 0 || args->layer >= layout->num_layers || args->num_seqs < 0 || args->num_qo_heads < 1 ||
        args->num_qo_heads % layout->num_kv_heads || args->block_tables_width < 0 || args->window < 0 ||
        (args->query_start_loc && args->query_start_loc[0]) || !(args->logits_soft_cap >= 0.0f) ||
        (args->num_seqs && (!args->seq_lens || (args->block_tables_width && !args->block_tables))) ||
        (args->arithmetic != PP_EXACT && (args->arithmetic != PP_ROUNDED_BF16 || layout->dtype != PP_BF16)) ||
        (args->custom_mask && (!args->mask_indptr || !args->mask_widths)))
        return PP_INVALID_ARGUMENT;
    for (int32_t s = 0; args->custom_mask && s < args->num_seqs; s++)
        if (args->mask_widths[s] < 0) return PP_INVALID_ARGUMENT;
    return PP_OK;
}

/* Bytes [begin, end); none where begin is 0. */
typedef struct span {
    uintptr_t begin, end;
} span;

static span span_of(const void *data, int64_t bytes) {
    return (span){data && bytes > 0 ? (uintptr_t)data : 0, (uintptr_t)data + (uintptr_t)bytes};
}

static int overlap(span a, span b) { return a.begin && b.begin && a.begin < b.end && b.begin < a.end; }

/* From the lowest to the highest of `rows` x `columns` pieces, whatever the signs of the strides; all in bytes. */
static span span_of_pieces(const void *data, int64_t piece, int64_t rows, int64_t row_stride, int64_t columns,
                           int64_t column_stride) {
    const int64_t steps[2] = {(rows - 1) * row_stride, (columns - 1) * column_stride};
    int64_t below = 0, above = piece;
    if (rows < 1 || columns < 1 || piece < 1) return span_of(NULL, 0);
    for (int axis = 0; axis < 2; axis++)
        if (steps[axis] < 0)
            below -= steps[axis];
        else
            above += steps[axis];
    return (span){(uintptr_t)data - (uintptr_t)below, (uintptr_t)data + (uintptr_t)above};
}

/* The bytes of the masks from the first on; -1 when they pass what can be addressed. */
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

pp_status pp_check_apart(const pp_decode_args *args, int64_t num_queries, const void *workspace, size_t bytes) {
    const pp_kv_pool *pool = args->pool;
    const int64_t rows = num_queries * args->num_qo_heads, item = sizeof(float), heads = args->num_qo_heads * item;
    const int64_t ids = sizeof(int32_t), seqs = args->num_seqs, masked = args->custom_mask ? seqs : 0;
    const int64_t bits = mask_bytes(args);
    enum { WRITTEN = 3, ALL = 14 };
    const span spans[ALL] = {
        span_of(args->out, rows * pool->layout.v_head_dim * item),
        span_of(args->lse, rows * item),
        span_of(args->block_scores, rows * args->block_tables_width * item),
        span_of(workspace, (int64_t)bytes),
        span_of_pieces(args->q, pool->layout.head_dim * item, num_queries, args->q_stride_seq * item,
                       args->num_qo_heads, args->q_stride_head * item),
        span_of(pool->base, pool->num_blocks * pool->layout.block_bytes),
        span_of_pieces(args->block_tables, args->block_tables_width * ids, seqs, args->block_tables_stride * ids, 1, 0),
        span_of(args->seq_lens, seqs * ids),
        span_of(args->query_start_loc, (seqs + 1) * ids),
        span_of(args->alibi_slopes, heads),
        span_of(args->sinks, heads),
        span_of(args->custom_mask, bits),
        span_of(args->mask_indptr, masked * (int64_t)sizeof(int64_t)),
        span_of(args->mask_widths, masked * ids)};
    if (bits < 0 || (rows && (!args->q || !args->out))) return PP_INVALID_ARGUMENT;
    for (int i = 0; i < WRITTEN; i++)
        for (int j = i + 1; j < ALL; j++)
            if (overlap(spans[i], spans[j])) return PP_INVALID_ARGUMENT;
    return PP_OK;
}

pp_status pp_check_merge(const pp_merge_args *args) {
    const int64_t item = sizeof(float), rows = args->num_rows, parts = args->num_parts, dim = args->head_dim;
    int64_t out_bytes;
    if (rows < 0 || parts < 0 || dim < 0 || dim > 1 << 24 ||
        __builtin_mul_overflow(rows, (dim > 1 ? dim : 1) * item, &out_bytes))
        return PP_INVALID_ARGUMENT;
    if (rows && ((dim && !args->out) || (parts && (!args->s || (dim && !args->v))))) return PP_INVALID_ARGUMENT;
    enum { WRITTEN = 2, ALL = 4 };
    const span spans[ALL] = {
        span_of(args->out, rows * dim * item), span_of(args->lse, rows * item),
        span_of_pieces(args->v, dim * item, rows, args->v_stride_row * item, parts, args->v_stride_part * item),
        span_of_pieces(args->s, item, rows, args->s_stride_row * item, parts, args->s_stride_part * item)};
    for (int i = 0; i < WRITTEN; i++)
        for (int j = i + 1; j < ALL; j++)
            if (overlap(spans[i], spans[j])) return PP_INVALID_ARGUMENT;
    return PP_OK;
}
