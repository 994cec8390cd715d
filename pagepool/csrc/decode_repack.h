/* decode_repack.h: brings the tokens of a tile into the order in which the walk reads them, where they lie in another.
 *
 * Included once per dtype from decode_kernel.h.  Two cases: plain pages, whose K and V are rows; and V within K, which
 * lies token-minor.  The latter is a transposition of words (transpose_block.h, pack_queries.h); a word is an element
 * or, in bf16, a square of two dims and two tokens, whose middle halves change places.  PP_SQUARE_BITS says how large
 * it is. / */

#define PP_WORD PP_CAT(uint, PP_SQUARE_BITS, _t)
enum { PP_NAME(WORD_DIMS) = PP_SQUARE_BITS == 64 ? 2 : 1 };
#if PP_SQUARE_BITS == 64
#define PP_TRANSPOSE transpose_squares
#else
#define PP_TRANSPOSE PP_CAT(transpose_block_, PP_SQUARE_BITS, )
#endif

/* V of a group of 16 tokens out of its K: once for all heads that share it. */
static __attribute__((noinline)) void PP_NAME(transpose_v)(int v_head_dim, const unsigned char *k, unsigned char *v) {
    enum { W = sizeof(PP_WORD), COUNT = PP_GROUP / PP_NAME(WORD_DIMS) }; /* words in a row of K: rows of words in V */
    for (int d = 0; d < v_head_dim; d += PP_V_RUN) {
        enum { SIDE = PP_NAME(WORD_DIMS) == 2 ? (int)PP_PAIRS : 8 }; /* of what is transposed at once */
        const int left = v_head_dim - d, words = (left < PP_V_RUN ? left : PP_V_RUN) / PP_NAME(WORD_DIMS);
        int c = 0;
        for (; c + SIDE <= words; c += SIDE)
            for (int t = 0; t < COUNT; t += SIDE)
                PP_TRANSPOSE(v + (t * words + c) * W, words * W, k + (c * COUNT + t) * W, COUNT * W);
        for (; c < words; c++)
            for (int t = 0; t < COUNT; t++) {
                PP_WORD word;
                memcpy(&word, k + (c * COUNT + t) * W, W);
                if (PP_NAME(WORD_DIMS) == 2) word = (PP_WORD)PP_TRANSPOSE_SQUARE((uint64_t)word);
                memcpy(v + (t * words + c) * W, &word, W);
            }
        k += words * COUNT * W;
        v += words * COUNT * W;
    }
}

/* One head of the tile's tokens in plain pages, as two groups of a tiled page. */
static __attribute__((noinline)) void PP_NAME(pack)(const pp_chunk *work, const pp_kv_layout *tiled, int64_t begin,
                                                    int32_t head, unsigned char *groups) {
    const pp_kv_layout *plain = &work->pool->layout;
    const int64_t end = work->end - begin;
    for (int t = begin < work->first ? (int)(work->first - begin) : 0, count; t < PP_TILE && t < end; t += count) {
        const int64_t position = begin + t, offset = position % plain->block_size;
        const int64_t block = work->blocks[position / plain->block_size - work->first_block];
        const unsigned char *at = work->layer + block * plain->block_bytes + head * plain->head_bytes;
        const int64_t k_step = plain->head_dim * PP_ITEM, v_step = plain->v_head_dim * PP_ITEM;
        const unsigned char *k = at + offset * k_step, *v = plain->v_in_k ? k : at + plain->k_bytes + offset * v_step;
        unsigned char *group = groups + t / PP_GROUP * tiled->head_bytes;
        /* As many as lie behind each other in the block, up to the end of the group. */
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

#if PP_ITEM == 2
/* A pair of neighbouring rows, `width` elements wide, as f32: a vector of each. */
PP_INLINE void PP_NAME(load_pair)(const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
#if PP_16_REGISTERS
    *a = EVEN_ROW(rows + column * PP_COLUMN);
    *b = ODD_ROW(rows + column * PP_COLUMN, width);
#else
    LOAD2(rows, width, column, a, b);
#endif
}

/* K of a group of 16 tokens in f32, in the order of a page of f32. */
static __attribute__((noinline)) void PP_NAME(widen_k)(int head_dim, const unsigned char *k, float *to) {
    for (int d = 0; d < head_dim; d += 2, k += 2 * PP_GROUP * PP_ITEM, to += 2 * PP_GROUP)
        for (int j = 0; j < PP_GROUP; j += PP_LANES) {
            pp_v a, b;
            PP_NAME(load_pair)(k, PP_GROUP, j, &a, &b);
            v_store(to + j, a);
            v_store(to + PP_GROUP + j, b);
        }
}

/* The same of V. */
static __attribute__((noinline)) void PP_NAME(widen_v)(int v_head_dim, const unsigned char *v, float *to) {
    for (int d = 0; d < v_head_dim; d += PP_V_RUN) {
        const int width = v_head_dim - d < PP_V_RUN ? v_head_dim - d : PP_V_RUN;
        for (int t = 0; t < PP_GROUP; t += 2, v += 2 * width * PP_ITEM, to += 2 * width) {
            int c = 0;
            pp_v a, b;
            for (; c + PP_LANES <= width; c += PP_LANES) {
                PP_NAME(load_pair)(v, width, c, &a, &b);
                v_store(to + c, a);
                v_store(to + width + c, b);
            }
#if PP_HALF_TAIL
            if (c == width) continue;
            float rest[2][PP_LANES];
            LOAD2_HALF(v, width, c, &a, &b);
            v_store(rest[0], a);
            v_store(rest[1], b);
            memcpy(to + c, rest[0], (size_t)(width - c) * sizeof(float));
            memcpy(to + width + c, rest[1], (size_t)(width - c) * sizeof(float));
#endif
        }
    }
}
#endif

#undef PP_WORD
#undef PP_TRANSPOSE
#undef PP_SQUARE_BITS
