/* plan.c: cuts decode attention into units that any thread may run, and merges what they leave.
 *
 * A unit is one chunk (512 tokens) of one sequence, for all of its rows or, when there are too few chunks for the
 * threads, for a slice of them: some kv heads or, when there are fewer of those than threads, some parts of their rows
 * (kernels.h says what rows and parts are).  Units are numbered sequence by sequence, chunk by chunk, slice by slice:
 *
 *   unit_begin[s] = the first unit of sequence s;   unit_begin[num_seqs] = num_units
 *   remaining[s * slices + slice] = chunks of that slice which are not done yet; who does the last one merges
 *
 * Lengths, query counts and block ids are copied into the workspace as they are checked: what another thread does to
 * the caller's arrays meanwhile cannot lead a unit out of the pool.  Queries are copied into the order in which the
 * kernel reads them, and slopes of ALiBi in base 2.
 *
 * Each chunk of each sequence has a record in the workspace, those of sequence s from record_begin[s] on: for its R =
 * num_qo_heads * (query tokens) rows, rows (R, row_stride), m (R,), seen (R,) unless there is one query token and no
 * mask, and block_sums (R, blocks of a chunk) if scores are asked for.  A chunk's record depends on its tokens alone
 * and records are merged in order, so no bit depends on who ran what.
 *
 * A sequence of many query tokens (takes_prefill) is cut otherwise: a unit is a block of its query tokens for one kv
 * head, over all chunks, and writes results and no records.  Its queries are read where they lie.  Units are numbered
 * from the last block, which sees most, to the first, in a block head by head.
 *
 * Whole chunks that several sequences of the former kind have in common, by their block ids, from the first that is
 * seen on, are units by themselves, before all others: each is a run of sequences and a kv head, and leaves the records
 * that each sequence on its own would.  `order` is sorted by ids, so that what is shared lies side by side, level by
 * level:
 *
 *   shared[i]           sequences order[first, first + count) share `chunk`
 *   shared_chunks[s]    how many of them s has;   common[i] = chunks that order[i] and order[i + 1] have in common
 *   heads_left[i * slices + slice] = kv heads of the slice that are not done yet; who does the last one counts the
 *                       chunk in `remaining` of each of them
 *
 * There is scratch for num_threads ranges, if the units need any: a range takes a piece until it ends, and waits for
 * one when more ranges run. */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check_decode.h"
#include "float_mode.h"
#include "os/os.h"
#include "plan.h"
#include "pagepool/threads.h"
#include "workspace.h"

enum { UNITS_PER_THREAD = 4, ALIGN = 64 };

/* A thread more pays from about 6 us of work on, which is what it may take to wake it. */
enum { PRODUCTS_PER_THREAD = 1 << 18 };

/* Units are not cut smaller than this (about 20 us), but one for each thread: where a unit begins nothing has been
 * prefetched, and heads that lie next to each other are read best by one thread. */
enum { PRODUCTS_PER_UNIT = 1 << 20 };

/* A block of query tokens has about so many rows, fewer when there are too few blocks for the threads: K and V that are
 * widened serve all of them. */
enum { BLOCK_ROWS = 240, LEAST_BLOCK_ROWS = 48 };

typedef struct measures {
    int64_t num_chunks, num_blocks, num_queries; /* of all sequences; chunks of those that are cut into chunks */
    int64_t num_packed, num_prefilled;           /* query tokens of sequences cut into chunks, and of the others */
    int64_t num_records;                         /* elements of all records */
    double products;                             /* what computing takes, or fetching if that takes longer */
    int64_t row_stride, row_elements;            /* of a row in a record: its sums; all that a row has */
    int64_t blocks_per_chunk;                    /* 0 unless scores are asked for */
    int32_t most_queries;                        /* of a sequence */
    int32_t slices;
    int32_t block_queries, num_slots;            /* query tokens of a block; pieces of scratch */
    int32_t may_share;                           /* two sequences may have the same first block */
    /* Sizes: remaining; unit_begin, ids_begin, packed_begin and record_begin each; query_begin; seq_lens; ids; slopes;
     * queries; 8 widened ones; flags of slots; a slot; all slots; all runs that share
     * a chunk; heads left of them; all. */
    size_t counters, begins, starts, lengths, ids, slopes, queries, widened, flags, slot, slots, shared, left, bytes;
} measures;

static size_t aligned(size_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

/* Scratch for two groups of one head, where the kernel has to bring them into order first: K and V of plain pages, V
 * that lies within K, and what the kernels of mixed pages do not read as it lies. */
static size_t scratch_of(const pp_kv_layout *layout) {
    if (pp_is_mixed(layout)) return (size_t)(2 * pp_brought_in_bytes_of(layout));
    const int64_t k_dims = layout->tiled ? 0 : layout->head_dim;
    const int64_t dims = k_dims + (layout->tiled && !layout->v_in_k ? 0 : layout->v_head_dim);
    return (size_t)(2 * PP_GROUP * dims * layout->item_bytes);
}

static int may_differ(const pp_decode_args *args) { return args->query_start_loc || args->custom_mask; }

/* What the query tokens of a sequence see. */
static pp_view view_of(const pp_decode_args *args, int32_t s, int32_t seq_len, int32_t num_queries) {
    pp_view view = {.seq_len = seq_len, .num_queries = num_queries, .window = args->window};
    if (args->custom_mask && args->mask_indptr[s] >= 0) {
        view.mask = args->custom_mask + args->mask_indptr[s];
        view.mask_width = args->mask_widths[s];
        view.mask_first = seq_len - view.mask_width;
    }
    return view;
}

static int64_t record_of(const measures *all, int32_t num_qo_heads, int32_t num_queries) {
    return ((int64_t)num_qo_heads * num_queries * all->row_elements + 15) / 16 * 16;
}

/* Adds a sequence to the totals; the place of its ids and records is what the totals were before. */
static pp_status add_sequence(const pp_decode_args *args, int32_t seq_len, int64_t queries, measures *all) {
    if (seq_len < 0 || queries < 0 || queries > INT32_MAX / args->num_qo_heads) return PP_INVALID_ARGUMENT;
    const int32_t num_queries = (int32_t)queries;
    const int64_t rows = queries * args->num_qo_heads;
    const int64_t fetching = (int64_t)PRODUCTS_PER_FETCH * args->pool->layout.num_kv_heads;
    int64_t records;
    const extent seen = extent_of(args, seq_len, num_queries);
    if (seen.end_block > args->block_tables_width) return PP_INVALID_ARGUMENT;
    if (ceil_div(seq_len, args->pool->layout.block_size) > args->block_tables_width) return PP_INVALID_ARGUMENT;
    all->num_queries += num_queries;
    all->num_blocks += seen.end_block - seen.first_block;
    all->products += (double)(seen.end_block - seen.first_block) * args->pool->layout.block_size *
                     (args->pool->layout.head_dim + args->pool->layout.v_head_dim) *
                     (double)(rows > fetching ? rows : fetching);
    if (takes_prefill(args, queries)) {
        all->num_prefilled += num_queries;
        return PP_OK;
    }
    all->num_packed += num_queries;
    all->num_chunks += seen.end_chunk - seen.first_chunk;
    if (num_queries > all->most_queries) all->most_queries = num_queries;
    if (__builtin_mul_overflow(seen.end_chunk - seen.first_chunk, record_of(all, args->num_qo_heads, num_queries),
                               &records) ||
        __builtin_add_overflow(records, all->num_records, &all->num_records))
        return PP_INVALID_ARGUMENT;
    return PP_OK;
}

static int32_t parts_of(const pp_decode_args *args, int32_t head_rows) {
    const int32_t most = kernels_of(args)->max_rows;
    return head_rows / most + (head_rows % most != 0);
}

static int64_t num_queries_of(const pp_decode_args *args, int32_t s) {
    return args->query_start_loc ? args->query_start_loc[s + 1] - (int64_t)args->query_start_loc[s] : 1;
}

/* How many units there should be for each thread, so that none waits long for another's last one. */
static int64_t units_per_thread(const measures *all, int32_t num_threads) {
    const double units = all->products / PRODUCTS_PER_UNIT / num_threads;
    return units < 2 ? 1 : units < UNITS_PER_THREAD ? (int64_t)units : UNITS_PER_THREAD;
}

/* The id of the first block that is seen of a sequence, whose table is as wide as its length says. */
static int32_t first_id_seen(const pp_decode_args *args, int32_t s, int32_t seq_len, int64_t num_queries) {
    const extent seen = extent_of(args, seq_len, (int32_t)num_queries);
    return __atomic_load_n(&args->block_tables[s * args->block_tables_stride + seen.first_block], __ATOMIC_RELAXED);
}

static pp_status measure(const pp_decode_args *args, measures *all) {
    pp_status status = pp_check_decode(args);
    if (status != PP_OK) return status;
    const pp_kv_layout *layout = &args->pool->layout;
    const int64_t size = layout->block_size;
    *all = (measures){.row_stride = pp_row_stride(layout)};
    if (args->block_scores) all->blocks_per_chunk = PP_CHUNK % size ? PP_CHUNK / size + 2 : PP_CHUNK / size;
    all->row_elements = all->row_stride + 1 + may_differ(args) + all->blocks_per_chunk;
    uint32_t bits[PP_NOTED_BLOCKS / 32];
    if (args->num_seqs > 1) memset(bits, 0, sizeof bits);
    for (int32_t s = 0; s < args->num_seqs; s++) {
        const int32_t seq_len = __atomic_load_n(&args->seq_lens[s], __ATOMIC_RELAXED);
        const int64_t num_queries = num_queries_of(args, s);
        status = add_sequence(args, seq_len, num_queries, all);
        if (status != PP_OK) return status;
        if (args->num_seqs > 1 && is_shareable(args, seq_len, num_queries))
            all->may_share |= pp_note_first_block(bits, first_id_seen(args, s, seq_len, num_queries));
    }
    return PP_OK;
}

/* Chooses blocks of query tokens that make at least `wanted` units, if they can. */
static void cut_into_blocks(const pp_decode_args *args, measures *all, int64_t wanted) {
    const pp_kv_layout *layout = &args->pool->layout;
    const int64_t heads = layout->num_kv_heads, group_size = args->num_qo_heads / heads;
    int64_t rows = BLOCK_ROWS;
    while (rows > LEAST_BLOCK_ROWS && ceil_div(all->num_prefilled * group_size, rows) * heads < wanted) rows /= 2;
    int64_t queries = rows / group_size;
    if (queries > all->num_prefilled) queries = all->num_prefilled;
    all->block_queries = (int32_t)(queries > 1 ? queries : 1);
    const size_t bytes = (size_t)kernels_of(args)->prefill_bytes(layout, args->arithmetic == PP_EXACT,
                                                                (int32_t)(all->block_queries * group_size));
    if (all->slot < bytes) all->slot = aligned(bytes);
}

/* How many ranges may run at a time: no more than there are threads or, at most, units. */
static int32_t most_ranges(const pp_decode_args *args, const measures *all) {
    const double heads = args->pool->layout.num_kv_heads;
    double units = (double)all->num_chunks * all->slices;
    if (all->num_prefilled) units += ((double)all->num_prefilled / all->block_queries + args->num_seqs) * heads;
    if (all->may_share) units += (double)all->num_chunks / 2 * heads;
    const double ranges = units < args->num_threads ? units : args->num_threads;
    return ranges > 1 ? (int32_t)ranges : 1;
}

/* Cuts what was measured into slices for the threads, and says how much memory that takes. */
static pp_status cut(const pp_decode_args *args, measures *all) {
    const pp_kv_layout *layout = &args->pool->layout;
    const int64_t group_size = args->num_qo_heads / layout->num_kv_heads;
    const int64_t wanted = args->num_threads < 2 ? 0 : args->num_threads * units_per_thread(all, args->num_threads);
    int64_t slices = 1, most = layout->num_kv_heads;
    if (all->num_chunks && all->num_chunks < wanted) slices = ceil_div(wanted, all->num_chunks);
    if (most < args->num_threads && !all->may_share) most *= parts_of(args, (int32_t)(group_size * all->most_queries));
    all->slices = (int32_t)(slices < most ? slices : most);
    if (all->slices < 1) all->slices = 1;
    all->slot = all->num_chunks ? aligned(scratch_of(layout)) : 0;
    if (all->num_prefilled) cut_into_blocks(args, all, wanted);
    if (all->may_share) {
        const size_t bytes = (size_t)kernels_of(args)->prefill_bytes(layout, args->arithmetic == PP_EXACT,
                                                                    kernels_of(args)->panel_rows);
        if (all->slot < bytes) all->slot = aligned(bytes);
    }
    if (all->slot) all->num_slots = most_ranges(args, all);
    all->flags = aligned(sizeof(int32_t) * (size_t)all->num_slots);
    const size_t num_seqs = (size_t)args->num_seqs;
    all->counters = aligned(sizeof(int32_t) * num_seqs * (size_t)all->slices);
    all->begins = aligned(sizeof(int64_t) * (num_seqs + 1));
    all->starts = aligned(sizeof(int32_t) * (num_seqs + 1));
    all->lengths = aligned(sizeof(int32_t) * num_seqs);
    all->ids = aligned(sizeof(int32_t) * (size_t)all->num_blocks);
    all->slopes = args->alibi_slopes ? aligned(sizeof(float) * (size_t)args->num_qo_heads) : 0;
    if (all->counters > SIZE_MAX / 4 || all->ids > SIZE_MAX / 4) return PP_INVALID_ARGUMENT; /* their sum fits */
    size_t queries, records;
    const size_t query_bytes = (size_t)args->num_qo_heads * (size_t)layout->head_dim * sizeof(float);
    if (__builtin_mul_overflow((size_t)all->num_packed, query_bytes, &queries)) return PP_INVALID_ARGUMENT;
    all->queries = aligned(queries);
    all->widened = args->q_dtype == PP_F32 ? 0 : aligned(8 * (size_t)layout->head_dim * sizeof(float));
    const size_t tables = all->counters + 4 * all->begins + all->starts + all->lengths + all->ids + all->slopes +
                          all->widened + all->flags + (all->may_share ? 3 * all->lengths : 0);
    const size_t most_shared = all->may_share ? (size_t)all->num_chunks / 2 : 0;
    all->shared = aligned(sizeof(struct pp_shared_run) * most_shared);
    if (__builtin_mul_overflow(sizeof(int32_t) * most_shared, (size_t)all->slices, &all->left) ||
        all->left > SIZE_MAX / 4 || __builtin_mul_overflow((size_t)all->num_slots, all->slot, &all->slots) ||
        __builtin_add_overflow(tables, all->queries, &all->bytes) ||
        __builtin_add_overflow(all->slots, all->bytes, &all->bytes) ||
        __builtin_add_overflow(all->shared + (all->left = aligned(all->left)), all->bytes, &all->bytes) ||
        __builtin_mul_overflow((size_t)all->num_records, sizeof(float), &records) ||
        __builtin_add_overflow(records, all->bytes, &all->bytes))
        return PP_INVALID_ARGUMENT;
    return PP_OK;
}

pp_status pp_decode_workspace(const pp_decode_args *args, size_t *bytes) {
    measures all;
    pp_status status = measure(args, &all);
    if (status == PP_OK) status = cut(args, &all);
    if (status == PP_OK) *bytes = all.bytes;
    return status;
}

/* Copies lengths, query counts and, as far as they are seen, ids; the other ids are neither read nor checked.  It all
 * must still add up to what was measured. */
static pp_status copy_tables(pp_decode_plan *plan, const pp_decode_args *args, const measures *all) {
    const pp_kv_pool *pool = args->pool;
    measures sum = {.row_elements = all->row_elements};
    plan->query_begin[0] = 0;
    for (int32_t s = 0; s < args->num_seqs; s++) {
        const int32_t seq_len = plan->seq_lens[s] = __atomic_load_n(&args->seq_lens[s], __ATOMIC_RELAXED);
        int64_t queries = 1;
        if (args->query_start_loc)
            queries = __atomic_load_n(&args->query_start_loc[s + 1], __ATOMIC_RELAXED) - (int64_t)plan->query_begin[s];
        plan->ids_begin[s] = sum.num_blocks;
        plan->packed_begin[s] = sum.num_packed;
        plan->record_begin[s] = sum.num_records;
        const pp_status status = add_sequence(args, seq_len, queries, &sum);
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

/* The results of a sequence without a token to see: zeros, and the log of nothing. */
static void write_nothing(const pp_decode_plan *plan, int32_t s) {
    const pp_decode_args *args = &plan->args;
    const int64_t first = (int64_t)plan->query_begin[s] * args->num_qo_heads;
    const int64_t rows = (int64_t)queries_of(plan, s) * args->num_qo_heads, dims = args->pool->layout.v_head_dim;
    const int64_t item = pp_dtype_bytes((pp_dtype)args->out_dtype);
    if (!rows) return; /* there may be no array either */
    memset((char *)args->out + first * dims * item, 0, (size_t)(rows * dims * item));
    for (int64_t r = first; args->lse && r < first + rows; r++) args->lse[r] = -INFINITY;
    if (args->block_scores)
        memset(args->block_scores + first * args->block_tables_width, 0,
               (size_t)(rows * args->block_tables_width) * sizeof(float));
}

/* The queries of a sequence as the caller has them. */
static pp_queries queries_from(const pp_decode_plan *plan, int32_t s, float *widened) {
    const pp_decode_args *args = &plan->args;
    const int64_t first = plan->query_begin[s] * args->q_stride_seq;
    return (pp_queries){.q = (const char *)args->q + first * pp_dtype_bytes((pp_dtype)args->q_dtype),
                        .stride_token = args->q_stride_seq,
                        .stride_head = args->q_stride_head,
                        .dtype = args->q_dtype,
                        .widened = widened};
}

/* Lays out the queries of a sequence. */
static void pack(const pp_decode_plan *plan, int32_t s, float *widened) {
    const pp_decode_args *args = &plan->args;
    const pp_kv_layout *layout = &args->pool->layout;
    const pp_queries from = queries_from(plan, s, widened);
    float *to = plan->q + plan->packed_begin[s] * args->num_qo_heads * layout->head_dim;
    kernels_of(args)->pack_queries[way_of(args)](to, &from, layout, args->num_qo_heads / layout->num_kv_heads,
                                                 queries_of(plan, s), args->sm_scale,
                                                 pp_channel_scale(args->pool, args->layer, 0));
}

/* Blocks of query tokens of a sequence that is cut into these, or 0. */
static int64_t blocks_of(const pp_decode_plan *plan, int32_t s) {
    if (!plan->block_queries || !takes_prefill(&plan->args, queries_of(plan, s))) return 0;
    return ceil_div(queries_of(plan, s), plan->block_queries);
}

/* The first chunk of a sequence that it does not share, counted from the first that is seen. */
static int64_t own_begin(const pp_decode_plan *plan, int32_t s) {
    return plan->num_shared ? plan->shared_chunks[s] : 0;
}

/* Plans what was measured and cut, in a workspace of all->bytes. */
static pp_status plan_units(pp_decode_plan *plan, const pp_decode_args *args, const measures *all, void *workspace) {
    pp_status status = pp_check_apart(args, all->num_queries, workspace, all->bytes);
    if (status != PP_OK) return status;
    char *at = workspace;
    *plan = (pp_decode_plan){.args = *args,
                             .slices = all->slices,
                             .block_queries = all->block_queries,
                             .num_slots = all->num_slots,
                             .slot_bytes = (int64_t)all->slot,
                             .row_stride = all->row_stride,
                             .row_elements = all->row_elements,
                             .blocks_per_chunk = all->blocks_per_chunk};
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
    measures all;
    pp_decode_plan made;
    pp_status status = measure(args, &all);
    if (status == PP_OK) status = cut(args, &all);
    if (status == PP_OK && (bytes < all.bytes || (uintptr_t)workspace % ALIGN)) status = PP_INVALID_ARGUMENT;
    if (status == PP_OK) status = plan_units(&made, args, &all, workspace);
    if (status == PP_OK) *plan = made;
    return status;
}

/* The sequence that unit belongs to: the last one that begins at or before it and is not empty. */
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

/* Where a slice of a sequence begins, in parts: at a kv head while there are enough of those. */
static int32_t slice_border(const pp_decode_plan *plan, int32_t parts, int32_t slice) {
    const int64_t heads = plan->args.pool->layout.num_kv_heads;
    if (plan->slices <= heads) return (int32_t)(heads * slice / plan->slices * parts);
    return (int32_t)(heads * parts * slice / plan->slices);
}

/* Fills in what the kernel is to do for chunk `place` of sequence s, counted from the first that is seen. */
static void fill_chunk(const pp_decode_plan *plan, int32_t s, int64_t place, int32_t slice, pp_chunk *work) {
    const pp_decode_args *args = &plan->args;
    const pp_kv_layout *layout = &args->pool->layout;
    const int32_t seq_len = plan->seq_lens[s], num_queries = queries_of(plan, s);
    const int32_t group_size = args->num_qo_heads / layout->num_kv_heads;
    const int32_t parts = parts_of(args, group_size * num_queries);
    const int64_t num_rows = (int64_t)num_queries * args->num_qo_heads;
    const pp_view view = view_of(args, s, seq_len, num_queries);
    const extent seen = extent_of(args, seq_len, num_queries);
    const int64_t begin = (seen.first_chunk + place) * PP_CHUNK, first = pp_first_seen(&view, 0);
    float *record = plan->partial + plan->record_begin[s] + place * ((num_rows * plan->row_elements + 15) / 16 * 16);
    float *m = record + num_rows * plan->row_stride, *after_m = m + num_rows;
    *work = (pp_chunk){.pool = args->pool,
                       .layer = args->pool->base + args->layer * layout->layer_bytes,
                       .blocks = plan->ids + plan->ids_begin[s],
                       .first_block = seen.first_block,
                       .begin = begin,
                       .end = begin + PP_CHUNK < seq_len ? begin + PP_CHUNK : seq_len,
                       .first = first > begin ? first : begin,
                       .view = view,
                       .part_begin = slice_border(plan, parts, slice),
                       .part_end = slice_border(plan, parts, slice + 1),
                       .group_size = group_size,
                       .sm_scale = args->sm_scale,
                       .logits_soft_cap = args->logits_soft_cap,
                       .alibi_slopes = args->alibi_slopes,
                       .k_channel_scale = pp_channel_scale(args->pool, args->layer, 0),
                       .q = plan->q + plan->packed_begin[s] * args->num_qo_heads * layout->head_dim,
                       .rows = record,
                       .m = m,
                       .seen = num_queries > 1 || view.mask ? after_m : NULL,
                       .block_sums = plan->blocks_per_chunk ? after_m + (may_differ(args) ? num_rows : 0) : NULL,
                       .num_blocks = plan->blocks_per_chunk,
                       .row_stride = plan->row_stride,
                       .prefetch = pp_prefetch_mode()};
}

/* The same for `unit`; also which sequence and slice that is. */
static void chunk_of(const pp_decode_plan *plan, int64_t unit, pp_chunk *work, int32_t *sequence, int32_t *slice) {
    const int32_t s = *sequence = sequence_of(plan, unit);
    const int64_t index = unit - plan->unit_begin[s];
    *slice = (int32_t)(index % plan->slices);
    fill_chunk(plan, s, own_begin(plan, s) + index / plan->slices, *slice, work);
}

static void merge(const pp_decode_plan *plan, int32_t s, int32_t slice) {
    const pp_decode_args *args = &plan->args;
    const int32_t v_head_dim = args->pool->layout.v_head_dim, num_queries = queries_of(plan, s);
    const extent seen = extent_of(args, plan->seq_lens[s], num_queries);
    const int64_t row = (int64_t)plan->query_begin[s] * args->num_qo_heads, width = args->block_tables_width;
    const int64_t num_rows = (int64_t)num_queries * args->num_qo_heads;
    pp_chunk chunk;
    fill_chunk(plan, s, 0, slice, &chunk);
    kernels_of(args)->merge(&(pp_merge){
        .chunk = &chunk,
        .record_stride = (num_rows * plan->row_elements + 15) / 16 * 16,
        .num_chunks = seen.end_chunk - seen.first_chunk,
        .num_qo_heads = args->num_qo_heads,
        .v_head_dim = v_head_dim,
        .out = (char *)args->out + row * v_head_dim * pp_dtype_bytes((pp_dtype)args->out_dtype),
        .out_dtype = args->out_dtype,
        .lse = args->lse ? args->lse + row : NULL,
        .block_scores = args->block_scores ? args->block_scores + row * width : NULL,
        .width = width,
        .sinks = args->sinks,
    });
}

/* What a unit with rows reads first, of tiled pages: the K of its first head in four groups. */
static void first_read(const pp_decode_plan *plan, const pp_chunk *work, const unsigned char **k) {
    const int32_t parts = parts_of(&plan->args, work->group_size * work->view.num_queries);
    const unsigned char *groups[PP_CHUNK_GROUPS];
    pp_list_groups(work, work->first / PP_TILE * PP_TILE + 2 * PP_TILE, groups);
    for (int i = 0; i < 4; i++) k[i] = groups[i] + work->part_begin / parts * work->pool->layout.head_bytes;
}

/* Counts a chunk of a slice as done, and merges when it was the last one. */
static void count_chunk(pp_decode_plan *plan, int32_t s, int32_t slice) {
    int32_t *left = &plan->remaining[(int64_t)s * plan->slices + slice];
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0) merge(plan, s, slice);
}

/* Where the list of a shared chunk's rows is: at row `row` of the kv head in sequence order[at], whose chunk is
 * `work`. */
typedef struct row_list {
    const pp_decode_plan *plan;
    const struct pp_shared_run *run;
    int32_t kv_head, at, row;
    pp_chunk work;
    pp_view views[2 * PP_GROUP]; /* of the sequences that the panel at hand has rows of */
} row_list;

static int next_rows(void *context, pp_row *rows) {
    row_list *list = context;
    const pp_decode_plan *plan = list->plan;
    const pp_decode_args *args = &plan->args;
    const int32_t most = kernels_of(args)->panel_rows, group_size = list->work.group_size;
    int num_rows = 0, num_views = 0;
    while (list->at < list->run->count) {
        const int32_t s = plan->order[list->run->first + list->at], head_rows = group_size * queries_of(plan, s);
        const pp_queries queries = queries_from(plan, s, NULL);
        if (list->row == 0) fill_chunk(plan, s, list->run->chunk, 0, &list->work);
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

/* Runs a unit of a chunk that sequences share. */
static void run_shared(pp_decode_plan *plan, int64_t unit, unsigned char *scratch) {
    const pp_decode_args *args = &plan->args;
    const int32_t heads = args->pool->layout.num_kv_heads, head = (int32_t)(unit % heads);
    const struct pp_shared_run *run = &plan->shared[unit / heads];
    row_list list = {.plan = plan, .run = run, .kv_head = head};
    pp_shared work = {.kv_head = head,
                      .q_dtype = args->q_dtype,
                      .next_rows = next_rows,
                      .context = &list,
                      .scratch = scratch};
    fill_chunk(plan, plan->order[run->first], run->chunk, 0, &work.chunk);
    /* With a window each row sees of the first chunk what its view says; all begin in the same block. */
    const int64_t first = work.chunk.first_block * args->pool->layout.block_size;
    work.chunk.first = first > work.chunk.begin ? first : work.chunk.begin;
    list.work.group_size = work.chunk.group_size;
    kernels_of(args)->shared[way_of(args)](&work);
    int32_t slice = 0;
    while ((int64_t)heads * (slice + 1) / plan->slices <= head) slice++;
    int32_t *left = &plan->heads_left[unit / heads * plan->slices + slice];
    if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0)
        for (int32_t i = 0; i < run->count; i++) count_chunk(plan, plan->order[run->first + i], slice);
}

/* A piece of scratch that nobody else uses, until it is given back. */
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
        .queries = queries_from(plan, s, NULL),
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
    fill_chunk(plan, s, 0, 0, &work.chunk);
    kernels_of(args)->prefill[way_of(args)](&work);
}

/* The same for a chunk: `next` is the one that runs after it, or NULL. */
static void run_chunk(pp_decode_plan *plan, pp_chunk *work, int32_t sequence, int32_t slice, const pp_chunk *next) {
    const pp_kernels *kernels = kernels_of(&plan->args);
    const int way = way_of(&plan->args);
    void (*const chunk)(const pp_chunk *) = way == PP_WAY_EXACT  ? kernels->chunk[plan->args.pool->layout.dtype]
                                            : way == PP_WAY_BF16 ? kernels->chunk_dot
                                                                 : kernels->chunk_mixed;
    if (next && next->part_begin < next->part_end && next->pool->layout.tiled) first_read(plan, next, work->next);
    if (work->part_begin < work->part_end) chunk(work);
    count_chunk(plan, sequence, slice);
}

void pp_decode_run(pp_decode_plan *plan, int64_t begin, int64_t end) {
    pp_chunk work, after;
    int32_t sequence = 0, slice = 0, sequence_after = 0, slice_after = 0, slot = -1;
    int is_known = 0; /* `after` is the unit at hand */
    const uint64_t modes = pp_modes_enter();
    if (begin < end && plan->num_slots) slot = take_slot(plan);
    unsigned char *scratch = slot < 0 ? NULL : plan->slots + slot * plan->slot_bytes;
    const int64_t shared_units = (int64_t)plan->num_shared * plan->args.pool->layout.num_kv_heads;
    for (int64_t unit = begin; unit < end; unit++) {
        if (unit < shared_units) {
            run_shared(plan, unit, scratch);
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
        work.scratch = scratch_of(&work.pool->layout) ? scratch : NULL;
        sequence = sequence_after;
        slice = slice_after;
        is_known = unit + 1 < end && !(plan->block_queries && blocks_of(plan, sequence_of(plan, unit + 1)));
        if (is_known) chunk_of(plan, unit + 1, &after, &sequence_after, &slice_after);
        run_chunk(plan, &work, sequence, slice, is_known ? &after : NULL);
    }
    give_slot_back(plan, slot);
    pp_modes_leave(modes);
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
    measures all;
    pp_status status = measure(&own, &all);
    if (status != PP_OK) return status;
    if (num_threads > 1 + all.products / PRODUCTS_PER_THREAD)
        num_threads = (int)(1 + all.products / PRODUCTS_PER_THREAD);
    own.num_threads = num_threads;
    status = cut(&own, &all);
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
