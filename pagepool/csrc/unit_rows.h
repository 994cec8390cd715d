/* unit_rows.h: the rows of a unit of prefill while its chunks are merged.  Once per ISA, after softmax_math.h. */

/* The result of a row over the chunks so far: `m`, `total` and a row of weighted sums. */
typedef struct pp_running {
    float m, total;
    int some; /* a chunk had a token that this row sees */
} pp_running;

/* Returns the next piece of `memory`, or NULL if `memory` is NULL. */
static void *carve(unsigned char *memory, int64_t *at, int64_t bytes) {
    void *piece = memory ? memory + *at : NULL;
    *at += (bytes + 63) / 64 * 64;
    return piece;
}

/* Writes the results of the unit's rows. */
static void write_rows_of_unit(const pp_query_block *work, const pp_running *running, float *rows, int64_t row_stride) {
    const pp_chunk *chunk = &work->chunk;
    const int64_t dims = chunk->pool->layout.v_head_dim, width = row_stride - PP_GROUP;
    for (int32_t r = 0, query = work->query_begin; query < work->query_end; query++)
        for (int32_t h = 0; h < chunk->group_size; h++, r++) {
            const int64_t head = (int64_t)work->kv_head * chunk->group_size + h;
            const int64_t at = query * work->num_qo_heads + head;
            float *row = rows + r * row_stride;
            merged_row merged = {.total = v_set1(running[r].total),
                                 .m = running[r].m,
                                 .empty = !running[r].some,
                                 .sum = row};
            if (work->sinks && !merged.empty) merge_sink(&merged, row, work->sinks[head], width);
            write_result(&merged, work->out, work->out_dtype, at * dims, dims);
            if (work->lse) work->lse[at] = merged.empty ? -INFINITY : pp_lse(merged.m, v_first(merged.total));
        }
}
