/* measure.c: see measure.h. */
#include <string.h>

#include "check_decode.h"
#include "measure.h"

enum { UNITS_PER_THREAD = 4 };

/* Minimum size of a unit (about 20 us), unless there would be fewer units than threads.  The data of a new unit has not
 * been prefetched, and adjacent heads are read fastest by one thread. */
enum { PRODUCTS_PER_UNIT = 1 << 20 };

/* Blocks of query tokens have fewer rows than `block_rows` if there are too few blocks for the threads, but about this
 * many. */
enum { LEAST_BLOCK_ROWS = 48 };

/* Records the first block of a sequence in `bits`, which are initially 0.  Returns 0 if no other sequence has this
 * block.  May return 1 in that case also (false positive). */
enum { NOTED_BLOCKS = 1 << 14 };

static int note_first_block(uint32_t *bits, int32_t block) {
    const uint32_t hash = (uint32_t)block * 2654435769u >> 18, mask = 1u << hash % 32;
    const int noted = (bits[hash / 32] & mask) != 0;
    bits[hash / 32] |= mask;
    return noted;
}

static size_t aligned(size_t bytes) {
    return (bytes + PP_WORKSPACE_ALIGN - 1) / PP_WORKSPACE_ALIGN * PP_WORKSPACE_ALIGN;
}

pp_status pp_add_sequence(const pp_decode_args *args, int32_t seq_len, int64_t queries, pp_measures *all) {
    if (seq_len < 0 || queries < 0 || queries > INT32_MAX / args->num_qo_heads) return PP_INVALID_ARGUMENT;
    const int32_t num_queries = (int32_t)queries;
    const int64_t rows = queries * args->num_qo_heads;
    const int64_t fetching = (int64_t)PRODUCTS_PER_FETCH * args->pool->layout.num_kv_heads;
    const int64_t record = record_of(all->row_elements, args->num_qo_heads, num_queries);
    const extent seen = extent_of(args, seq_len, num_queries);
    int64_t records;
    if (seen.end_block > args->block_tables_width) return PP_INVALID_ARGUMENT;
    if (ceil_div(seq_len, args->pool->layout.block_size) > args->block_tables_width) return PP_INVALID_ARGUMENT;
    all->num_queries += num_queries;
    all->num_blocks += seen.end_block - seen.first_block;
    all->products += (double)(seen.end_block - seen.first_block) * args->pool->layout.block_size *
                     (args->pool->layout.head_dim + args->pool->layout.v_head_dim) *
                     (double)(rows > fetching ? rows : fetching);
    if (takes_prefill(args, seq_len, queries)) {
        all->num_prefilled += num_queries;
        return PP_OK;
    }
    all->num_packed += num_queries;
    all->num_chunks += seen.end_chunk - seen.first_chunk;
    if (num_queries > all->most_queries) all->most_queries = num_queries;
    if (__builtin_mul_overflow(seen.end_chunk - seen.first_chunk, record, &records) ||
        __builtin_add_overflow(records, all->num_records, &all->num_records))
        return PP_INVALID_ARGUMENT;
    return PP_OK;
}

static int64_t num_queries_of(const pp_decode_args *args, int32_t s) {
    return args->query_start_loc ? args->query_start_loc[s + 1] - (int64_t)args->query_start_loc[s] : 1;
}

/* The number of units for each thread.  It must be large enough that no thread waits long for the last unit of another
 * one. */
static int64_t units_per_thread(const pp_measures *all, int32_t num_threads) {
    const double units = all->products / PRODUCTS_PER_UNIT / num_threads;
    return units < 2 ? 1 : units < UNITS_PER_THREAD ? (int64_t)units : UNITS_PER_THREAD;
}

/* The id of the first block that a sequence sees.  Its table must have all blocks of its length. */
static int32_t first_id_seen(const pp_decode_args *args, int32_t s, int32_t seq_len, int64_t num_queries) {
    const extent seen = extent_of(args, seq_len, (int32_t)num_queries);
    return __atomic_load_n(&args->block_tables[s * args->block_tables_stride + seen.first_block], __ATOMIC_RELAXED);
}

pp_status pp_measure(const pp_decode_args *args, pp_measures *all) {
    pp_status status = pp_check_decode(args);
    if (status != PP_OK) return status;
    const pp_kv_layout *layout = &args->pool->layout;
    *all = (pp_measures){.row_stride = pp_row_stride(layout)};
    all->row_elements = all->row_stride + 1 + may_differ(args);
    uint32_t bits[NOTED_BLOCKS / 32];
    if (args->num_seqs > 1) memset(bits, 0, sizeof bits);
    for (int32_t s = 0; s < args->num_seqs; s++) {
        const int32_t seq_len = __atomic_load_n(&args->seq_lens[s], __ATOMIC_RELAXED);
        const int64_t num_queries = num_queries_of(args, s);
        status = pp_add_sequence(args, seq_len, num_queries, all);
        if (status != PP_OK) return status;
        if (args->num_seqs > 1 && is_shareable(args, seq_len, num_queries))
            all->may_share |= note_first_block(bits, first_id_seen(args, s, seq_len, num_queries));
    }
    return PP_OK;
}

/* Chooses the number of query tokens per block so that there are at least `wanted` units, if possible. */
static void cut_into_blocks(const pp_decode_args *args, pp_measures *all, int64_t wanted) {
    const pp_kv_layout *layout = &args->pool->layout;
    const int64_t heads = layout->num_kv_heads, group_size = args->num_qo_heads / heads;
    int64_t rows = own_way(args)->block_rows;
    while (rows > LEAST_BLOCK_ROWS && ceil_div(all->num_prefilled * group_size, rows) * heads < wanted) rows /= 2;
    int64_t queries = rows / group_size;
    if (queries > all->num_prefilled) queries = all->num_prefilled;
    all->block_queries = (int32_t)(queries > 1 ? queries : 1);
    const size_t bytes = panel_bytes_of(args, (int32_t)(all->block_queries * group_size));
    if (all->slot < bytes) all->slot = aligned(bytes);
}

/* The maximum number of ranges that run at once.  It is limited by the number of threads and by the maximum number of
 * units. */
static int32_t most_ranges(const pp_decode_args *args, const pp_measures *all) {
    const double heads = args->pool->layout.num_kv_heads;
    double units = (double)all->num_chunks * all->slices;
    if (all->num_prefilled) units += ((double)all->num_prefilled / all->block_queries + args->num_seqs) * heads;
    if (all->may_share) units += (double)all->num_chunks / 2 * heads;
    const double ranges = units < args->num_threads ? units : args->num_threads;
    return ranges > 1 ? (int32_t)ranges : 1;
}

pp_status pp_cut(const pp_decode_args *args, pp_measures *all) {
    const pp_kv_layout *layout = &args->pool->layout;
    const int64_t group_size = args->num_qo_heads / layout->num_kv_heads;
    const int64_t wanted = args->num_threads < 2 ? 0 : args->num_threads * units_per_thread(all, args->num_threads);
    int64_t slices = 1, most = layout->num_kv_heads;
    if (all->num_chunks && all->num_chunks < wanted) slices = ceil_div(wanted, all->num_chunks);
    if (most < args->num_threads && !all->may_share) most *= parts_of(args, (int32_t)(group_size * all->most_queries));
    all->slices = (int32_t)(slices < most ? slices : most);
    if (all->slices < 1) all->slices = 1;
    all->slot = all->num_chunks ? aligned(scratch_of(args)) : 0;
    if (all->num_prefilled) cut_into_blocks(args, all, wanted);
    if (all->may_share) {
        const size_t bytes = panel_bytes_of(args, own_way(args)->panel_rows);
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
