/* plan.c: cuts decode attention into units that any thread may run, and merges what they leave.
 *
 * A unit is one chunk (512 tokens) of one sequence, for all kv heads or, when there are too few chunks for the threads,
 * for a part of them.  Units are numbered sequence by sequence, chunk by chunk, part by part:
 *
 *   unit_begin[s] = the first unit of sequence s;   unit_begin[num_seqs] = num_units
 *   remaining[s * head_parts + part] = chunks of that part which are not done yet; who does the last one merges
 *
 * Lengths and block ids are copied into the workspace as they are checked: what another thread does to the caller's
 * arrays meanwhile cannot lead a unit out of the pool.  Queries are copied into the order in which the kernel reads
 * them.
 *
 * Each chunk of each sequence has a record in the workspace: rows (num_qo_heads, row_stride) and m (num_qo_heads,).  A
 * chunk's record depends on its tokens alone and records are merged in order, so no bit depends on who ran what. */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "pagepool/threads.h"

enum { UNITS_PER_THREAD = 4, ALIGN = 64 };

typedef struct measures {
    int64_t num_chunks, num_blocks; /* of all sequences */
    int64_t record;                 /* elements of one */
    int64_t row_stride;
    int32_t head_parts;
    /* Sizes: remaining; unit_begin and row_begin each; ...; all. */
    size_t counters, begins, lengths, ids, queries, bytes;
} measures;

static size_t aligned(size_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

static int64_t blocks_of(int32_t seq_len, int32_t block_size) {
    return ((int64_t)seq_len + block_size - 1) / block_size;
}

/* The first token that a query at the end of seq_len tokens sees, and the borders in chunks of what it sees. */
static int64_t first_seen(const pp_decode_args *args, int32_t seq_len) {
    return args->window && args->window < seq_len ? seq_len - args->window : 0;
}

static int64_t first_chunk(const pp_decode_args *args, int32_t seq_len) { return first_seen(args, seq_len) / PP_CHUNK; }

static int64_t chunks_of(const pp_decode_args *args, int32_t seq_len) {
    return ((int64_t)seq_len + PP_CHUNK - 1) / PP_CHUNK - first_chunk(args, seq_len);
}

static int64_t first_block(const pp_decode_args *args, int32_t seq_len) {
    return first_seen(args, seq_len) / args->pool->layout.block_size;
}

static pp_status measure(const pp_decode_args *args, measures *all) {
    const pp_kv_layout *layout = &args->pool->layout;
    if (args->layer < 0 || args->layer >= layout->num_layers || args->num_seqs < 0 || args->num_qo_heads < 1 ||
        args->num_qo_heads % layout->num_kv_heads || args->block_tables_width < 0 || args->window < 0)
        return PP_INVALID_ARGUMENT;
    all->num_chunks = all->num_blocks = 0;
    for (int32_t s = 0; s < args->num_seqs; s++) {
        const int32_t seq_len = args->seq_lens[s];
        const int64_t blocks = blocks_of(seq_len, layout->block_size);
        if (seq_len < 0 || blocks > args->block_tables_width) return PP_INVALID_ARGUMENT;
        all->num_chunks += chunks_of(args, seq_len);
        all->num_blocks += blocks - first_block(args, seq_len);
    }
    int64_t wanted = (int64_t)UNITS_PER_THREAD * (args->num_threads < 2 ? 0 : args->num_threads), parts = 1;
    if (all->num_chunks && all->num_chunks < wanted) parts = (wanted + all->num_chunks - 1) / all->num_chunks;
    all->head_parts = parts < layout->num_kv_heads ? (int32_t)parts : layout->num_kv_heads;
    all->row_stride = (layout->v_head_dim + 15) / 16 * 16 + PP_GROUP;
    all->record = ((int64_t)args->num_qo_heads * (all->row_stride + 1) + 15) / 16 * 16;
    all->counters = aligned(sizeof(int32_t) * (size_t)args->num_seqs * (size_t)all->head_parts);
    all->begins = aligned(sizeof(int64_t) * ((size_t)args->num_seqs + 1));
    all->lengths = aligned(sizeof(int32_t) * (size_t)args->num_seqs);
    all->ids = aligned(sizeof(int32_t) * (size_t)all->num_blocks);
    size_t queries, records;
    const size_t row_bytes = (size_t)args->num_qo_heads * (size_t)layout->head_dim * sizeof(float);
    if (__builtin_mul_overflow((size_t)args->num_seqs, row_bytes, &queries))
        return PP_INVALID_ARGUMENT;
    all->queries = aligned(queries);
    const size_t tables = all->counters + 2 * all->begins + all->lengths + all->ids;
    if (__builtin_add_overflow(tables, all->queries, &all->bytes) ||
        __builtin_mul_overflow((size_t)all->num_chunks, (size_t)all->record * sizeof(float), &records) ||
        __builtin_add_overflow(records, all->bytes, &all->bytes))
        return PP_INVALID_ARGUMENT;
    return PP_OK;
}

pp_status pp_decode_workspace(const pp_decode_args *args, size_t *bytes) {
    measures all;
    pp_status status = measure(args, &all);
    if (status == PP_OK) *bytes = all.bytes;
    return status;
}

/* Copies lengths and, within them, ids; the other ids are neither read nor checked.  The lengths must still add up to
 * what was measured. */
static pp_status copy_tables(pp_decode_plan *plan, const pp_decode_args *args, const measures *all) {
    const pp_kv_pool *pool = args->pool;
    int64_t num_chunks = 0, row = 0;
    for (int32_t s = 0; s < args->num_seqs; s++) {
        const int32_t seq_len = plan->seq_lens[s] = __atomic_load_n(&args->seq_lens[s], __ATOMIC_RELAXED);
        if (seq_len < 0) return PP_INVALID_ARGUMENT;
        const int64_t end = blocks_of(seq_len, pool->layout.block_size), begin = first_block(args, seq_len);
        const int64_t blocks = end - begin;
        plan->row_begin[s] = row;
        row += blocks;
        num_chunks += chunks_of(args, seq_len);
        if (end > args->block_tables_width || row > all->num_blocks) return PP_INVALID_ARGUMENT;
        const int32_t *from = args->block_tables + s * args->block_tables_stride + begin;
        int32_t *to = plan->ids + plan->row_begin[s];
        int bad = 0;
        for (int64_t b = 0; b < blocks; b++) {
            to[b] = from[b];
            bad |= to[b] < 0 || to[b] >= pool->num_blocks;
        }
        if (bad) return PP_INVALID_BLOCK;
    }
    return row == all->num_blocks && num_chunks == all->num_chunks ? PP_OK : PP_INVALID_ARGUMENT;
}

pp_status pp_decode_plan_init(pp_decode_plan *plan, const pp_decode_args *args, void *workspace, size_t bytes) {
    measures all;
    pp_status status = measure(args, &all);
    if (status == PP_OK && (bytes < all.bytes || (uintptr_t)workspace % ALIGN)) status = PP_INVALID_ARGUMENT;
    if (status != PP_OK) return status;
    char *at = workspace;
    *plan = (pp_decode_plan){
        .args = *args, .head_parts = all.head_parts, .record = all.record, .row_stride = all.row_stride};
    plan->remaining = (int32_t *)at;
    plan->unit_begin = (int64_t *)(at += all.counters);
    plan->row_begin = (int64_t *)(at += all.begins);
    plan->seq_lens = (int32_t *)(at += all.begins);
    plan->ids = (int32_t *)(at += all.lengths);
    plan->q = (float *)(at += all.ids);
    plan->partial = (float *)(at += all.queries);
    status = copy_tables(plan, args, &all);
    if (status != PP_OK) return status;
    const pp_kv_layout *layout = &args->pool->layout;
    const int64_t row = (int64_t)args->num_qo_heads * layout->head_dim;
    const int64_t out_row = (int64_t)args->num_qo_heads * layout->v_head_dim;
    for (int32_t s = 0; s < args->num_seqs; s++) {
        int64_t chunks = chunks_of(args, plan->seq_lens[s]);
        plan->unit_begin[s] = plan->num_units;
        plan->num_units += chunks * all.head_parts;
        for (int32_t part = 0; part < all.head_parts; part++)
            plan->remaining[(int64_t)s * all.head_parts + part] = (int32_t)chunks;
        if (chunks) {
            pp_kernels_get()->pack_queries(plan->q + s * row, args->q + s * args->q_stride_seq, args->q_stride_head,
                                           layout->num_kv_heads, args->num_qo_heads / layout->num_kv_heads,
                                           layout->head_dim);
            continue;
        }
        memset(args->out + s * out_row, 0, (size_t)out_row * sizeof(float));
        for (int32_t h = 0; args->lse && h < args->num_qo_heads; h++)
            args->lse[(int64_t)s * args->num_qo_heads + h] = -INFINITY;
    }
    plan->unit_begin[args->num_seqs] = plan->num_units;
    return PP_OK;
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

static int32_t head_border(const pp_decode_plan *plan, int32_t part) {
    return (int32_t)((int64_t)plan->args.pool->layout.num_kv_heads * part / plan->head_parts);
}

/* Fills in what the kernel is to do for `unit`, and which sequence and part that is. */
static void chunk_of(const pp_decode_plan *plan, int64_t unit, pp_chunk *work, int32_t *sequence, int32_t *part) {
    const pp_decode_args *args = &plan->args;
    const pp_kv_layout *layout = &args->pool->layout;
    const int32_t s = *sequence = sequence_of(plan, unit);
    const int64_t index = unit - plan->unit_begin[s], place = index / plan->head_parts;
    const int32_t seq_len = plan->seq_lens[s];
    const int64_t chunk = first_chunk(args, seq_len) + place, first = first_seen(args, seq_len);
    *part = (int32_t)(index % plan->head_parts);
    float *record = plan->partial + (plan->unit_begin[s] / plan->head_parts + place) * plan->record;
    const int64_t end = (chunk + 1) * PP_CHUNK;
    *work = (pp_chunk){.pool = args->pool,
                       .layer = args->pool->base + args->layer * layout->layer_bytes,
                       .blocks = plan->ids + plan->row_begin[s],
                       .first_block = first_block(args, seq_len),
                       .begin = chunk * PP_CHUNK,
                       .end = end < seq_len ? end : seq_len,
                       .first = first > chunk * PP_CHUNK ? first : chunk * PP_CHUNK,
                       .last_position = seq_len - 1,
                       .head_begin = head_border(plan, *part),
                       .head_end = head_border(plan, *part + 1),
                       .group_size = args->num_qo_heads / layout->num_kv_heads,
                       .sm_scale = args->sm_scale,
                       .logits_soft_cap = args->logits_soft_cap,
                       .alibi_slopes = args->alibi_slopes,
                       .q = plan->q + (int64_t)s * args->num_qo_heads * layout->head_dim,
                       .rows = record,
                       .m = record + args->num_qo_heads * plan->row_stride,
                       .row_stride = plan->row_stride,
                       .prefetch = pp_prefetch_mode()};
}

static void merge(const pp_decode_plan *plan, int32_t s, const pp_chunk *work) {
    const pp_decode_args *args = &plan->args;
    const int32_t v_head_dim = args->pool->layout.v_head_dim;
    pp_kernels_get()->merge(&(pp_merge){
        .first = plan->partial + plan->unit_begin[s] / plan->head_parts * plan->record,
        .record_stride = plan->record,
        .num_chunks = chunks_of(args, plan->seq_lens[s]),
        .num_qo_heads = args->num_qo_heads,
        .head_begin = work->head_begin * work->group_size,
        .head_end = work->head_end * work->group_size,
        .v_head_dim = v_head_dim,
        .row_stride = plan->row_stride,
        .out = args->out + (int64_t)s * args->num_qo_heads * v_head_dim,
        .sinks = args->sinks,
        .lse = args->lse ? args->lse + (int64_t)s * args->num_qo_heads : NULL,
    });
}

void pp_decode_run(pp_decode_plan *plan, int64_t begin, int64_t end) {
    void (*kernel)(const pp_chunk *) = pp_kernels_get()->chunk[plan->args.pool->layout.dtype];
    pp_chunk work, after;
    int32_t sequence, part, sequence_after, part_after;
    if (begin < end) chunk_of(plan, begin, &after, &sequence_after, &part_after);
    for (int64_t unit = begin; unit < end; unit++) {
        work = after;
        sequence = sequence_after;
        part = part_after;
        if (unit + 1 < end) {
            chunk_of(plan, unit + 1, &after, &sequence_after, &part_after);
            pp_tile_groups(&after, after.first / PP_TILE * PP_TILE, work.next);
            for (int i = 0; i < 2; i++) work.next[i] += after.head_begin * plan->args.pool->layout.head_bytes;
        }
        kernel(&work);
        int32_t *left = &plan->remaining[(int64_t)sequence * plan->head_parts + part];
        if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0) merge(plan, sequence, &work);
    }
}

pp_status pp_merge_states(const pp_merge_args *args) {
    if (args->num_rows < 0 || args->num_parts < 0 || args->head_dim < 0 || args->head_dim > 1 << 24)
        return PP_INVALID_ARGUMENT;
    pp_kernels_get()->merge_rows(args);
    return PP_OK;
}

static void run_range(void *plan, int64_t begin, int64_t end) { pp_decode_run(plan, begin, end); }

pp_status pp_decode(const pp_decode_args *args, int num_threads) {
    pp_decode_args cut = *args;
    pp_decode_plan plan;
    size_t bytes;
    void *workspace;
    cut.num_threads = num_threads;
    pp_status status = pp_decode_workspace(&cut, &bytes);
    if (status != PP_OK) return status;
    if (posix_memalign(&workspace, ALIGN, bytes)) return PP_NO_MEMORY;
    status = pp_decode_plan_init(&plan, &cut, workspace, bytes);
    if (status == PP_OK) pp_parallel_for(num_threads, plan.num_units, run_range, &plan);
    free(workspace);
    return status;
}
