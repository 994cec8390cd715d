/* unit.c: see unit.h. */
#include "unit.h"

pp_queries pp_queries_from(const pp_decode_plan *plan, int32_t s, float *widened) {
    const pp_decode_args *args = &plan->args;
    const int64_t first = plan->query_begin[s] * args->q_stride_seq;
    return (pp_queries){.q = (const char *)args->q + first * pp_dtype_bytes((pp_dtype)args->q_dtype),
                        .stride_token = args->q_stride_seq,
                        .stride_head = args->q_stride_head,
                        .dtype = args->q_dtype,
                        .widened = widened};
}

/* The part at which a slice of a sequence begins: the first of a kv head if there are enough kv heads. */
static int32_t slice_border(const pp_decode_plan *plan, int32_t parts, int32_t slice) {
    const int64_t heads = plan->args.pool->layout.num_kv_heads;
    if (plan->slices <= heads) return (int32_t)(heads * slice / plan->slices * parts);
    return (int32_t)(heads * parts * slice / plan->slices);
}

void pp_fill_chunk(const pp_decode_plan *plan, int32_t s, int64_t place, int32_t slice, pp_chunk *work) {
    const pp_decode_args *args = &plan->args;
    const pp_kv_layout *layout = &args->pool->layout;
    const int32_t seq_len = plan->seq_lens[s], num_queries = queries_of(plan, s);
    const int32_t group_size = args->num_qo_heads / layout->num_kv_heads;
    const int32_t head_rows = group_size * num_queries, parts = parts_of(args, head_rows);
    const int32_t most = kernels_of(args)->max_rows;
    const int32_t part_begin = slice_border(plan, parts, slice), part_end = slice_border(plan, parts, slice + 1);
    const int64_t num_rows = (int64_t)num_queries * args->num_qo_heads;
    const int64_t elements = record_of(plan->row_elements, args->num_qo_heads, num_queries);
    const pp_view view = view_of(args, s, seq_len, num_queries);
    const extent seen = extent_of(args, seq_len, num_queries);
    const int64_t begin = (seen.first_chunk + place) * PP_CHUNK, first = pp_first_seen(&view, 0);
    float *record = plan->partial + plan->record_begin[s] + place * elements;
    float *m = record + num_rows * plan->row_stride, *after_m = m + num_rows;
    *work = (pp_chunk){.pool = args->pool,
                       .layer = args->pool->base + args->layer * layout->layer_bytes,
                       .blocks = plan->ids + plan->ids_begin[s],
                       .first_block = seen.first_block,
                       .begin = begin,
                       .end = begin + PP_CHUNK < seq_len ? begin + PP_CHUNK : seq_len,
                       .first = first > begin ? first : begin,
                       .view = view,
                       .part_begin = part_begin,
                       .part_end = part_end,
                       .row_begin = pp_row_of_part(head_rows, most, part_begin),
                       .row_end = pp_row_of_part(head_rows, most, part_end),
                       .group_size = group_size,
                       .arithmetic = args->arithmetic,
                       .q_dtype = args->q_dtype,
                       .sm_scale = args->sm_scale,
                       .logits_soft_cap = args->logits_soft_cap,
                       .alibi_slopes = args->alibi_slopes,
                       .k_channel_scale = pp_channel_scale(args->pool, args->layer, 0),
                       .q = plan->q + plan->packed_begin[s] * args->num_qo_heads * layout->head_dim,
                       .rows = record,
                       .m = m,
                       .seen = num_queries > 1 || view.mask ? after_m : NULL,
                       .row_stride = plan->row_stride};
}

static void merge(const pp_decode_plan *plan, int32_t s, int32_t slice) {
    const pp_decode_args *args = &plan->args;
    const int32_t v_head_dim = args->pool->layout.v_head_dim, num_queries = queries_of(plan, s);
    const extent seen = extent_of(args, plan->seq_lens[s], num_queries);
    const int64_t row = (int64_t)plan->query_begin[s] * args->num_qo_heads;
    pp_chunk chunk;
    pp_fill_chunk(plan, s, 0, slice, &chunk);
    kernels_of(args)->merge(&(pp_merge){
        .chunk = &chunk,
        .record_stride = record_of(plan->row_elements, args->num_qo_heads, num_queries),
        .num_chunks = seen.end_chunk - seen.first_chunk,
        .num_qo_heads = args->num_qo_heads,
        .v_head_dim = v_head_dim,
        .out = (char *)args->out + row * v_head_dim * pp_dtype_bytes((pp_dtype)args->out_dtype),
        .out_dtype = args->out_dtype,
        .lse = args->lse ? args->lse + row : NULL,
        .sinks = args->sinks,
    });
}

void pp_count_chunk(pp_decode_plan *plan, int32_t s, int32_t slice) {
    int32_t *left = &plan->remaining[(int64_t)s * plan->slices + slice];
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0) merge(plan, s, slice);
}
