/* run.c: runs the units of a plan, and merges their records.
 *
 * If units need scratch, the workspace has num_threads slots of it.  A range of units holds one slot until it ends, and
 * waits if none is free. */
#include "cascade.h"
#include "float_mode.h"
#include "os/os.h"
#include "unit.h"

/* Returns the sequence of a unit: the last one that is not empty and begins at or before the unit. */
static int32_t sequence_of(const pp_decode_plan *plan, int64_t unit) {
    int32_t low = 0, high = plan->args.num_seqs - 1;
    while (low < high) {
        int32_t middle = low + (high - low + 1) / 2;
        if (plan->unit_begin[middle] <= unit)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Fills in the work of `unit`, its sequence and its slice. */
static void chunk_of(const pp_decode_plan *plan, int64_t unit, pp_chunk *work, int32_t *sequence, int32_t *slice) {
    const int32_t s = *sequence = sequence_of(plan, unit);
    const int64_t index = unit - plan->unit_begin[s];
    *slice = (int32_t)(index % plan->slices);
    pp_fill_chunk(plan, s, own_begin(plan, s) + index / plan->slices, *slice, work);
}

/* Lists the K that a unit with rows of tiled pages reads first: four groups of its first head. */
static void first_read(const pp_decode_plan *plan, const pp_chunk *work, const unsigned char **k) {
    const int32_t parts = parts_of(&plan->args, work->group_size * work->view.num_queries);
    const unsigned char *groups[PP_CHUNK_GROUPS];
    pp_list_groups(work, work->first / PP_TILE * PP_TILE + 2 * PP_TILE, groups);
    for (int i = 0; i < 4; i++) k[i] = groups[i] + work->part_begin / parts * work->pool->layout.head_bytes;
}

/* Takes a slot of scratch for the calling thread.  Waits until one is free. */
static int32_t take_slot(pp_decode_plan *plan) {
    for (;; pp_os_yield())
        for (int32_t i = 0; i < plan->num_slots; i++)
            if (!__atomic_exchange_n(&plan->slot_taken[i], 1, __ATOMIC_ACQUIRE)) return i;
}

static void give_slot_back(pp_decode_plan *plan, int32_t slot) {
    if (slot >= 0) __atomic_store_n(&plan->slot_taken[slot], 0, __ATOMIC_RELEASE);
}

/* Runs unit `index` of a sequence that is cut into blocks. */
static void run_block(const pp_decode_plan *plan, int32_t s, int64_t index, unsigned char *scratch) {
    const pp_decode_args *args = &plan->args;
    const int64_t heads = args->pool->layout.num_kv_heads, block = blocks_of(plan, s) - 1 - index / heads;
    const int64_t row = (int64_t)plan->query_begin[s] * args->num_qo_heads, end = (block + 1) * plan->block_queries;
    pp_query_block work = {
        .queries = pp_queries_from(plan, s, NULL),
        .kv_head = (int32_t)(index % heads),
        .query_begin = (int32_t)(block * plan->block_queries),
        .query_end = (int32_t)(end < queries_of(plan, s) ? end : queries_of(plan, s)),
        .num_qo_heads = args->num_qo_heads,
        .out = (char *)args->out +
               row * args->pool->layout.v_head_dim * pp_dtype_bytes((pp_dtype)args->out_dtype),
        .out_dtype = args->out_dtype,
        .lse = args->lse ? args->lse + row : NULL,
        .sinks = args->sinks,
        .scratch = scratch,
    };
    pp_fill_chunk(plan, s, 0, 0, &work.chunk);
    own_way(args)->prefill(&work);
}

/* Runs a slice of a chunk.  `next` is the chunk that runs after it, or NULL. */
static void run_chunk(pp_decode_plan *plan, pp_chunk *work, int32_t sequence, int32_t slice, const pp_chunk *next) {
    if (next && next->part_begin < next->part_end && next->pool->layout.tiled) first_read(plan, next, work->next);
    if (work->part_begin < work->part_end) own_way(&plan->args)->chunk(work);
    pp_count_chunk(plan, sequence, slice);
}

void pp_decode_run(pp_decode_plan *plan, int64_t begin, int64_t end) {
    pp_chunk work, after;
    int32_t sequence = 0, slice = 0, sequence_after = 0, slice_after = 0, slot = -1;
    int is_known = 0; /* `after` has been filled in for this unit */
    const uint64_t modes = pp_modes_enter();
    if (begin < end && plan->num_slots) slot = take_slot(plan);
    unsigned char *scratch = slot < 0 ? NULL : plan->slots + slot * plan->slot_bytes;
    const int64_t shared_units = (int64_t)plan->num_shared * plan->args.pool->layout.num_kv_heads;
    for (int64_t unit = begin; unit < end; unit++) {
        if (unit < shared_units) {
            pp_run_shared(plan, unit, scratch);
            continue;
        }
        if (!is_known) {
            sequence_after = sequence_of(plan, unit);
            if (blocks_of(plan, sequence_after)) {
                run_block(plan, sequence_after, unit - plan->unit_begin[sequence_after], scratch);
                continue;
            }
            chunk_of(plan, unit, &after, &sequence_after, &slice_after);
        }
        work = after;
        work.scratch = scratch_of(&plan->args) ? scratch : NULL;
        sequence = sequence_after;
        slice = slice_after;
        is_known = unit + 1 < end && !(plan->block_queries && blocks_of(plan, sequence_of(plan, unit + 1)));
        if (is_known) chunk_of(plan, unit + 1, &after, &sequence_after, &slice_after);
        run_chunk(plan, &work, sequence, slice, is_known ? &after : NULL);
    }
    give_slot_back(plan, slot);
    pp_modes_leave(modes);
}
