/* append_kernel.h: rows of K and V into tiled pages, in an instruction set's vocabulary.  Included once per ISA.
 *
 * In a group K lies token-minor, a row of 16 words for each dim (bf16: pair of dims), and V in rows of 64 dims, in bf16
 * two tokens woven together.  Eight tokens at a time are turned, so that lines are written in halves; what is left goes
 * word by word.  One token alone (a decode step) finds each word of its K in a cache line of its own: what is written
 * next is prefetched meanwhile, as it is for whole groups, and so is what is read next: into L2, whose queue is longer
 * than that of L1 (Zen 4: cold 1.2 to 1.6 times as fast as into L1 or without).  Nothing but the tokens' own bytes is
 * ever written: their neighbours may be another thread's. */

/* `words` words of one token into its column, the rows of which are `row_bytes` long. */
PP_INLINE void write_column(const int W, unsigned char *to, const unsigned char *from, int words,
                            const unsigned char *ahead) {
    const int row_bytes = PP_GROUP * W;
    for (int i = 0; i < words; i++) {
        memcpy(to + i * row_bytes, from + i * W, (size_t)W);
        if (i * row_bytes % 64 == 0) prefetch_into_l2(ahead + i * row_bytes, 64);
    }
}

/* K of `count` tokens into their columns. */
PP_INLINE void write_columns(const int W, const pp_rows *work, unsigned char *to, const unsigned char *from,
                             int64_t step, int words, const unsigned char *ahead) {
    int t = 0;
    for (to += work->token * W; t + 8 <= work->count; t += 8, to += 8 * W, from += 8 * step) {
        int i = 0;
        for (; i + 8 <= words; i += 8)
            if (W == 2)
                transpose_block_16(to + i * PP_GROUP * W, PP_GROUP * W, from + i * W, step);
            else
                transpose_block_32(to + i * PP_GROUP * W, PP_GROUP * W, from + i * W, step);
        for (int j = 0; j < 8; j++)
            write_column(W, to + (i * PP_GROUP + j) * W, from + j * step + i * W, words - i, ahead);
    }
    for (; t < work->count; t++, to += W, from += step) write_column(W, to, from, words, ahead);
}

/* Every other element of a row of two tokens' V. */
PP_INLINE void write_every_other(unsigned char *to, const unsigned char *from, int dims, const unsigned char *ahead) {
    for (int d = 0; d < dims; d++) {
        memcpy(to + 4 * d, from + 2 * d, 2);
        if (d % 16 == 0) prefetch_into_l2(ahead + 4 * d, 64);
    }
}

/* V of `count` tokens, two by two where both are given. */
PP_INLINE void write_woven(const pp_rows *work, unsigned char *to, const unsigned char *from, int64_t step, int dims,
                           const unsigned char *ahead) {
    for (int t = 0; t < work->count; t++) {
        const int place = work->token + t;
        unsigned char *pair = to + (int64_t)place / 2 * dims * 4;
        const unsigned char *row = from + t * step;
        if (place % 2 == 0 && t + 1 < work->count) {
            for (int d = 0; d < dims; d++) {
                uint16_t first, second;
                memcpy(&first, row + 2 * d, 2);
                memcpy(&second, row + step + 2 * d, 2);
                const uint32_t both = first | (uint32_t)second << 16;
                memcpy(pair + 4 * d, &both, 4);
            }
            t++;
        } else {
            write_every_other(pair + place % 2 * 2, row, dims, ahead + (int64_t)place / 2 * dims * 4);
        }
    }
}

static void write_rows(const pp_rows *work) {
    const int item = work->dtype == PP_F32 ? 4 : 2, from_item = work->narrow ? (int)sizeof(float) : item;
    unsigned char rounded[PP_GROUP * PP_V_RUN * 2] __attribute__((aligned(64)));
    for (int d = 0; d < work->dims; d += PP_V_RUN) {
        const int left = work->dims - d, dims = left < PP_V_RUN ? left : PP_V_RUN;
        const unsigned char *from = work->from + (int64_t)d * from_item;
        int64_t step = work->step;
        const int64_t at = (int64_t)d * PP_GROUP * item;
        unsigned char *to = work->to + at;
        const unsigned char *ahead = work->ahead + at;
        if (work->count == PP_GROUP) prefetch_into_l2(ahead, dims * PP_GROUP * item);
        for (int t = 0; t < work->next_count; t++)
            prefetch_into_l2(work->next + t * step + d * from_item, dims * from_item);
        if (work->narrow) {
            for (int t = 0; t < work->count; t++) {
                const float *row = (const float *)(const void *)(from + t * step);
                if (work->dtype == PP_BF16)
                    narrow_bf16(rounded + t * PP_V_RUN * 2, row, dims);
                else
                    narrow_f16(rounded + t * PP_V_RUN * 2, row, dims);
            }
            from = rounded;
            step = PP_V_RUN * 2;
        }
        if (work->is_v && work->dtype == PP_BF16)
            write_woven(work, to, from, step, dims, ahead);
        else if (work->is_v)
            for (int t = 0; t < work->count; t++)
                memcpy(to + (int64_t)(work->token + t) * dims * item, from + t * step, (size_t)(dims * item));
        else if (work->dtype == PP_F16)
            write_columns(2, work, to, from, step, dims, ahead);
        else
            write_columns(4, work, to, from, step, work->dtype == PP_BF16 ? dims / 2 : dims, ahead);
    }
}
