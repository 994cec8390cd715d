/* cascade.c: finds, in the block tables, the chunks that several sequences of a call begin with (plan.c). */
#include <string.h>

#include "plan.h"

int pp_note_first_block(uint32_t *bits, int32_t block) {
    const uint32_t hash = (uint32_t)block * 2654435769u >> 18, mask = 1u << hash % 32;
    const int noted = (bits[hash / 32] & mask) != 0;
    bits[hash / 32] |= mask;
    return noted;
}

/* What is seen of a sequence, and the chunk before which two sequences have whole ones. */
static extent seen_of(const pp_decode_plan *plan, int32_t s) {
    return extent_of(&plan->args, plan->seq_lens[s], queries_of(plan, s));
}
static int64_t end_of_both(const pp_decode_plan *plan, int32_t a, int32_t b) {
    return (plan->seq_lens[a] < plan->seq_lens[b] ? plan->seq_lens[a] : plan->seq_lens[b]) / PP_CHUNK;
}

/* Whole chunks that two sequences have in common, from the first that is seen on, which must lie in one block. */
static int64_t chunks_in_common(const pp_decode_plan *plan, int32_t a, int32_t b) {
    const int64_t size = plan->args.pool->layout.block_size;
    const extent seen = seen_of(plan, a), other = seen_of(plan, b);
    if (seen.first_block != other.first_block || seen.first_chunk != other.first_chunk) return 0;
    int64_t end = end_of_both(plan, a, b), same = 0;
    const int64_t blocks = ceil_div(end * PP_CHUNK, size) - seen.first_block;
    const int32_t *x = plan->ids + plan->ids_begin[a], *y = plan->ids + plan->ids_begin[b];
    while (same < blocks && x[same] == y[same]) same++;
    if (same < blocks) end = (seen.first_block + same) * size / PP_CHUNK;
    return end > seen.first_chunk ? end - seen.first_chunk : 0;
}

/* Whether sequence a comes before b: by the first block that is seen, then by the ids of whole chunks, else as they
 * are. */
static int comes_before(const pp_decode_plan *plan, int32_t a, int32_t b) {
    const int64_t first = seen_of(plan, a).first_block, other = seen_of(plan, b).first_block;
    if (first != other) return first < other;
    const int64_t blocks = end_of_both(plan, a, b) * PP_CHUNK / plan->args.pool->layout.block_size - first;
    const size_t bytes = blocks > 0 ? sizeof(int32_t) * (size_t)blocks : 0;
    const int way = memcmp(plan->ids + plan->ids_begin[a], plan->ids + plan->ids_begin[b], bytes);
    if (way) return way < 0;
    return plan->seq_lens[a] != plan->seq_lens[b] ? plan->seq_lens[a] < plan->seq_lens[b] : a < b;
}

/* Sorts (Shell's way, which needs no memory). */
static void sort_by_ids(const pp_decode_plan *plan, int32_t *order, int32_t n) {
    int32_t gap = 1;
    while (gap < n / 3) gap = 3 * gap + 1;
    for (; gap; gap /= 3)
        for (int32_t i = gap; i < n; i++) {
            const int32_t s = order[i];
            int32_t j = i;
            for (; j >= gap && comes_before(plan, s, order[j - gap]); j -= gap) order[j] = order[j - gap];
            order[j] = s;
        }
}

/* Whether a run gains by sharing, in products for each element: alone, each sequence fetches K and V and computes
 * meanwhile; together K and V are fetched once and then computed with panel by panel, a row for 0.6 of what it costs
 * alone.  Measured on Intel and with one thread; what gains less than a quarter is left alone. */
static int pays(const pp_decode_plan *plan, int32_t first, int32_t count) {
    const pp_kv_layout *layout = &plan->args.pool->layout;
    const int64_t elements = (int64_t)PP_GROUP * (layout->head_dim + (layout->v_in_k ? 0 : layout->v_head_dim));
    const int64_t fetch = ceil_div(PRODUCTS_PER_FETCH * layout->head_bytes, 2 * elements);
    const int64_t panel = kernels_of(&plan->args)->panel_rows;
    int64_t alone = 0, rows = 0;
    for (int32_t i = first; i < first + count; i++) {
        const int64_t own = (int64_t)plan->args.num_qo_heads / layout->num_kv_heads * queries_of(plan, plan->order[i]);
        alone += own > fetch ? own : fetch;
        rows += own;
    }
    return 4 * alone > 5 * fetch + 3 * panel * ceil_div(rows, panel);
}

/* Chunk by chunk the runs of neighbours that have it in common, and gain by it as they did with
 * all chunks before. */
void pp_find_shared(pp_decode_plan *plan) {
    const pp_decode_args *args = &plan->args;
    const int64_t heads = args->pool->layout.num_kv_heads;
    int64_t most = 0;
    int32_t n = 0;
    for (int32_t s = 0; s < args->num_seqs; s++) {
        plan->shared_chunks[s] = 0;
        if (is_shareable(args, plan->seq_lens[s], queries_of(plan, s))) plan->order[n++] = s;
    }
    sort_by_ids(plan, plan->order, n);
    for (int32_t i = 0; i + 1 < n; i++) {
        plan->common[i] = (int32_t)chunks_in_common(plan, plan->order[i], plan->order[i + 1]);
        if (plan->common[i] > most) most = plan->common[i];
    }
    for (int64_t chunk = 0; chunk < most; chunk++)
        for (int32_t i = 0, end; i + 1 < n; i = end) {
            for (end = i + 1; end < n && plan->common[end - 1] > chunk;) end++;
            if (end == i + 1 || plan->shared_chunks[plan->order[i]] < chunk || !pays(plan, i, end - i)) continue;
            int32_t *left = plan->heads_left + (int64_t)plan->num_shared * plan->slices;
            for (int32_t j = i; j < end; j++) plan->shared_chunks[plan->order[j]]++;
            for (int32_t slice = 0; slice < plan->slices; slice++)
                left[slice] = (int32_t)(heads * (slice + 1) / plan->slices - heads * slice / plan->slices);
            plan->shared[plan->num_shared++] = (struct pp_shared_run){.first = i, .count = end - i, .chunk = chunk};
        }
}
