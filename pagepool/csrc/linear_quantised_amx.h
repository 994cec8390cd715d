/* linear_quantised_amx.h: the kernel of linear_quantised.h for 16 rows at a time.  Included after simd_tiles.h.
 *
 * Tile 0 holds sums of 16 rows and 16 outputs, tile 4 holds rows and tile 6 weights, each for the 32 inputs of a group.
 * The products of the next group are computed while those of a group are added: 0.75 of the time. */

enum { TILE_OUTPUTS = 16, TILE_DOTS = TILE_ROWS * TILE_OUTPUTS, QUAD_BYTES = PP_QUANTISED_OUTPUTS * 4 };
enum { PART_GROUPS = 16, SIGNED_BYTES = PP_QUANTISED_OUTPUTS * PP_QUANTISED_GROUP /* of a group of a block */ };
_Static_assert((int)PP_QUANTISED_HEIGHT == (int)TILE_ROWS, "rows of a tile are stored together");

/* Writes the weights of a group as signed bytes: [8][32 outputs][4 inputs]. */
PP_INLINE void signed_bytes(const int FORMAT, const unsigned char *group, unsigned char *to) {
    if (FORMAT == PP_QUANTISED_8) {
        memcpy(to, group, SIGNED_BYTES);
        return;
    }
    const __m512i low = _mm512_set1_epi8(15), less = _mm512_set1_epi8(FORMAT == PP_QUANTISED_4 ? 8 : 0);
    PP_UNROLL for (int at = 0; at < SIGNED_BYTES / 2; at += 64) {
        const __m512i both = _mm512_load_si512(group + at);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        _mm512_store_si512(to + at, _mm512_sub_epi8(_mm512_and_si512(both, low), less));
        _mm512_store_si512(to + SIGNED_BYTES / 2 + at, _mm512_sub_epi8(high, less));
    }
}

/* Writes the sums of products of a group. */
PP_INLINE void multiply_tile(const int8_t *x, const unsigned char *weights, int32_t *dots) {
    tile_zero(0);
    tile_load(4, x, PP_QUANTISED_GROUP);
    tile_load(6, weights, QUAD_BYTES);
    tile_dot_bytes(0, 4, 6);
    tile_store(0, dots, TILE_ROW_BYTES);
}

/* Adds the sums of products of a group: 16 scales of x, and 16 scales of weights in f16. */
PP_INLINE void add_tile(const int FORMAT, const int32_t *dots, const float *x_scale, const float *x_scaled_sum,
                        const unsigned char *scales, pp_v *sums) {
    const pp_v scale = v_load_f16((const uint16_t *)scales);
    PP_UNROLL for (int r = 0; r < TILE_ROWS; r++) {
        const pp_v dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots + r * TILE_OUTPUTS));
        sums[r] = v_fma_once(v_mul(scale, v_set1(x_scale[r])), dot, sums[r]);
    }
    if (FORMAT != PP_QUANTISED_4_LEAST) return;
    const pp_v least = v_load_f16((const uint16_t *)scales + PP_QUANTISED_OUTPUTS);
    PP_UNROLL for (int r = 0; r < TILE_ROWS; r++) sums[r] = v_fma_once(least, v_set1(x_scaled_sum[r]), sums[r]);
}

/* A call of linear_tiles. */
typedef struct tiles_call {
    const pp_quantised_rows *rows;
    int64_t row, tiles; /* the first row, a multiple of 16, and the number of tiles of rows */
    float *sums;        /* [16 tiles][32] */
    const char *out;    /* the first row's outputs of the block, to prefetch; rows are `stride` bytes apart */
    int64_t stride;
} tiles_call;

/* Groups [begin, end) of a block.  Adds to the sums, or writes them if `begin` is 0. */
PP_INLINE void tiles_of_part(const int FORMAT, const tiles_call *call, const unsigned char *block, int64_t begin,
                             int64_t end) {
    enum { X_BYTES = TILE_ROWS * PP_QUANTISED_GROUP };
    const pp_quantised_rows *rows = call->rows;
    const int64_t bytes = pp_quantised_group_bytes(FORMAT), count = end - begin;
    unsigned char weights[PART_GROUPS * SIGNED_BYTES] __attribute__((aligned(64)));
    int32_t dots[2][TILE_DOTS] __attribute__((aligned(64)));
    const unsigned char *part = block + begin * bytes;
    for (int64_t group = 0; group < count; group++)
        signed_bytes(FORMAT, part + group * bytes, weights + group * SIGNED_BYTES);
    int64_t at = pp_place_of_row(rows, call->row) + begin * TILE_ROWS;
    int turn = 0;
    multiply_tile(rows->q + at * PP_QUANTISED_GROUP, weights, dots[0]);
    for (int64_t square = 0; square < 2 * call->tiles; square++) { /* two squares for each tile of rows */
        const int64_t column = square % 2 * TILE_OUTPUTS;
        float *own = call->sums + square / 2 * TILE_ROWS * PP_QUANTISED_OUTPUTS + column;
        if (end == rows->groups && column == 0)
            for (int64_t r = square / 2 * TILE_ROWS, i = 0; i < TILE_ROWS; i++)
                __builtin_prefetch(at_distance((const unsigned char *)call->out, (r + i) * call->stride), 1, 3);
        pp_v sums[TILE_ROWS];
        PP_UNROLL for (int r = 0; r < TILE_ROWS; r++)
            sums[r] = begin ? v_load(own + r * PP_QUANTISED_OUTPUTS) : v_set1(0.0f);
        const int8_t *x = rows->q + at * PP_QUANTISED_GROUP;
        const float *scale = rows->scale + at, *scaled_sum = rows->scaled_sum + at;
        const unsigned char *own_weights = weights + 4 * column;
        const unsigned char *scales = part + (FORMAT == PP_QUANTISED_8 ? SIGNED_BYTES : SIGNED_BYTES / 2) + 2 * column;
        for (int64_t group = 1; group < count; group++, turn ^= 1) {
            x += X_BYTES;
            own_weights += SIGNED_BYTES;
            multiply_tile(x, own_weights, dots[turn ^ 1]);
            add_tile(FORMAT, dots[turn], scale, scaled_sum, scales, sums);
            scale += TILE_ROWS;
            scaled_sum += TILE_ROWS;
            scales += bytes;
            for (int i = 0; column && i < X_BYTES; i += 64) /* the next tile of rows */
                prefetch_into_l1(at_distance((const unsigned char *)x, rows->groups * X_BYTES + i));
            for (int64_t i = 0; square == 0 && i < bytes; i += 64) /* the next part's weights, into L2 */
                __builtin_prefetch(at_distance(part, (count + group) * bytes + i), 0, 2);
        }
        if (column) at += rows->groups * TILE_ROWS;
        if (square + 1 < 2 * call->tiles)
            multiply_tile(rows->q + at * PP_QUANTISED_GROUP, weights + 4 * (TILE_OUTPUTS - column), dots[turn ^ 1]);
        add_tile(FORMAT, dots[turn], scale, scaled_sum, scales, sums);
        turn ^= 1;
        PP_UNROLL for (int r = 0; r < TILE_ROWS; r++) v_store(own + r * PP_QUANTISED_OUTPUTS, sums[r]);
    }
}

PP_INLINE void linear_tiles_of(const int FORMAT, const pp_quantised *weight, const pp_quantised_rows *rows, int64_t row,
                               int64_t count, int64_t begin, int64_t end, char *to, int64_t stride) {
    float sums[PP_QUANTISED_PANEL * PP_QUANTISED_OUTPUTS] __attribute__((aligned(64)));
    tiles_call call = {.rows = rows, .row = row, .tiles = (count + TILE_ROWS - 1) / TILE_ROWS, .sums = sums,
                       .stride = stride};
    const int64_t groups = rows->groups, parts = (groups + PART_GROUPS - 1) / PART_GROUPS;
    tiles_begin_bytes();
    for (int64_t number = begin; number < end; number++) {
        const unsigned char *block = weight->data + number * groups * pp_quantised_group_bytes(FORMAT);
        call.out = to + number * PP_QUANTISED_OUTPUTS * (rows->dtype == PP_F32 ? 4 : 2);
        for (int64_t part = 0; part < parts; part++) /* of about equal sizes */
            tiles_of_part(FORMAT, &call, block, groups * part / parts, groups * (part + 1) / parts);
        write_outputs(weight, number, sums, count, rows->dtype, to, stride);
    }
    tiles_end();
}

static void linear_tiles(const pp_quantised *weight, const pp_quantised_rows *rows, int64_t row, int64_t count,
                         int64_t begin, int64_t end, char *to, int64_t stride) {
    switch (weight->format) {
    case PP_QUANTISED_8:
        linear_tiles_of(PP_QUANTISED_8, weight, rows, row, count, begin, end, to, stride);
        break;
    case PP_QUANTISED_4:
        linear_tiles_of(PP_QUANTISED_4, weight, rows, row, count, begin, end, to, stride);
        break;
    default:
        linear_tiles_of(PP_QUANTISED_4_LEAST, weight, rows, row, count, begin, end, to, stride);
    }
}
