/* decode_tile.h: the work on a tile of one kv head, or on two neighbouring tiles, for rows that share its loads.
 *
 * Included once per ISA.  DT (the dtype of the page) and HEADS (the number of rows) are constants: loops over HEADS are
 * unrolled, and sums stay in registers.
 *
 * Two tiles are computed together (TILES is 2) if all rows see all tokens of both, the number of dims of V is a
 * multiple of PP_V_RUN, and the pages are tiled.  The order of additions, and so every bit, is the same as for
 * two single tiles.  Softmax mostly adds and uses other execution units than the products, so the weights of one tile
 * are computed between the products of the other tile.  Sums of values are loaded and stored half as often.  This takes
 * 7 to 17 % less time than single tiles.
 *
 * Scores and weights are stored tile by tile, and within a tile head by head, with 32 elements for each head. */

/* For up to this number of heads, the weights of the first tile are computed before the scores of the second tile. (For
 * up to 6 heads, computing them between the products took 1 % longer.) */
enum { WEIGHED_BEFORE = 6 };

/* Two neighbouring rows of `width` columns as f32: a vector of each, from `column` on. */
PP_INLINE void v_load2(const int DT, const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    if (DT == PP_F32)
        v_load2_f32(rows, width, column, a, b);
    else if (DT == PP_F16)
        v_load2_f16(rows, width, column, a, b);
    else
        v_load2_bf16(rows, width, column, a, b);
}
#if PP_HALF_TAIL
PP_INLINE void v_load2_half(const int DT, const unsigned char *rows, int width, int column, pp_v *a, pp_v *b) {
    if (DT == PP_F32)
        v_load2_half_f32(rows, width, column, a, b);
    else if (DT == PP_F16)
        v_load2_half_f16(rows, width, column, a, b);
    else
        v_load2_half_bf16(rows, width, column, a, b);
}
#endif

/* Adds the products of pairs of dims (a and b) with a head's query to NV vectors of scores.  EVEN and ODD dims have
 * separate chains of sums. */
PP_INLINE void add_dims(const int NV, const int EVEN, const int ODD, const pp_v *a, const pp_v *b,
                        const float *q, pp_v *even, pp_v *odd) {
    const pp_broadcast x = v_broadcast(q + !EVEN), y = EVEN && ODD ? v_broadcast(q + 1) : x;
    PP_UNROLL for (int j = 0; j < NV; j++) {
        if (EVEN) even[j] = v_fma_broadcast(a[j], x, even[j]);
        if (ODD) odd[j] = v_fma_broadcast(b[j], y, odd[j]);
    }
}

/* Loads V of two neighbouring tokens for one vector of dims.  With HALF, for half of a vector. */
PP_INLINE void load_tokens(const int DT, const int HALF, const int FIRST, const int SECOND, const unsigned char *rows,
                           int width, int column, pp_v *a, pp_v *b) {
    (void)FIRST, (void)SECOND;
#if PP_HALF_TAIL
    if (HALF) {
        v_load2_half(DT, rows, width, column, a, b);
        return;
    }
#endif
    (void)HALF;
    v_load2(DT, rows, width, column, a, b);
}

/* Adds V of a token times its weight.  The token is the FIRST or the second one of a pair. */
PP_INLINE void add_token(const int NV, const int FIRST, const pp_v *x, const float *weights, pp_v *sum) {
    const pp_broadcast weight = v_broadcast(weights + !FIRST);
    PP_UNROLL for (int j = 0; j < NV; j++) sum[j] = v_fma_broadcast(x[j], weight, sum[j]);
}

/* Converts the next head's scores to weights, and adds them to its running sums. */
PP_INLINE void weigh_next(weighing *to_do) {
    const int g = to_do->next++;
    weigh(to_do->s + g * PP_TILE, to_do->m[g], to_do->rows + (g + 1) * to_do->row_stride - PP_GROUP);
}

/* Scores of NV vectors of tokens for HEADS heads, from vector `first` of the tiles.  The chains over EVEN dims and over
 * ODD dims run both at once or one after the other.  Queries of consecutive pairs of dims are q_step elements apart.
 * Between the products, the weights of WEIGHED heads are computed. */
PP_INLINE void chains(const int DT, const int HEADS, const int NV, const int EVEN, const int ODD, const int TILES,
                      const int WEIGHED, const int mode, const pp_tile *tile, int first, const float *q,
                      const int q_step, float *s, weighing *to_do) {
    enum { VECTORS = PP_TILE / PP_LANES, PER_GROUP = PP_GROUP / PP_LANES };
    const int PAIR_BYTES = 2 * PP_GROUP * item_bytes(DT);
    const int INTERLEAVED = PP_WIDE && TILES == 2 && mode, ALONE = EVEN != ODD;
    /* Number of lines to prefetch for each pair of dims if groups are interleaved.  A step has two pairs, or enough
     * pairs to prefetch a line of each group. */
    const int LINES = NV * (ALONE ? 1 : 2) * item_bytes(DT) / 4, PAIRS = INTERLEAVED && LINES == 1 ? 4 : 2;
    const unsigned char *row = tile->k[first / PER_GROUP];
    int64_t here[4], visit[4], half[4]; /* distances from `row` to each vector's loads and to prefetched lines */
    pp_v even[PP_MAX_HEADS * 4], odd[PP_MAX_HEADS * 4];
    PP_UNROLL for (int j = 0; j < NV; j++) {
        const int group = (first + j) / PER_GROUP;
        here[j] = j ? distance_of(tile->k[group], row) : 0;
        visit[j] = distance_of(tile->next_k[group], row);
        half[j] = distance_of(tile->v[group], row);
    }
    PP_UNROLL for (int i = 0; i < HEADS * NV; i++) even[i] = odd[i] = v_set1(0.0f);
    pp_interleaved ahead; /* moves by the part of K of each call */
    if (INTERLEAVED)
        ahead = interleaved_at(item_bytes(DT), tile, (ALONE ? first + ODD : first / NV) * (tile->head_dim * LINES / 8));
    const int64_t steps = tile->head_dim / (2 * PAIRS), piece = steps / (WEIGHED + 1);
    const float *end = q + steps * PAIRS * q_step;
    for (int heads = WEIGHED; heads >= 0; heads--) {
        for (const float *stop = heads ? q + piece * PAIRS * q_step : end; q < stop; q += PAIRS * q_step) {
            if (INTERLEAVED) PP_OPAQUE(ahead.at);
            PP_OPAQUE(row); /* otherwise each address has its own register, and they do not suffice */
            PP_UNROLL for (int i = 0; i < PAIRS; i++, row += PAIR_BYTES) {
                pp_v a[4], b[4];
                PP_UNROLL for (int j = 0; j < NV; j++)
                    v_load2(DT, at_distance(row, here[j]), PP_GROUP, (first + j) % PER_GROUP * PP_LANES, &a[j], &b[j]);
                PP_UNROLL for (int g = 0; g < HEADS; g++) {
                    if (INTERLEAVED)
                        prefetch_interleaved(g, HEADS, LINES * i % 4, LINES, &ahead);
                    else if (EVEN && (TILES == 2 || g == 0))
                        PP_UNROLL for (int j = 0; j < NV; j++)
                            if ((first + j) % PER_GROUP == 0)
                                prefetch(mode, is_fast(DT), g, g + 1, TILES == 2 ? HEADS : 1, PAIR_BYTES,
                                         at_distance(row, here[j]), at_distance(row, visit[j]),
                                         at_distance(row, half[j]));
                    add_dims(NV, EVEN, ODD, a, b, q + i * q_step + g * PP_PAIR_FLOATS, even + g * NV,
                             odd + g * NV);
                }
                if (INTERLEAVED && LINES * (i + 1) % 4 == 0) ahead.at += 64;
            }
        }
        if (heads) weigh_next(to_do);
    }
    PP_UNROLL for (int j = 0; j < NV; j++) {
        float *to = s + (first + j) / VECTORS * HEADS * PP_TILE + (first + j) % VECTORS * PP_LANES;
        PP_UNROLL for (int g = 0; g < HEADS; g++)
            store_chains(EVEN, ODD, to + g * PP_TILE, even[g * NV + j], odd[g * NV + j]);
    }
}

/* The same for both chains: together if there are enough registers, otherwise one after the other. */
PP_INLINE void scores(const int DT, const int HEADS, const int NV, const int TILES, const int WEIGHED, const int mode,
                      const pp_tile *tile, int first, const float *q, const int q_step, float *s,
                      weighing *to_do) {
    const int APART = chains_apart(HEADS), later = APART ? WEIGHED / 2 : 0;
    chains(DT, HEADS, NV, 1, !APART, TILES, WEIGHED - later, mode, tile, first, q, q_step, s, to_do);
    PP_OPAQUE(s); /* otherwise the sums of the first chain stay in registers that the second needs */
    if (APART) chains(DT, HEADS, NV, 0, 1, TILES, later, mode, tile, first, q, q_step, s, to_do);
}

/* Adds p V of the FIRST and the SECOND of two neighbouring tokens, or of one of them. */
PP_INLINE void add_pair(const int DT, const int HEADS, const int NV, const int HALF, const int FIRST, const int SECOND,
                        const unsigned char *row, int width, const float *weight, pp_v *sum) {
    pp_v a[8], b[8];
    PP_UNROLL for (int j = 0; j < NV; j++)
        load_tokens(DT, HALF, FIRST, SECOND, row, width, j * PP_LANES, &a[j], &b[j]);
    PP_UNROLL for (int g = 0; g < HEADS; g++) {
        if (FIRST) add_token(NV, 1, a, weight + g * PP_TILE, sum + g * NV);
        if (SECOND) add_token(NV, 0, b, weight + g * PP_TILE, sum + g * NV);
    }
}

/* Adds p V of tokens [from, to) of the tiles to NV vectors of dims, starting at dim `column` of V.  That dim is in a
 * run of `width` dims. scales: for each tile, the factors that the sums are multiplied by first, or NULL.  If WEIGHS is
 * set, the remaining weights of the second tile are computed while the values of the first tile are added. */
PP_INLINE void values(const int DT, const int HEADS, const int NV, const int HALF, const int TILES, const int WEIGHS,
                      const int mode, const pp_tile *tile, const int width, int column, const int from,
                      const int to, const float *p, const float *const *scales, float *o, weighing *to_do) {
    const int RUN_BYTES = PP_GROUP * PP_V_RUN * item_bytes(DT);
    const int64_t run = (int64_t)(column / PP_V_RUN) * RUN_BYTES;
    const int pair_bytes = 2 * width * item_bytes(DT);
    /* Each pass prefetches its part of every pair of rows, `ahead_by` bytes after the address that it reads, because
     * Zen 4 drops prefetches that arrive faster than the memory answers.  If a part is shorter than a cache line, only
     * the part at the beginning of the line prefetches it. */
    const int part = NV * PP_LANES * 2 * item_bytes(DT);
    const int64_t offset = run + column % PP_V_RUN * column_bytes(DT);
    const int64_t ahead_by = column % PP_V_RUN * (2 * item_bytes(DT) - column_bytes(DT));
    const int prefetches = mode && (part >= 64 || column % PP_V_RUN * 2 * item_bytes(DT) % 64 == 0);
    const int INTERLEAVED = PP_WIDE && TILES == 2 && mode, LINES = NV * item_bytes(DT) / 2; /* of a pair of rows */
    _Static_assert(PP_MAX_HEADS <= 2 * PP_GROUP / 4, "a head with every fourth token of the first tile");
    pp_interleaved ahead;
    pp_v sum[PP_MAX_HEADS * 8];
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            sum[g * NV + j] = v_load(o + g * tile->row_stride + column + j * PP_LANES);
    for (int i = 0; i < 2 * TILES; i++) {
        if (INTERLEAVED && i % 2 == 0)
            ahead = interleaved_at(item_bytes(DT), tile,
                                   (tile->head_dim + column) * item_bytes(DT) / 4 + i * 2 * LINES);
        const float *scale = i % 2 ? NULL : scales[i / 2];
        if (scale)
            PP_UNROLL for (int g = 0; g < HEADS; g++)
                PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = v_mul(sum[g * NV + j], v_set1(scale[g]));
        const int before = from - i * PP_GROUP, left = to - i * PP_GROUP;
        const int begin = before > 0 ? before : 0, end = left < PP_GROUP ? left : PP_GROUP;
        if (begin >= end) continue;
        const unsigned char *row = tile->v[i] + offset + begin / 2 * pair_bytes;
        const int64_t visit = distance_of(prefetches ? tile->next_v[i] : tile->v[i], tile->v[i]) + ahead_by;
        const int64_t half = distance_of(tile->next_k[i], tile->v[i]) + ahead_by;
        const float *weight = p + i / 2 * HEADS * PP_TILE +
                              (i % 2 * PP_GROUP + begin) / 2 * PP_PAIR_FLOATS;
        int t = begin;
        if (t % 2) { /* only the second token is visible */
            add_pair(DT, HEADS, NV, HALF, 0, 1, row, width, weight, sum);
            t++, row += pair_bytes, weight += PP_PAIR_FLOATS;
        }
        for (; t + 1 < end; t += 2, row += pair_bytes, weight += PP_PAIR_FLOATS) {
            if (TILES == 1) {
                if (prefetches)
                    prefetch(mode, is_fast(DT), 0, 1, 1, part, row + ahead_by, at_distance(row, visit),
                             at_distance(row, half));
                add_pair(DT, HEADS, NV, HALF, 1, 1, row, width, weight, sum);
                continue;
            }
            pp_v a[8], b[8];
            if (WEIGHS && t % 4 == 0 && to_do->next < to_do->end) weigh_next(to_do);
            PP_UNROLL for (int j = 0; j < NV; j++)
                load_tokens(DT, 0, 1, 1, row, width, j * PP_LANES, &a[j], &b[j]);
            PP_UNROLL for (int g = 0; g < HEADS; g++) { /* between products, line by line */
                if (INTERLEAVED)
                    prefetch_interleaved(g, HEADS, LINES == 2 ? t % 4 : 0, LINES, &ahead);
                else
                    prefetch(mode, is_fast(DT), g, g + 1, HEADS, part, row + ahead_by, at_distance(row, visit),
                             at_distance(row, half));
                add_token(NV, 1, a, weight + g * PP_TILE, sum + g * NV);
            }
            if (INTERLEAVED && (LINES > 2 || t % 4)) ahead.at += LINES > 4 ? 128 : 64;
            PP_UNROLL for (int g = 0; g < HEADS; g++)
                add_token(NV, 0, b, weight + g * PP_TILE, sum + g * NV);
        }
        if (t < end) /* the second token is not seen */
            add_pair(DT, HEADS, NV, HALF, 1, 0, row, width, weight, sum);
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            v_store(o + g * tile->row_stride + column + j * PP_LANES, sum[g * NV + j]);
}

/* The remainder: one vector of tokens at the ragged end of a sequence, or the last 8 dims if the number of dims is not
 * a multiple of a vector.  Computes one head after another, because the work is small and each copy of the code is
 * large. */
PP_INLINE void scores_left(const int DT, int heads, const pp_tile *tile, int first, const float *q,
                           int q_step, float *s, int mode) {
    PP_OPAQUE(heads); /* compilers make a copy for each number otherwise */
    for (int g = 0; g < heads; g++, mode = PP_PREFETCH_NONE)
        scores(DT, 1, 1, 1, 0, mode, tile, first, q + PP_PAIR_FLOATS * g, q_step, s + g * PP_TILE, NULL);
}
PP_FOR_DTYPES(scores_left, (int heads, const pp_tile *tile, int first, const float *q, int q_step, float *s, int mode),
              heads, tile, first, q, q_step, s, mode)

#if PP_HALF_TAIL
PP_INLINE void values_left(const int DT, int heads, const pp_tile *tile, int width, int column,
                           int from, int to, const float *p, const float *scales,
                           float *rows) {
    PP_OPAQUE(heads);
    for (int g = 0; g < heads; g++) {
        const float *scale = scales ? scales + g : NULL;
        values(DT, 1, 1, 1, 1, 0, PP_PREFETCH_NONE, tile, width, column, from, to, p + g * PP_TILE, &scale,
               rows + g * tile->row_stride, NULL);
    }
}
PP_FOR_DTYPES(values_left, (int heads, const pp_tile *tile, int width, int column, int from, int to, const float *p,
                            const float *scales, float *rows),
              heads, tile, width, column, from, to, p, scales, rows)
#endif

/* The scores of the groups of a tile that have visible tokens. */
PP_INLINE void tile_scores(const int DT, const int HEADS, const pp_tile *tile, const float *q, int q_step, float *s,
                           int mode) {
    enum { VECTORS = PP_TILE / PP_LANES };
    const int full = tile->seen >> PP_GROUP ? VECTORS : VECTORS / 2, nv = score_vectors(HEADS);
    int vector = tile->seen << PP_GROUP ? 0 : VECTORS / 2;
    const int pass = score_heads(HEADS), last = HEADS - pass; /* two passes at most */
    for (; vector + nv <= full; vector += nv) {
        scores(DT, pass, nv, 1, 0, mode, tile, vector, q, q_step, s, NULL);
        if (last)
            scores(DT, last, nv, 1, 0, PP_PREFETCH_NONE, tile, vector, q + PP_PAIR_FLOATS * pass, q_step,
                   s + pass * PP_TILE, NULL);
    }
    for (; vector < full; vector++) PP_BY_DTYPE(DT, scores_left)(HEADS, tile, vector, q, q_step, s, mode);
}

/* The values of a tile, for each run of visible tokens.  V of a masked token may be NaN and must not be multiplied. */
PP_INLINE void tile_values(const int DT, const int HEADS, const pp_tile *tile, const float *p, const float *scales,
                           float *rows, int mode) {
    const int columns = value_vectors(HEADS) * PP_LANES, dims = tile->v_head_dim, whole = dims / PP_V_RUN * PP_V_RUN;
    uint32_t seen = tile->seen;
    if (!tile->next_v[0]) mode = PP_PREFETCH_NONE;
    do {
        int from, to, d = 0;
        seen = take_run(seen, &from, &to);
        for (; d < whole; d += columns)
            values(DT, HEADS, value_vectors(HEADS), 0, 1, 0, mode, tile, PP_V_RUN, d, from, to, p, &scales, rows,
                   NULL);
        for (; d + PP_LANES <= dims; d += PP_LANES)
            values(DT, HEADS, 1, 0, 1, 0, mode, tile, dims - whole, d, from, to, p, &scales, rows, NULL);
#if PP_HALF_TAIL
        if (d < dims) PP_BY_DTYPE(DT, values_left)(HEADS, tile, dims - whole, d, from, to, p, scales, rows);
#endif
        scales = NULL;
        mode = PP_PREFETCH_NONE;
    } while (seen);
}

/* One tile of one kv head for HEADS of its rows that see the same tokens (a row: a query head of one query token).
 * Their queries begin at q; consecutive pairs of dims are q_step elements apart.  Their sums are at `rows` and their
 * shifts at m. */
PP_INLINE void one_tile(const int DT, const int HEADS, const pp_tile *tile, const float *q, int q_step, float *rows,
                        float *m, int mode) {
    float s[PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64)));
    float rescale[PP_RESCALES];
    weighing to_do = {.end = HEADS, .s = s, .m = m, .rows = rows, .row_stride = tile->row_stride};
    tile_scores(DT, HEADS, tile, q, q_step, s, mode);
    transform_scores(tile, 0, HEADS, s);
    if (tile->seen != ALL_SEEN) mask_scores(tile, HEADS, s);
    const float *scales = raise_if_above(HEADS, s, m, rows, tile->row_stride, rescale) ? rescale : NULL;
    PP_UNROLL for (int g = 0; g < HEADS; g++) weigh_next(&to_do);
    tile_values(DT, HEADS, tile, s, scales, rows, mode);
}

PP_FOR_DTYPES_AND_HEADS(one_tile,
                        (int heads, const pp_tile *tile, const float *q, int q_step, float *rows, float *m, int mode),
                        (heads, tile, q, q_step, rows, m, mode),
                        one_tile(DT, HEADS, tile, q, q_step, rows, m, mode))

#if PP_STEPS
/* Both tiles, if every row sees all their tokens.  The arguments are described at one_tile.  MODE is PP_PREFETCH_TWICE,
 * or NONE if an earlier part of the rows has prefetched.  It is a constant, so that no loop tests it. */
PP_INLINE void two_tiles(const int DT, const int HEADS, const int MODE, const pp_tile *tile, const float *q,
                         float *rows, float *m) {
    enum { VECTORS = 2 * PP_TILE / PP_LANES };
    float s[2 * PP_MAX_HEADS * PP_TILE] __attribute__((aligned(64)));
    float rescale[2][PP_RESCALES];
    const float *scales[2];
    const int NV = score_vectors(HEADS), Q_STEP = PP_PAIR_FLOATS * HEADS;
    const int columns = value_vectors(HEADS) * PP_LANES;
    float *second = s + HEADS * PP_TILE;
    weighing to_do = {.end = HEADS, .s = s, .m = m, .rows = rows, .row_stride = tile->row_stride};
    for (int vector = 0; vector < VECTORS / 2; vector += NV)
        scores(DT, HEADS, NV, 2, 0, MODE, tile, vector, q, Q_STEP, s, NULL);
    transform_scores(tile, 0, HEADS, s);
    scales[0] = raise_if_above(HEADS, s, m, rows, tile->row_stride, rescale[0]) ? rescale[0] : NULL;
    if (HEADS <= WEIGHED_BEFORE) {
        while (to_do.next < to_do.end) weigh_next(&to_do);
        if (NV < VECTORS) scores(DT, HEADS, NV, 2, 0, MODE, tile, NV, q, Q_STEP, s, NULL);
    } else if (NV == VECTORS / 2) {
        scores(DT, HEADS, NV, 2, HEADS, MODE, tile, NV, q, Q_STEP, s, &to_do);
    } else {
        scores(DT, HEADS, NV, 2, HEADS / 2, MODE, tile, VECTORS / 2, q, Q_STEP, s, &to_do);
        scores(DT, HEADS, NV, 2, HEADS - HEADS / 2, MODE, tile, VECTORS / 2 + NV, q, Q_STEP, s, &to_do);
    }
    transform_scores(tile, PP_TILE, HEADS, second);
    scales[1] = raise_if_above(HEADS, second, m, rows, tile->row_stride, rescale[1]) ? rescale[1] : NULL;
    to_do.next = 0;
    to_do.s = second;
    values(DT, HEADS, value_vectors(HEADS), 0, 2, 1, MODE, tile, PP_V_RUN, 0, 0, 2 * PP_TILE, s, scales, rows,
           &to_do);
    for (int d = columns; d < tile->v_head_dim; d += columns)
        values(DT, HEADS, value_vectors(HEADS), 0, 2, 0, MODE, tile, PP_V_RUN, d, 0, 2 * PP_TILE, s, scales, rows,
               NULL);
}

PP_FOR_DTYPES_AND_HEADS(two_tiles_unprefetched, (int heads, const pp_tile *tile, const float *q, float *rows, float *m),
                        (heads, tile, q, rows, m),
                        two_tiles(DT, HEADS, PP_PREFETCH_NONE, tile, q, rows, m))
PP_FOR_DTYPES_AND_HEADS(two_tiles, (int heads, const pp_tile *tile, const float *q, float *rows, float *m),
                        (heads, tile, q, rows, m),
                        two_tiles(DT, HEADS, PP_PREFETCH_TWICE, tile, q, rows, m))
#endif

/* The prefetch mode of part `place` of a head's rows.  All parts read the same bytes one after another.  The first part
 * prefetches the data that is read next. */
PP_INLINE int part_mode(const int DT, int mode, int place, int parts, const pp_tile *tile) {
    (void)DT, (void)parts, (void)tile;
    return place == 0 ? mode : PP_PREFETCH_NONE;
}
