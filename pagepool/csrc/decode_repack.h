/* decode_repack.h: copies the tokens of a tile into the tiled order if the page has another order.
 *
 * Included once per ISA.  There are two cases: plain pages, where K and V are rows, and V stored within K, which is
 * token-minor.  The second case transposes words (transpose_block.h, pack_queries.h).  A word is an element or, in
 * bf16, a square of two dims and two tokens, in which the middle halves are swapped. */

/* DIMS: dims (and tokens) of a word.  Then the bytes of a word, and the words per row of a block that is transposed at
 * once. */
PP_INLINE int word_dims(const int DT) { return DT == PP_BF16 ? 2 : 1; }
PP_INLINE int word_bytes(const int DT) { return DT == PP_BF16 ? 8 : item_bytes(DT); }
PP_INLINE int transposed_side(const int DT) { return DT == PP_BF16 ? (int)PP_PAIRS : 8; }

PP_INLINE void transpose_words(const int DT, unsigned char *to, int64_t to_step, const unsigned char *from,
                               int64_t from_step) {
    if (DT == PP_BF16)
        transpose_squares(to, to_step, from, from_step);
    else if (DT == PP_F16)
        transpose_block_16(to, to_step, from, from_step);
    else
        transpose_block_32(to, to_step, from, from_step);
}

/* Copies a word. In bf16 its middle halves are swapped. */
PP_INLINE void transpose_word(const int DT, unsigned char *to, const unsigned char *from) {
    uint64_t square;
    if (DT != PP_BF16) {
        memcpy(to, from, (size_t)word_bytes(DT));
        return;
    }
    memcpy(&square, from, sizeof square);
    square = PP_TRANSPOSE_SQUARE(square);
    memcpy(to, &square, sizeof square);
}

/* Transposes V of a group of 16 tokens from its K, once for all heads that share it. */
PP_INLINE void transpose_v(const int DT, int v_head_dim, const unsigned char *k, unsigned char *v) {
    const int W = word_bytes(DT), COUNT = PP_GROUP / word_dims(DT); /* words per row of K; rows of words in V */
    const int SIDE = transposed_side(DT);
    for (int d = 0; d < v_head_dim; d += PP_V_RUN) {
        const int left = v_head_dim - d, words = (left < PP_V_RUN ? left : PP_V_RUN) / word_dims(DT);
        int c = 0;
        for (; c + SIDE <= words; c += SIDE)
            for (int t = 0; t < COUNT; t += SIDE)
                transpose_words(DT, v + (t * words + c) * W, words * W, k + (c * COUNT + t) * W, COUNT * W);
        for (; c < words; c++)
            for (int t = 0; t < COUNT; t++)
                transpose_word(DT, v + (t * words + c) * W, k + (c * COUNT + t) * W);
        k += words * COUNT * W;
        v += words * COUNT * W;
    }
}

/* Copies the tile's tokens of one head from plain pages to two groups of a tiled page. */
static __attribute__((noinline)) void pack_tile(const pp_chunk *work, const pp_kv_layout *tiled, int64_t begin,
                                                int32_t head, unsigned char *groups) {
    const pp_kv_layout *plain = &work->pool->layout;
    const int64_t end = work->end - begin;
    for (int t = begin < work->first ? (int)(work->first - begin) : 0, count; t < PP_TILE && t < end; t += count) {
        const int64_t position = begin + t, offset = position % plain->block_size;
        const int64_t block = work->blocks[position / plain->block_size - work->first_block];
        const unsigned char *at = work->layer + block * plain->block_bytes + head * plain->head_bytes;
        const int64_t k_step = plain->head_dim * plain->item_bytes, v_step = plain->v_head_dim * plain->item_bytes;
        const unsigned char *k = at + offset * k_step, *v = plain->v_in_k ? k : at + plain->k_bytes + offset * v_step;
        unsigned char *group = groups + t / PP_GROUP * tiled->head_bytes;
        /* As many tokens as are consecutive in the block, up to the end of the group. */
        const int64_t left = plain->block_size - offset < end - t ? plain->block_size - offset : end - t;
        count = left < PP_GROUP - t % PP_GROUP ? (int)left : PP_GROUP - t % PP_GROUP;
        pp_rows rows = {.to = group,
                        .ahead = group,
                        .dtype = plain->dtype,
                        .from_dtype = plain->dtype,
                        .dims = plain->head_dim,
                        .token = t % PP_GROUP,
                        .count = count,
                        .from = k,
                        .step = k_step};
        write_rows(&rows);
        rows.ahead = rows.to = group + tiled->k_bytes;
        rows.is_v = 1;
        rows.dims = plain->v_head_dim;
        rows.from = v;
        rows.step = plain->v_in_k ? k_step : v_step;
        write_rows(&rows);
    }
}

/* Loads a vector of each of two adjacent rows of `width` elements, as f32. */
PP_INLINE void load_pair(const int DT, const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
#if PP_16_REGISTERS
    *a = even_row(DT, rows + column * column_bytes(DT));
    *b = odd_row(DT, rows + column * column_bytes(DT), width);
#else
    v_load2(DT, rows, width, column, a, b);
#endif
}

/* Converts K of a group of 16 tokens to f32, in the order of an f32 page. */
PP_INLINE void widen_k(const int DT, int head_dim, const unsigned char *k, float *to) {
    for (int d = 0; d < head_dim; d += 2, k += 2 * PP_GROUP * item_bytes(DT), to += 2 * PP_GROUP)
        for (int j = 0; j < PP_GROUP; j += PP_LANES) {
            pp_v a, b;
            load_pair(DT, k, PP_GROUP, j, &a, &b);
            v_store(to + j, a);
            v_store(to + PP_GROUP + j, b);
        }
}

/* The same for V. */
PP_INLINE void widen_v(const int DT, int v_head_dim, const unsigned char *v, float *to) {
    for (int d = 0; d < v_head_dim; d += PP_V_RUN) {
        const int width = v_head_dim - d < PP_V_RUN ? v_head_dim - d : PP_V_RUN;
        for (int t = 0; t < PP_GROUP; t += 2, v += 2 * width * item_bytes(DT), to += 2 * width) {
            int c = 0;
            pp_v a, b;
            for (; c + PP_LANES <= width; c += PP_LANES) {
                load_pair(DT, v, width, c, &a, &b);
                v_store(to + c, a);
                v_store(to + width + c, b);
            }
#if PP_HALF_TAIL
            if (c == width) continue;
            float rest[2][PP_LANES];
            v_load2_half(DT, v, width, c, &a, &b);
            v_store(rest[0], a);
            v_store(rest[1], b);
            memcpy(to + c, rest[0], (size_t)(width - c) * sizeof(float));
            memcpy(to + width + c, rest[1], (size_t)(width - c) * sizeof(float));
#endif
        }
    }
}

PP_FOR_DTYPES(transpose_v, (int v_head_dim, const unsigned char *k, unsigned char *v), v_head_dim, k, v)
PP_FOR_DTYPE(widen_k, f16, PP_F16, (int head_dim, const unsigned char *k, float *to), head_dim, k, to)
PP_FOR_DTYPE(widen_k, bf16, PP_BF16, (int head_dim, const unsigned char *k, float *to), head_dim, k, to)
PP_FOR_DTYPE(widen_v, f16, PP_F16, (int v_head_dim, const unsigned char *v, float *to), v_head_dim, v, to)
PP_FOR_DTYPE(widen_v, bf16, PP_BF16, (int v_head_dim, const unsigned char *v, float *to), v_head_dim, v, to)

/* For each dtype, functions that copy V out of K, and that convert K and V to f32 in the order of a tiled page. */
static const struct {
    void (*transpose_v)(int, const unsigned char *, unsigned char *);
    void (*widen_k)(int, const unsigned char *, float *);
    void (*widen_v)(int, const unsigned char *, float *);
} page_readers[] = {
    [PP_F32] = {transpose_v_f32, NULL, NULL},
    [PP_F16] = {transpose_v_f16, widen_k_f16, widen_v_f16},
    [PP_BF16] = {transpose_v_bf16, widen_k_bf16, widen_v_bf16},
};
