/* plan.c: cuts decode attention into units that any thread may run.
 *
 * measure.c counts the work and cuts it, plan.c copies the tables and numbers the units, cascade.c finds and runs the
 * chunks that sequences share, run.c runs all units.  Both fill in the work of a unit by unit.c.
 *
 * A unit is one chunk (512 tokens) of one sequence, for all of its rows.  If there are too few chunks for the threads,
 * a unit is a slice of the rows: some kv heads or, with fewer kv heads than threads, some parts of their rows
 * (kernels.h defines rows and parts).  Units are numbered sequence by sequence, chunk by chunk, slice by slice:
 *
 *   unit_begin[s] = the first unit of sequence s;   unit_begin[num_seqs] = num_units
 *   remaining[s * slices + slice] = chunks of the slice that are not done; the thread that
 *                                 finishes the last one merges
 *
 * Lengths, query counts and block ids are copied into the workspace as they are checked, so a thread that changes the
 * caller's arrays meanwhile cannot lead a unit out of the pool.  Queries are copied into the order in which the kernel
 * reads them, and the slopes of ALiBi in base 2.
 *
 * Each chunk of each sequence has a record in the workspace; the records of sequence s begin at record_begin[s].  For
 * the R = num_qo_heads * (query tokens) rows it has rows (R, row_stride), m (R,), and seen (R,) unless there is one
 * query token and no mask.  A record depends on the tokens of its chunk alone, and records are merged in order.  So no
 * bit depends on which thread ran which unit.
 *
 * A sequence of many query tokens, or of one with many rows (takes_prefill), is cut into blocks instead: a unit is a
 * block of its query tokens for one kv head, over all chunks, and writes results and no record.  Its queries are read
 * in place.  Units are numbered from the last block, which sees most tokens, to the first, and in a block by kv
 * head. */
#include <math.h>
#include <string.h>

#include "cascade.h"
#include "check_decode.h"
#include "float_mode.h"
#include "measure.h"
#include "pagepool/threads.h"
#include "unit.h"
#include "workspace.h"

/* Waking a thread may take about 6 us, so each additional thread must have at least this much work. */
enum { PRODUCTS_PER_THREAD = 1 << 18 };

pp_status pp_decode_workspace(const pp_decode_args *args, size_t *bytes) {
    pp_measures all;
    pp_status status = pp_measure(args, &all);
    if (status == PP_OK) status = pp_cut(args, &all);
    if (status == PP_OK) *bytes = all.bytes;
    return status;
}

/* Copies lengths, query counts and the ids of blocks that are seen.  Other ids are neither read nor checked.  Fails if
 * the totals differ from those that pp_measure found, because another thread has then changed an array. */
static pp_status copy_tables(pp_decode_plan *plan, const pp_decode_args *args, const pp_measures *all) {
    const pp_kv_pool *pool = args->pool;
    pp_measures sum = {.row_elements = all->row_elements};
    plan->query_begin[0] = 0;
    for (int32_t s = 0; s < args->num_seqs; s++) {
        const int32_t seq_len = plan->seq_lens[s] = __atomic_load_n(&args->seq_lens[s], __ATOMIC_RELAXED);
        int64_t queries = 1;
        if (args->query_start_loc)
            queries = __atomic_load_n(&args->query_start_loc[s + 1], __ATOMIC_RELAXED) - (int64_t)plan->query_begin[s];
        plan->ids_begin[s] = sum.num_blocks;
        plan->packed_begin[s] = sum.num_packed;
        plan->record_begin[s] = sum.num_records;
        const pp_status status = pp_add_sequence(args, seq_len, queries, &sum);
        if (status != PP_OK) return status;
        if (sum.num_blocks > all->num_blocks || sum.num_queries > all->num_queries) return PP_INVALID_ARGUMENT;
        plan->query_begin[s + 1] = (int32_t)sum.num_queries;
        const extent seen = extent_of(args, seq_len, (int32_t)queries);
        const int64_t first = s * args->block_tables_stride + seen.first_block;
        int32_t *to = plan->ids + plan->ids_begin[s];
        int bad = 0;
        for (int64_t b = 0; b < seen.end_block - seen.first_block; b++) {
            const int32_t id = __atomic_load_n(&args->block_tables[first + b], __ATOMIC_RELAXED);
            bad |= id < 0 || id >= pool->num_blocks;
            to[b] = id;
        }
        if (bad) return PP_INVALID_BLOCK;
    }
    return sum.num_blocks == all->num_blocks && sum.num_chunks == all->num_chunks &&
                   sum.num_queries == all->num_queries && sum.num_records == all->num_records &&
                   sum.num_packed == all->num_packed
               ? PP_OK
               : PP_INVALID_ARGUMENT;
}

/* Writes the results of a sequence without visible tokens: zeros, and an lse of -inf. */
static void write_nothing(const pp_decode_plan *plan, int32_t s) {
    const pp_decode_args *args = &plan->args;
    const int64_t first = (int64_t)plan->query_begin[s] * args->num_qo_heads;
    const int64_t rows = (int64_t)queries_of(plan, s) * args->num_qo_heads, dims = args->pool->layout.v_head_dim;
    const int64_t item = pp_dtype_bytes((pp_dtype)args->out_dtype);
    if (!rows) return; /* the array may be missing then */
    memset((char *)args->out + first * dims * item, 0, (size_t)(rows * dims * item));
    for (int64_t r = first; args->lse && r < first + rows; r++) args->lse[r] = -INFINITY;
}

/* Lays out the queries of a sequence. */
static void pack(const pp_decode_plan *plan, int32_t s, float *widened) {
    const pp_decode_args *args = &plan->args;
    const pp_kv_layout *layout = &args->pool->layout;
    const pp_queries from = pp_queries_from(plan, s, widened);
    float *to = plan->q + plan->packed_begin[s] * args->num_qo_heads * layout->head_dim;
    kernels_of(args)->pack_queries[way_of(args)](to, &from, layout, args->num_qo_heads / layout->num_kv_heads,
                                                 queries_of(plan, s), args->sm_scale,
                                                 pp_channel_scale(args->pool, args->layer, 0));
}

/* Plans what was measured and cut, in a workspace of all->bytes. */
static pp_status plan_units(pp_decode_plan *plan, const pp_decode_args *args, const pp_measures *all, void *workspace) {
    pp_status status = pp_check_apart(args, all->num_queries, workspace, all->bytes);
    if (status != PP_OK) return status;
    char *at = workspace;
    *plan = (pp_decode_plan){.args = *args,
                             .slices = all->slices,
                             .block_queries = all->block_queries,
                             .num_slots = all->num_slots,
                             .slot_bytes = (int64_t)all->slot,
                             .row_stride = all->row_stride,
                             .row_elements = all->row_elements};
    plan->remaining = (int32_t *)at;
    plan->unit_begin = (int64_t *)(at += all->counters);
    plan->ids_begin = (int64_t *)(at += all->begins);
    plan->packed_begin = (int64_t *)(at += all->begins);
    plan->record_begin = (int64_t *)(at += all->begins);
    plan->query_begin = (int32_t *)(at += all->begins);
    plan->seq_lens = (int32_t *)(at += all->starts);
    plan->ids = (int32_t *)(at += all->lengths);
    float *slopes = (float *)(at += all->ids);
    float *widened = (float *)(at += all->slopes);
    plan->slot_taken = (int32_t *)(at += all->widened);
    plan->slots = (unsigned char *)(at += all->flags);
    plan->shared = (struct pp_shared_run *)(at += all->slots);
    plan->heads_left = (int32_t *)(at += all->shared);
    plan->order = (int32_t *)(at += all->left);
    const size_t lengths = all->may_share ? all->lengths : 0;
    plan->shared_chunks = (int32_t *)(at += lengths);
    plan->common = (int32_t *)(at += lengths);
    at += lengths;
    plan->q = (float *)at;
    plan->partial = (float *)(at += all->queries);
    memset(plan->slot_taken, 0, all->flags);
    status = copy_tables(plan, args, all);
    if (status != PP_OK) return status;
    const uint64_t modes = pp_modes_enter();
    if (args->alibi_slopes) {
        for (int32_t h = 0; h < args->num_qo_heads; h++) slopes[h] = pp_in_base_2(args->alibi_slopes[h]);
        plan->args.alibi_slopes = slopes;
    }
    if (all->may_share) pp_find_shared(plan);
    plan->num_units = (int64_t)plan->num_shared * args->pool->layout.num_kv_heads;
    for (int32_t s = 0; s < args->num_seqs; s++) {
        const int32_t num_queries = queries_of(plan, s);
        const extent seen = extent_of(args, plan->seq_lens[s], num_queries);
        const int64_t chunks = seen.end_chunk - seen.first_chunk, blocks = blocks_of(plan, s);
        plan->unit_begin[s] = plan->num_units;
        if (chunks && blocks) {
            plan->num_units += blocks * args->pool->layout.num_kv_heads;
            continue;
        }
        plan->num_units += (chunks - own_begin(plan, s)) * all->slices;
        for (int32_t slice = 0; slice < all->slices; slice++)
            plan->remaining[(int64_t)s * all->slices + slice] = (int32_t)chunks;
        if (!chunks)
            write_nothing(plan, s);
        else
            pack(plan, s, widened);
    }
    pp_modes_leave(modes);
    plan->unit_begin[args->num_seqs] = plan->num_units;
    return PP_OK;
}

pp_status pp_decode_plan_init(pp_decode_plan *plan, const pp_decode_args *args, void *workspace, size_t bytes) {
    pp_measures all;
    pp_decode_plan made;
    pp_status status = pp_measure(args, &all);
    if (status == PP_OK) status = pp_cut(args, &all);
    const int fits = status == PP_OK && bytes >= all.bytes && (uintptr_t)workspace % PP_WORKSPACE_ALIGN == 0;
    if (status == PP_OK && !fits) status = PP_INVALID_ARGUMENT;
    if (status == PP_OK) status = plan_units(&made, args, &all, workspace);
    if (status == PP_OK) *plan = made;
    return status;
}

pp_status pp_merge_states(const pp_merge_args *args) {
    const pp_status status = pp_check_merge(args);
    const uint64_t modes = pp_modes_enter();
    if (status == PP_OK) pp_kernels_get()->merge_rows(args);
    pp_modes_leave(modes);
    return status;
}

static void run_range(void *plan, int64_t begin, int64_t end) { pp_decode_run(plan, begin, end); }

pp_status pp_decode(const pp_decode_args *args, int num_threads) {
    pp_decode_args own = *args;
    pp_decode_plan plan;
    pp_measures all;
    own.num_threads = num_threads;
    pp_status status = pp_measure(&own, &all);
    if (status == PP_OK && num_threads > 1 + all.products / PRODUCTS_PER_THREAD) {
        own.num_threads = num_threads = (int)(1 + all.products / PRODUCTS_PER_THREAD);
        status = pp_measure(&own, &all); /* threads decide which sequences are cut into chunks */
    }
    if (status == PP_OK) status = pp_cut(&own, &all);
    if (status != PP_OK) return status;
    void *workspace = pp_workspace_borrow(all.bytes);
    if (!workspace) return PP_NO_MEMORY;
    status = plan_units(&plan, &own, &all, workspace);
    if (status == PP_OK) pp_parallel_for(num_threads, plan.num_units, run_range, &plan);
    pp_workspace_return(workspace);
    return status;
}

pp_status pp_prefill(const pp_decode_args *args, int num_threads) {
    return args->query_start_loc ? pp_decode(args, num_threads) : PP_INVALID_ARGUMENT;
}
