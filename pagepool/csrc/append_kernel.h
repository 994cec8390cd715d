/* append_kernel.h: writes rows of K and V into tiled pages.  Included once per ISA.
 *
 * Layout of a group: K is token-minor, with one row of 16 words for each dim (bf16: for each pair of dims).  V is in
 * rows of 64 dims; in bf16 the elements of two tokens are interleaved.
 *
 * Eight tokens are transposed together, so that half a cache line is written at once.  The remaining tokens are written
 * word by word.  A single token (a decode step) writes each word of its K to a different cache line.  The lines to
 * write next are therefore prefetched, as for whole groups.  The rows to read next are prefetched into L2, because its
 * queue is longer than the queue of L1 (Zen 4, cold: 1.2 to 1.6 times as fast as a prefetch into L1 or no prefetch).
 *
 * The kernels write only the bytes of the given tokens.  Another thread may write the neighbouring tokens at the same
 * time. */

/* Writes `words` words of one token into its column.  Rows of the column are `row_bytes` apart. */
PP_INLINE void write_column(const int W, unsigned char *to, const unsigned char *from, int words,
                            const unsigned char *ahead) {
    const int row_bytes = PP_GROUP * W;
    for (int i = 0; i < words; i++) {
        memcpy(to + i * row_bytes, from + i * W, (size_t)W);
        if (i * row_bytes % 64 == 0) prefetch_into_l2(ahead + i * row_bytes, 64);
    }
}

/* Writes K of `count` tokens into their columns. */
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

/* Writes 16 elements of one token of V into a row of pairs of tokens: its first or its second (`odd`) elements. */
#ifndef PP_MASKED_STORES
PP_INLINE void store_in_pairs(unsigned char *pairs, int odd, const unsigned char *from) {
    PP_UNROLL for (int i = 0; i < 16; i++) memcpy(pairs + 4 * i + 2 * odd, from + 2 * i, 2);
}
#endif

/* Writes one token of V into a row of pairs of tokens. */
PP_INLINE void write_in_pairs(unsigned char *pairs, int odd, const unsigned char *from, int dims,
                              const unsigned char *ahead) {
    int d = 0;
    for (; d + 16 <= dims; d += 16) {
        store_in_pairs(pairs + 4 * d, odd, from + 2 * d);
        prefetch_into_l2(ahead + 4 * d, 64);
    }
    for (; d < dims; d++) memcpy(pairs + 4 * d + 2 * odd, from + 2 * d, 2);
}

/* Writes V of `count` tokens.  Two tokens that share an interleaved row are written together. */
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
            write_in_pairs(pair, place % 2, row, dims, ahead + (int64_t)place / 2 * dims * 4);
        }
    }
}

/* Converts n elements of a row to another 16-bit or 32-bit float dtype; n is at most PP_V_RUN. */
static void convert_row(int32_t dtype, unsigned char *to, int32_t from_dtype, const unsigned char *from, int n) {
    float wide[PP_V_RUN];
    const float *row = row_in_f32(from_dtype, from, wide, n);
    if (dtype == PP_F32)
        memcpy(to, row, (size_t)n * sizeof(float));
    else
        (dtype == PP_F16 ? narrow_f16 : narrow_bf16)(to, row, n);
}

/* Returns the largest |x| of a row, or NaN if an element is not finite. */
static float largest_of(const float *row, int n) {
    pp_v most = v_set1(0.0f), sum = most;
    for (int i = 0; i < n; i += PP_LANES) {
        float lanes[PP_LANES] = {0};
        memcpy(lanes, row + i, (size_t)(n - i < PP_LANES ? n - i : PP_LANES) * sizeof(float));
        const pp_v x = v_load(lanes), size = v_max(x, v_sub(v_set1(0.0f), x));
        most = v_max(size, most);
        sum = v_add(sum, v_sub(x, x)); /* stays 0 if all are finite */
    }
    return v_sum(sum) == 0.0f ? v_highest(most) : NAN;
}

/* Quantises a row to integers of magnitude up to `most`.  Returns its scale: 0 if the row counts as 0, NaN if an
 * element is not finite. */
static float make_integers(const float *row, int n, int32_t most, int32_t *integers) {
    const float largest = largest_of(row, n);
    if (!(largest >= PP_LEAST_QUANTISED)) { /* or NaN */
        memset(integers, 0, (size_t)n * sizeof *integers);
        return largest == largest ? 0.0f : largest;
    }
    const float inverse = (float)most / largest;
    for (int i = 0; i < n; i++) {
        const float x = row[i] * inverse + PP_ROUND;
        memcpy(integers + i, &x, sizeof x);
        integers[i] -= PP_ROUND_BITS;
    }
    return largest / (float)most;
}

/* Quantises a row to integers and returns its scale. */
static float quantise_row(const pp_rows *work, const unsigned char *from, int32_t most, int32_t *integers) {
    float wide[PP_MAX_HEAD_DIM];
    const float *row = row_in_f32(work->from_dtype, from, wide, work->dims);
    if (work->channel_scale) {
        for (int i = 0; i < work->dims; i++) wide[i] = row[i] / work->channel_scale[i];
        row = wide;
    }
    return make_integers(row, work->dims, most, integers);
}

/* Writes rows to quantised pages, token by token. */
static void write_quantised(const pp_rows *work) {
    const int is_4 = work->dtype == PP_INT4, bias = is_4 ? 8 : work->is_v ? 0 : 128;
    int32_t integers[PP_MAX_HEAD_DIM];
    prefetch_into_l2(work->ahead, (int)pp_scales_at(work->dtype, work->dims) + 64);
    for (int t = 0; t < work->count; t++) {
        const int token = work->token + t;
        const float scale = quantise_row(work, work->from + t * work->step, is_4 ? 7 : 127, integers);
        memcpy(work->to + pp_scales_at(work->dtype, work->dims) + token * (int)sizeof scale, &scale, sizeof scale);
        for (int d = 0, width; d < work->dims; d += width) {
            int unused;
            width = !work->is_v ? is_4 ? 8 : 4 : pp_run_width(work->dims, d); /* dims in order, `step` apart */
            const int columns = is_4 ? width / 2 : width, step = work->is_v ? 4 : 1;
            const int32_t *of = integers + d;
            unsigned char *to = work->to + pp_quantised_at(work->dtype, work->is_v, work->dims, token, d, &unused);
            for (int i = 0; i < columns; i++)
                to[i * step] = (unsigned char)(is_4 ? (of[i] + bias) | (of[columns + i] + bias) << 4 : of[i] + bias);
        }
    }
}

static void write_rows(const pp_rows *work) {
    if (pp_is_quantised(work->dtype)) {
        write_quantised(work);
        return;
    }
    const int item = work->dtype == PP_F32 ? 4 : 2, from_item = work->from_dtype == PP_F32 ? 4 : 2;
    unsigned char converted[PP_GROUP * PP_V_RUN * 4] __attribute__((aligned(64)));
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
        if (work->from_dtype != work->dtype) {
            for (int t = 0; t < work->count; t++)
                convert_row(work->dtype, converted + t * PP_V_RUN * item, work->from_dtype, from + t * step, dims);
            from = converted;
            step = PP_V_RUN * item;
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
