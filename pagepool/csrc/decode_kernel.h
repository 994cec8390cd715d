/* decode_kernel.h: one chunk of decode attention.
 *
 * Included once per ISA.  DT is a constant: the dtype of the pages, or PP_QUANTISED.  The loop visits each tile of 32
 * tokens (two groups of 16, in two pages or one) and each kv head, with up to PP_MAX_HEADS query heads at once:
 *
 *   scores   32 tokens in parallel, dims one after another; each K load serves all heads
 *   softmax  running shift, rescale, powers of 2
 *   values   64 dims in parallel, tokens one after another; each V load serves all heads
 *
 * The order of every sum depends only on absolute token positions; pagepool/reference/canonical.py specifies it.  The
 * number of heads that share a load and the number of vectors in flight do not change any bit. */

/* Selects the function for DT, which may be PP_QUANTISED. */
#define PP_BY_PAGES(DT, name) ((DT) == PP_QUANTISED ? name##_quantised : PP_BY_DTYPE(DT, name))

/* Runs one part of a kv head's rows: rows that see the same tokens of the tile.  They begin at row `from` of the head,
 * which is row `row` of all rows. */
PP_INLINE void run_part(const int DT, const pp_chunk *work, pp_tile *tile, int32_t from, int32_t to, int32_t row,
                        int mode) {
    const int32_t q_step = PP_PAIR_FLOATS * (to - from);
    const float *q = work->q + (int64_t)row * (tile->head_dim / 2 * PP_PAIR_FLOATS);
#if PP_STEPS
    if (DT != PP_QUANTISED && tile->step) {
        tile->row = from;
        for (int32_t i = row; work->seen && i < row + to - from; i++) work->seen[i] = 1.0f;
        float *rows = work->rows + row * work->row_stride, *m = work->m + row;
        if (mode)
            PP_BY_DTYPE(DT, two_tiles)(to - from, tile, q, rows, m);
        else
            PP_BY_DTYPE(DT, two_tiles_unprefetched)(to - from, tile, q, rows, m);
        return;
    }
#endif
    for (int32_t r = from, end; r < to; r = end) {
        const int32_t at = row + r - from;
        end = rows_alike(work, tile, r, to, at);
        if (!tile->seen) continue;
        tile->row = r;
        PP_BY_PAGES(DT, one_tile)(end - r, tile, q + PP_PAIR_FLOATS * (r - from), q_step,
                                  work->rows + at * work->row_stride, work->m + at, mode);
        mode = PP_PREFETCH_NONE;
    }
}

/* The loop over a chunk.  If the kernels cannot read the pages directly, `tiled` is the layout of the copy in scratch:
 * the groups of one tile of one head. */
PP_INLINE void walk(const int DT, const pp_chunk *work, const pp_kv_layout *tiled) {
    unsigned char *const scratch = work->scratch;
    const pp_kv_layout *layout = &work->pool->layout;
    const int32_t head_rows = work->group_size * work->view.num_queries, parts = pp_num_parts(head_rows, PP_MAX_HEADS);
    pp_tile tile = {.head_dim = layout->head_dim,
                    .v_head_dim = layout->v_head_dim,
                    .k_dtype = layout->dtype,
                    .v_dtype = layout->v_dtype,
                    .scale = pp_in_base_2(work->sm_scale),
                    .cap = pp_in_base_2(work->logits_soft_cap),
                    .group_size = work->group_size,
                    .row_stride = work->row_stride};
    if (tile.cap != 0.0f) tile.inverse_cap = 1.0f / tile.cap;
    const int32_t first = work->row_begin, last = work->row_end;
    const int32_t head_begin = work->part_begin / parts;
    for (int32_t h = first; h < last; h++) work->m[h] = -FLT_MAX; /* not -inf: -inf - (-inf) is NaN */
    memset(work->rows + first * work->row_stride, 0, (size_t)((last - first) * work->row_stride) * sizeof(float));
    if (work->seen) memset(work->seen + first, 0, (size_t)(last - first) * sizeof(float));
    const int64_t run_bytes = ((work->part_end + parts - 1) / parts - head_begin) * layout->head_bytes;
    const int mode = layout->tiled ? PP_PREFETCH_TWICE : PP_PREFETCH_NONE;
    const int opens = mode && !PP_WIDE;
    const int in_steps = PP_STEPS && DT != PP_QUANTISED && mode;
    const int steps = in_steps && !scratch && layout->v_head_dim % PP_V_RUN == 0;
    const int64_t first_tile = work->first / PP_TILE * PP_TILE, head_bytes = layout->head_bytes;
    const int64_t first_head = head_begin * head_bytes;
    const int num_groups = (int)((work->end - first_tile + PP_GROUP - 1) / PP_GROUP);
    const unsigned char *list[PP_CHUNK_GROUPS], *const *groups = list, *const *next;
    if (layout->tiled)
        pp_list_groups(work, work->end, list);
    else /* tiles are packed first */
        for (int i = 0; i < PP_CHUNK_GROUPS; i++) list[i] = work->layer;
    const unsigned char **behind = list + (num_groups + 1) / 2 * 2;
    for (int i = 0; i < 4 && work->next[i]; i++) behind[i] = at_distance(work->next[i], -first_head);
    const int64_t all_see = pp_first_seen(&work->view, work->view.num_queries - 1);
    const int64_t until = pp_until_all_see(&work->view);
    int opened = 0; /* pages of the groups before this one have been opened */
    for (int64_t begin = first_tile, after; begin < work->end; begin = after, groups = next) {
        after = begin + 2 * PP_TILE;
        tile.step = steps && begin >= work->first && after <= work->end && begin >= all_see && after <= until;
        if (!tile.step) after = begin + PP_TILE;
        tile.begin = begin;
        tile.seen = pp_bits_between(work->first - begin, work->end - begin);
        tile.distance = begin - pp_position(&work->view, 0);
        next = groups + (after - begin) / PP_GROUP;
        while (opens && opened < num_groups && list + opened < next + 2 * PP_TILE / PP_GROUP)
            opened = open_pages(work, list, opened, num_groups, first_head, run_bytes);
        for (int32_t index = work->part_begin, head = head_begin, end; index < work->part_end; index = end, head++) {
            const int32_t head_end = (head + 1) * parts;
            end = head_end < work->part_end ? head_end : work->part_end;
            const int more_heads = end < work->part_end;
            const int64_t at = head * head_bytes, next_at = more_heads ? at + head_bytes : first_head;
            const unsigned char *const *then = more_heads ? groups : next;
            if (DT != PP_QUANTISED && !layout->tiled) pack_tile(work, tiled, begin, head, scratch);
            for (int i = 0; i < 4; i++) {
                tile.k[i] = groups[i] + at;
                tile.v[i] = tile.k[i] + layout->k_bytes;
                tile.next_k[i] = then[i] + next_at;
                tile.next_v[i] = scratch && DT != PP_QUANTISED ? NULL : tile.next_k[i] + layout->k_bytes;
            }
            for (int i = 0; i < 2 && scratch; i++) {
                unsigned char *group = scratch + i * tiled->head_bytes;
                if (DT == PP_QUANTISED) {
                    tile.k[i] = bring_in(layout->dtype, 0, layout->head_dim, tile.k[i], group);
                    tile.v[i] = bring_in(layout->v_dtype, 1, layout->v_head_dim, tile.v[i], group + tiled->k_bytes);
                    if (mode) prefetch_into_l2(tile.next_k[i], (int)layout->head_bytes);
                    continue;
                }
                tile.v[i] = group + tiled->k_bytes;
                if (layout->tiled)
                    PP_BY_DTYPE(DT, transpose_v)(layout->v_head_dim, tile.k[i], group + tiled->k_bytes);
                else
                    tile.k[i] = group;
            }
            tile.alibi_slopes = work->alibi_slopes ? work->alibi_slopes + head * work->group_size : NULL;
            int32_t to = pp_part_border(head_rows, PP_MAX_HEADS, index - head * parts);
            for (int32_t part = index, from; part < end; part++) {
                from = to;
                to = pp_part_border(head_rows, PP_MAX_HEADS, part + 1 - head * parts);
                run_part(DT, work, &tile, from, to, head * head_rows + from,
                         part_mode(DT, mode, part - index, end - index, &tile));
            }
        }
    }
    for (int32_t h = first; h < last; h++) {
        float *sums = work->rows + (h + 1) * work->row_stride - PP_GROUP;
        *sums = total_of(sums);
    }
}

PP_FOR_DTYPES(walk, (const pp_chunk *work, const pp_kv_layout *tiled), work, tiled)
PP_FOR_DTYPE(walk, quantised, PP_QUANTISED, (const pp_chunk *work, const pp_kv_layout *tiled), work, tiled)

PP_INLINE void chunk(const int DT, const pp_chunk *work) {
    const pp_kv_layout *layout = &work->pool->layout;
    pp_kv_layout tiled = *layout;
    if (DT == PP_QUANTISED) {
        tiled.k_bytes = pp_brought_in_bytes(layout->dtype, layout->head_dim);
        tiled.head_bytes = pp_brought_in_bytes_of(layout);
    } else if (work->scratch) {
        pp_kv_layout_init_v(&tiled, 1, 1, layout->head_dim, layout->v_head_dim, 0, PP_GROUP, (pp_dtype)layout->dtype);
        if (layout->tiled) { /* K is read in place */
            tiled.k_bytes = 0;
            tiled.head_bytes = tiled.v_bytes;
        }
        /* Lanes after the end of the sequence are loaded, but their results are not used. */
        memset(work->scratch, 0, 2 * (size_t)tiled.head_bytes);
    }
    PP_BY_PAGES(DT, walk)(work, &tiled);
}

static void chunk_exact(const pp_chunk *work) {
    switch (work->pool->layout.dtype) {
    case PP_F32: chunk(PP_F32, work); break;
    case PP_F16: chunk(PP_F16, work); break;
    default: chunk(PP_BF16, work); break;
    }
}
static void chunk_quantised(const pp_chunk *work) { chunk(PP_QUANTISED, work); }
