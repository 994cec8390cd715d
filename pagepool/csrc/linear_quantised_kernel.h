/* linear_quantised_kernel.h: the kernels of linear_quantised.h.  Included once per ISA, after one of simd_vnni.h,
 * simd_madd.h, simd_sdot.h and simd_int.h, which have dots_of_group. */

enum { DOT_VECTORS = DOT_OUTPUTS / PP_LANES };

/* Prefetches the group that is read 4 KB later, in this block or the next one. */
PP_INLINE void prefetch_group(const unsigned char *group, int64_t bytes) {
    enum { AHEAD = 4096 };
    for (int64_t i = 0; i < bytes; i += 64) prefetch_into_l1(at_distance(group, AHEAD + i));
}

/* Rounds a row to 8 bits, group by group: the largest magnitude of a group becomes 127. */
static void quantise_x(const void *x, const pp_quantised_rows *rows, int64_t row) {
    enum { PART = 16 }; /* groups that are converted to f32 together */
    float wide[PART * PP_QUANTISED_GROUP];
    const char *from = x;
    int64_t at = pp_place_of_row(rows, row);
    const int64_t size = rows->dtype == PP_F32 ? 4 : 2;
    for (int64_t begin = 0; begin < rows->groups; begin += PART) {
        const int64_t left = rows->groups - begin, count = left < PART ? left : PART;
        const int32_t n = (int32_t)count * PP_QUANTISED_GROUP;
        const float *part = row_in_f32(rows->dtype, from + begin * PP_QUANTISED_GROUP * size, wide, n);
        for (int64_t group = 0; group < count; group++, part += PP_QUANTISED_GROUP, at += rows->height) {
            int8_t *q = rows->q + at * PP_QUANTISED_GROUP;
            uint32_t bits = 0; /* of the largest magnitude; integers order magnitudes like floats, and NaN last */
            for (int i = 0; i < PP_QUANTISED_GROUP; i++) {
                const uint32_t own = pp_bits_of(part[i]) & 0x7fffffffu;
                bits = own > bits ? own : bits;
            }
            const float most = pp_float_of(bits);
            const int is_finite = bits < 0x7f800000u, is_zero = most < PP_LEAST_QUANTISED;
            const float inverse = is_finite && !is_zero ? 127.0f / most : 0.0f;
            int32_t sum = 0;
            for (int i = 0; i < PP_QUANTISED_GROUP; i++) {
                const float scaled = inverse ? part[i] * inverse : 0.0f; /* infinity * 0 is NaN */
                const int32_t rounded = (int32_t)(pp_bits_of(scaled + PP_ROUND) - PP_ROUND_BITS);
                q[i] = (int8_t)rounded;
                sum += rounded;
            }
            const float scale = !is_finite ? pp_float_of(0x7fc00000u) : is_zero ? 0.0f : most / 127.0f;
            rows->sum[at] = sum;
            rows->scale[at] = scale;
            rows->scaled_sum[at] = scale * (float)sum;
        }
    }
}

/* Outputs [column, column + DOT_OUTPUTS) of a block for `COUNT` rows, which are stored together.  The first row's
 * results are written to `to`, those of the next row to to + PP_QUANTISED_OUTPUTS. */
PP_INLINE void linear_square(const int FORMAT, const int COUNT, const unsigned char *block, int column,
                             const pp_quantised_rows *rows, int64_t row, int is_first, float *to) {
    const int64_t bytes = pp_quantised_group_bytes(FORMAT);
    const int64_t scales_at = PP_QUANTISED_OUTPUTS * (FORMAT == PP_QUANTISED_8 ? 32 : 16);
    int64_t at = pp_place_of_row(rows, row);
    pp_v sums[DOT_ROWS][DOT_VECTORS];
    PP_UNROLL for (int r = 0; r < COUNT; r++)
        PP_UNROLL for (int i = 0; i < DOT_VECTORS; i++) sums[r][i] = v_set1(0.0f);
    for (int64_t group = 0; group < rows->groups; group++, block += bytes, at += rows->height) {
        pp_v dots[DOT_ROWS][DOT_VECTORS];
        if (is_first) prefetch_group(block, bytes);
        dots_of_group(FORMAT, COUNT, block + 4 * column, rows->q + at * PP_QUANTISED_GROUP, rows->sum + at, dots);
        const uint16_t *scales = (const uint16_t *)(block + scales_at) + column, *least = scales + PP_QUANTISED_OUTPUTS;
        PP_UNROLL for (int i = 0; i < DOT_VECTORS; i++) {
            const pp_v scale = v_load_f16(scales + i * PP_LANES);
            PP_UNROLL for (int r = 0; r < COUNT; r++)
                sums[r][i] = v_fma_once(v_mul(scale, v_set1(rows->scale[at + r])), dots[r][i], sums[r][i]);
            if (FORMAT != PP_QUANTISED_4_LEAST) continue;
            const pp_v lowest = v_load_f16(least + i * PP_LANES);
            PP_UNROLL for (int r = 0; r < COUNT; r++)
                sums[r][i] = v_fma_once(lowest, v_set1(rows->scaled_sum[at + r]), sums[r][i]);
        }
    }
    PP_UNROLL for (int r = 0; r < COUNT; r++)
        PP_UNROLL for (int i = 0; i < DOT_VECTORS; i++)
            v_store(to + r * PP_QUANTISED_OUTPUTS + column + i * PP_LANES, sums[r][i]);
}

PP_INLINE void linear_columns(const int FORMAT, const int COUNT, const unsigned char *block,
                              const pp_quantised_rows *rows, int64_t row, int is_first, float *to) {
    for (int column = 0; column < PP_QUANTISED_OUTPUTS; column += DOT_OUTPUTS)
        linear_square(FORMAT, COUNT, block, column, rows, row, is_first, to);
}

/* Up to DOT_ROWS rows of a block.  Returns their number. */
PP_INLINE int linear_some_rows(const int FORMAT, const unsigned char *block, const pp_quantised_rows *rows, int64_t row,
                               int64_t left, int is_first, float *to) {
#if DOT_ROWS >= 4
    if (left >= 4) return linear_columns(FORMAT, 4, block, rows, row, is_first, to), 4;
    if (left == 3) return linear_columns(FORMAT, 3, block, rows, row, is_first, to), 3;
#endif
    if (left >= 2) return linear_columns(FORMAT, 2, block, rows, row, is_first, to), 2;
    return linear_columns(FORMAT, 1, block, rows, row, is_first, to), 1;
}

/* Adds the bias to the sums of a block for `count` rows, 32 sums each, and writes the outputs. */
static void write_outputs(const pp_quantised *weight, int64_t block, float *sums, int64_t count, int32_t dtype,
                          char *to, int64_t stride) {
    const int64_t output = block * PP_QUANTISED_OUTPUTS, left = weight->outputs - output;
    const int64_t n = left < PP_QUANTISED_OUTPUTS ? left : PP_QUANTISED_OUTPUTS;
    to += output * (dtype == PP_F32 ? 4 : 2);
    for (int64_t r = 0; r < count; r++, sums += PP_QUANTISED_OUTPUTS, to += stride) {
        for (int64_t i = 0; weight->bias && i < n; i++) sums[i] += weight->bias[output + i];
        if (dtype == PP_F32)
            memcpy(to, sums, (size_t)n * sizeof(float));
        else
            (dtype == PP_F16 ? narrow_f16 : narrow_bf16)(to, sums, n);
    }
}

PP_INLINE void linear_blocks(const int FORMAT, const pp_quantised *weight, const pp_quantised_rows *rows, int64_t row,
                             int64_t count, int64_t begin, int64_t end, char *to, int64_t stride) {
    float sums[DOT_ROWS * PP_QUANTISED_OUTPUTS];
    for (int64_t number = begin; number < end; number++) {
        const unsigned char *block = weight->data + number * rows->groups * pp_quantised_group_bytes(FORMAT);
        for (int64_t done = 0; done < count;) {
            const int some = linear_some_rows(FORMAT, block, rows, row + done, count - done, done == 0, sums);
            write_outputs(weight, number, sums, some, rows->dtype, to + done * stride, stride);
            done += some;
        }
    }
}

static void linear_quantised(const pp_quantised *weight, const pp_quantised_rows *rows, int64_t row, int64_t count,
                             int64_t begin, int64_t end, char *to, int64_t stride) {
    switch (weight->format) {
    case PP_QUANTISED_8:
        linear_blocks(PP_QUANTISED_8, weight, rows, row, count, begin, end, to, stride);
        break;
    case PP_QUANTISED_4:
        linear_blocks(PP_QUANTISED_4, weight, rows, row, count, begin, end, to, stride);
        break;
    default:
        linear_blocks(PP_QUANTISED_4_LEAST, weight, rows, row, count, begin, end, to, stride);
    }
}
