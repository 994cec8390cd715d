/* check_decode.c: see check_decode.h. */
#include "check_decode.h"

pp_status pp_check_decode(const pp_decode_args *args) {
    const pp_kv_layout *layout = &args->pool->layout;
    if (args->layer < 0 || args->layer >= layout->num_layers || args->num_seqs < 0 || args->num_qo_heads < 1 ||
        args->num_qo_heads % layout->num_kv_heads || args->block_tables_width < 0 || args->window < 0 ||
        (args->query_start_loc && args->query_start_loc[0]) ||
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

/* From the lowest to the highest element, whatever the signs of the strides. */
static span span_of_queries(const pp_decode_args *args, int64_t num_queries) {
    const int64_t bytes[2] = {(num_queries - 1) * args->q_stride_seq * (int64_t)sizeof(float),
                              (args->num_qo_heads - 1) * args->q_stride_head * (int64_t)sizeof(float)};
    int64_t below = 0, above = args->pool->layout.head_dim * (int64_t)sizeof(float);
    for (int axis = 0; axis < 2; axis++)
        if (bytes[axis] < 0)
            below -= bytes[axis];
        else
            above += bytes[axis];
    if (!num_queries) return span_of(NULL, 0);
    return (span){(uintptr_t)args->q - (uintptr_t)below, (uintptr_t)args->q + (uintptr_t)above};
}

pp_status pp_check_apart(const pp_decode_args *args, int64_t num_queries, const void *workspace, size_t bytes) {
    const pp_kv_pool *pool = args->pool;
    const int64_t rows = num_queries * args->num_qo_heads, item = sizeof(float), heads = args->num_qo_heads * item;
    const int64_t table = (args->num_seqs - 1) * args->block_tables_stride + args->block_tables_width;
    enum { WRITTEN = 3, ALL = 11 };
    const span spans[ALL] = {span_of(args->out, rows * pool->layout.v_head_dim * item),
                             span_of(args->lse, rows * item),
                             span_of(args->block_scores, rows * args->block_tables_width * item),
                             span_of(workspace, (int64_t)bytes),
                             span_of_queries(args, num_queries),
                             span_of(pool->base, pool->num_blocks * pool->layout.block_bytes),
                             span_of(args->block_tables, args->num_seqs ? table * (int64_t)sizeof(int32_t) : 0),
                             span_of(args->seq_lens, args->num_seqs * (int64_t)sizeof(int32_t)),
                             span_of(args->query_start_loc, (args->num_seqs + (int64_t)1) * (int64_t)sizeof(int32_t)),
                             span_of(args->alibi_slopes, heads),
                             span_of(args->sinks, heads)};
    for (int i = 0; i < WRITTEN; i++)
        for (int j = i + 1; j < ALL; j++)
            if (overlap(spans[i], spans[j])) return PP_INVALID_ARGUMENT;
    return PP_OK;
}
