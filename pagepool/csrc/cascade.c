/* cascade.c: see cascade.h. */
#include <string.h>

#include "cascade.h"
#include "unit.h"

/* The visible part of a sequence, and the number of whole chunks in the shorter of two sequences. */
static extent seen_of(const pp_decode_plan *plan, int32_t s) {
    return extent_of(&plan->args, plan->seq_lens[s], queries_of(plan, s));
}
static int64_t end_of_both(const pp_decode_plan *plan, int32_t a, int32_t b) {
    return (plan->seq_lens[a] < plan->seq_lens[b] ? plan->seq_lens[a] : plan->seq_lens[b]) / PP_CHUNK;
}

/* Returns the number of whole chunks that two sequences share, from the first visible chunk on.  Both must begin in the
 * same block. */
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

/* Returns 1 if sequence a comes before sequence b.  The order is by the first visible block, then by the block ids of
 * whole chunks, then by length and index. */
static int comes_before(const pp_decode_plan *plan, int32_t a, int32_t b) {
    const int64_t first = seen_of(plan, a).first_block, other = seen_of(plan, b).first_block;
    if (first != other) return first < other;
    const int64_t blocks = end_of_both(plan, a, b) * PP_CHUNK / plan->args.pool->layout.block_size - first;
    const size_t bytes = blocks > 0 ? sizeof(int32_t) * (size_t)blocks : 0;
    const int way = memcmp(plan->ids + plan->ids_begin[a], plan->ids + plan->ids_begin[b], bytes);
    if (way) return way < 0;
    return plan->seq_lens[a] != plan->seq_lens[b] ? plan->seq_lens[a] < plan->seq_lens[b] : a < b;
}

/* Shell sort, which needs no extra memory. */
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

/* Cost of rows in hundredths of a multiply-add per element, for each product.  A row has two products in exact
 * arithmetic.  With tiles, it has one for each part of its query and of its weights with each part of K or V. */
typedef struct row_costs {
    int64_t products, step_rows; /* rows of a panel are computed in full steps */
    int64_t alone, together;
} row_costs;

/* A row of a panel costs 0.6 of a row alone: measured with exact arithmetic on Intel and one thread, and assumed for
 * tiles by vectors.  With AMX and 128 rows per KV head, a product took a tenth of its time in exact arithmetic's panel,
 * the copy of V included. */
static row_costs costs_of_rows(const pp_decode_args *args) {
    enum { ALONE = 50 };
    const pp_way *way = own_way(args);
    const int parts = pp_query_parts(args->arithmetic, args->q_dtype) + pp_weight_parts(args->arithmetic);
    const int products = way_of(args) == PP_WAY_TILES ? parts * pp_parts_of(args->pool->layout.dtype) : 2;
    return (row_costs){products, way->step_rows, ALONE, way->part_cost};
}

/* Returns 1 if the rows of one sequence are a panel already: with tiles, from 16 rows on. */
static int is_panel(const pp_decode_args *args, int64_t rows) { return way_of(args) == PP_WAY_TILES && rows >= 16; }

/* Returns 1 if sharing saves at least a fifth of the cost of a run.  Costs are in hundredths of a multiply-add per
 * element.  Without sharing, each sequence fetches K and V while it computes.  With sharing, K and V are fetched once,
 * and rows are computed in full steps. */
static int pays(const pp_decode_plan *plan, int32_t first, int32_t count) {
    const pp_decode_args *args = &plan->args;
    const pp_kv_layout *layout = &args->pool->layout;
    const int64_t elements = (int64_t)PP_GROUP * (layout->head_dim + (layout->v_in_k ? 0 : layout->v_head_dim));
    const int64_t fetch = 100 * ceil_div(PRODUCTS_PER_FETCH * layout->head_bytes, 2 * elements);
    const row_costs cost = costs_of_rows(args);
    int64_t alone = 0, rows = 0;
    for (int32_t i = first; i < first + count; i++) {
        const int64_t own = (int64_t)args->num_qo_heads / layout->num_kv_heads * queries_of(plan, plan->order[i]);
        const int64_t computed = own * cost.products * (is_panel(args, own) ? cost.together : cost.alone);
        alone += computed > fetch ? computed : fetch;
        rows += own;
    }
    const int64_t padded = cost.step_rows * ceil_div(rows, cost.step_rows);
    return 4 * alone > 5 * (fetch + padded * cost.products * cost.together);
}

/* For each chunk, lists the runs of adjacent sequences that share it and gain by sharing.  They must also have shared
 * all earlier chunks. */
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

/* Iterator over the rows of a shared chunk.  The next row is row `row` of the kv head in sequence order[at], with the
 * chunk `work`. */
typedef struct row_list {
    const pp_decode_plan *plan;
    const struct pp_shared_run *run;
    int32_t kv_head, at, row;
    pp_chunk work;
    pp_view views[2 * PP_GROUP]; /* of the sequences with rows in the current panel */
} row_list;

static int next_rows(void *context, pp_row *rows) {
    row_list *list = context;
    const pp_decode_plan *plan = list->plan;
    const pp_decode_args *args = &plan->args;
    const int32_t most = own_way(args)->panel_rows, group_size = list->work.group_size;
    int num_rows = 0, num_views = 0;
    while (list->at < list->run->count) {
        const int32_t s = plan->order[list->run->first + list->at], head_rows = group_size * queries_of(plan, s);
        const pp_queries queries = pp_queries_from(plan, s, NULL);
        if (list->row == 0) pp_fill_chunk(plan, s, list->run->chunk, 0, &list->work);
        list->views[num_views] = list->work.view;
        for (; list->row < head_rows && num_rows < most; list->row++, num_rows++) {
            const int64_t query = list->row / group_size, at = (int64_t)list->kv_head * head_rows + list->row;
            const int64_t head = (int64_t)list->kv_head * group_size + list->row % group_size;
            rows[num_rows] = (pp_row){.view = &list->views[num_views],
                                      .query = (int32_t)query,
                                      .row = list->row,
                                      .q = pp_query_at(&queries, query, head),
                                      .sums = list->work.rows + at * list->work.row_stride,
                                      .m = list->work.m + at,
                                      .seen = list->work.seen ? list->work.seen + at : NULL};
        }
        if (list->row < head_rows) break;
        num_views++;
        list->row = 0;
        list->at++;
        if (num_rows == most) break;
    }
    return num_rows;
}

void pp_run_shared(pp_decode_plan *plan, int64_t unit, unsigned char *scratch) {
    const pp_decode_args *args = &plan->args;
    const int32_t heads = args->pool->layout.num_kv_heads, head = (int32_t)(unit % heads);
    const struct pp_shared_run *run = &plan->shared[unit / heads];
    row_list list = {.plan = plan, .run = run, .kv_head = head};
    pp_shared work = {.kv_head = head,
                      .q_dtype = args->q_dtype,
                      .next_rows = next_rows,
                      .context = &list,
                      .scratch = scratch};
    pp_fill_chunk(plan, plan->order[run->first], run->chunk, 0, &work.chunk);
    /* All sequences begin in the same block.  With a window, the view of each row determines which tokens of this chunk
     * it sees. */
    const int64_t first = work.chunk.first_block * args->pool->layout.block_size;
    work.chunk.first = first > work.chunk.begin ? first : work.chunk.begin;
    list.work.group_size = work.chunk.group_size;
    own_way(args)->shared(&work);
    int32_t slice = 0;
    while ((int64_t)heads * (slice + 1) / plan->slices <= head) slice++;
    int32_t *left = &plan->heads_left[unit / heads * plan->slices + slice];
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0)
        for (int32_t i = 0; i < run->count; i++) pp_count_chunk(plan, plan->order[run->first + i], slice);
}
