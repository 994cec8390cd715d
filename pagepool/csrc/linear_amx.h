/* linear_amx.h: the kernel of linear.h.  Included after simd_tiles.h.
 *
 * Tiles 0 to 3 hold a square of 32 x 32 results, tiles 4 and 5 hold rows, tiles 6 and 7 hold weights. */

/* Weights are prefetched into L2, 8 lines after each of four instructions.  On Granite Rapids with 32 rows and weights
 * in the shared cache, one thread then reads 12.8 GB/s, and 11.5 with all 32 prefetches together or into L1.  A loop
 * that only reads has 16. */
enum { LINEAR_AHEAD = 8 << 10, LINEAR_LINES = 8 * 64 };
PP_INLINE void prefetch_weights(const unsigned char *b, int quarter) {
    const char *from = (const char *)b + LINEAR_AHEAD + quarter * LINEAR_LINES;
    PP_UNROLL for (int line = 0; line < LINEAR_LINES; line += 64) _mm_prefetch(from + line, _MM_HINT_T1);
}

/* Writes rows [0, rows) of a square of sums. */
static void write_square(const pp_linear *work, const float *sums, int64_t row, int64_t rows, int64_t output) {
    const int64_t left = work->outputs - output;
    float bias[PP_LINEAR_OUTPUTS] = {0};
    for (int i = 0; work->bias && i < PP_LINEAR_OUTPUTS && i < left; i++)
        bias[i] = pp_bf16_to_f32(work->bias[output + i]);
    const __m512 first = _mm512_loadu_ps(bias), second = _mm512_loadu_ps(bias + 16);
    const __mmask32 kept = left < PP_LINEAR_OUTPUTS ? (__mmask32)((1u << left) - 1) : ~(__mmask32)0;
    uint16_t *to = work->out + row * work->outputs + output;
    for (int64_t i = 0; i < rows; i++, to += work->outputs, sums += PP_LINEAR_OUTPUTS) {
        const __m512 low = _mm512_add_ps(_mm512_loadu_ps(sums), first);
        const __m512 high = _mm512_add_ps(_mm512_loadu_ps(sums + 16), second);
        _mm512_mask_storeu_epi16(to, kept, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

void pp_linear_by_amx(const pp_linear *work, int64_t begin, int64_t end) {
    const int64_t steps = work->inputs / PP_LINEAR_INPUTS;
    float sums[PP_LINEAR_ROWS * PP_LINEAR_OUTPUTS] __attribute__((aligned(64)));
    tiles_begin(TILE_ROWS);
    for (int64_t block = begin; block < end; block++) {
        const unsigned char *weights = (const unsigned char *)work->weight + block * steps * 2 * TILE_BYTES;
        for (int64_t row = 0; row < work->rows; row += PP_LINEAR_ROWS) {
            const int64_t left = work->rows - row, rows = left < PP_LINEAR_ROWS ? left : PP_LINEAR_ROWS;
            const unsigned char *a = work->tiles + row * work->inputs * 2, *b = weights;
            tile_zero(0);
            tile_zero(1);
            tile_zero(2);
            tile_zero(3);
            for (int64_t step = 0; step < steps; step++, a += 2 * TILE_BYTES, b += 2 * TILE_BYTES) {
                tile_load(4, a, TILE_ROW_BYTES);
                if (row == 0) prefetch_weights(b, 0);
                tile_load(6, b, 2 * TILE_ROW_BYTES);
                if (row == 0) prefetch_weights(b, 1);
                tile_dot(0, 4, 6);
                if (row == 0) prefetch_weights(b, 2);
                tile_load(7, b + TILE_ROW_BYTES, 2 * TILE_ROW_BYTES);
                if (row == 0) prefetch_weights(b, 3);
                tile_dot(1, 4, 7);
                if (rows <= TILE_ROWS) continue;
                tile_load(5, a + TILE_BYTES, TILE_ROW_BYTES);
                tile_dot(2, 5, 6);
                tile_dot(3, 5, 7);
            }
            const long step_bytes = PP_LINEAR_OUTPUTS * sizeof(float);
            tile_store(0, sums, step_bytes);
            tile_store(1, sums + 16, step_bytes);
            tile_store(2, sums + 16 * PP_LINEAR_OUTPUTS, step_bytes);
            tile_store(3, sums + 16 * PP_LINEAR_OUTPUTS + 16, step_bytes);
            write_square(work, sums, row, rows, block * PP_LINEAR_OUTPUTS);
        }
    }
    tiles_end();
}
