/* decode_step_fma.h: the stages of decode_step.h in exact arithmetic. */

/* Between products of up to 6 heads softmax took 1 % more than before them. */
enum { PP_NAME(TOGETHER) = 0, PP_NAME(BEFORE) = 6 };

/* Scores of NV vectors of tokens, the `first` of 64 / PP_LANES, by chains over EVEN dims and over ODD ones; meanwhile
 * WEIGHED heads become weights. */
PP_INLINE void PP_NAME(step_chains)(const int HEADS, const int NV, const int EVEN, const int ODD, const int WEIGHED,
                                    const int AGAIN, const pp_tile *tile, const int first, const float *q, float *s,
                                    weighing *to_do) {
    enum { VECTORS = PP_TILE / PP_LANES, PER_GROUP = PP_GROUP / PP_LANES };
    /* In 16 bit a chain that goes alone asks for one group's K, line behind line, and the other chain for the other's,
     * unless they ask by sides; so do the passes over values, below.  Each for its part of all groups, lines of a page
     * were asked for in steps of two: S2 took 1.5 % longer and with two threads 2 to 7 %. */
    const int ALONE = EVEN != ODD && NV == 2 && PER_GROUP == 1, IN_LINE = ALONE && PP_ITEM == 2;
    const int BY_SIDES = is_by_sides(AGAIN, PP_ITEM, ALONE);
    /* Lines that a pair of rows asks for by sides; a turn takes two pairs, or as many as ask for one of each group. */
    const int LINES = NV * (EVEN && ODD ? 2 : 1) * PP_ITEM / 4, PAIRS = BY_SIDES && LINES == 1 ? 4 : 2;
    const int STEP = PAIRS * HEADS * 2;
    const int bytes = PP_NAME(chain_bytes)(EVEN, ODD), skip = PP_NAME(chain_skips)(EVEN);
    const unsigned char *row = tile->k[first / PER_GROUP];
    int64_t here[4], ahead[4], half[4]; /* from there to what a vector reads, and to what is asked for */
    pp_v even[PP_MAX_HEADS * 4], odd[PP_MAX_HEADS * 4];
    PP_UNROLL for (int j = 0; j < NV; j++) {
        const int group = (first + j) / PER_GROUP;
        here[j] = j ? apart(tile->k[group], row) : 0;
        ahead[j] = apart(tile->next_k[group], row);
        half[j] = apart(tile->v[group], row);
    }
    PP_UNROLL for (int i = 0; i < HEADS * NV; i++) even[i] = odd[i] = v_set1(0.0f);
    pp_sides sides; /* by prefetch_sides.h; each call moves by its share of K */
    if (BY_SIDES)
        sides = sides_at(AGAIN, PP_ITEM, tile, (ALONE ? first + ODD : first / NV) * (tile->head_dim * LINES / 8));
    const int64_t steps = tile->head_dim / (2 * PAIRS), piece = steps / (WEIGHED + 1);
    const float *end = q + steps * STEP;
    for (int heads = WEIGHED; heads >= 0; heads--) {
        for (const float *stop = heads ? q + piece * STEP : end; q < stop; q += STEP) {
            if (BY_SIDES) PP_FORGET(sides.at);
            PP_FORGET(row); /* or each of the places is counted up, and registers do not suffice */
            PP_UNROLL for (int i = 0; i < PAIRS; i++, row += PP_NAME(K_PAIR_BYTES)) {
                const int asks = AGAIN && !BY_SIDES && (IN_LINE || PP_NAME(chain_asks)(EVEN, ODD, i));
                pp_v a[4], b[4];
                PP_UNROLL for (int j = 0; j < NV; j++)
                    LOAD2(distant(row, here[j]), PP_GROUP, (first + j) % PER_GROUP * PP_LANES, &a[j], &b[j]);
                PP_UNROLL for (int g = 0; g < HEADS; g++) {
                    PP_UNROLL for (int j = 0; j < NV; j++)
                        if (asks && (IN_LINE ? j == ODD : (first + j) % PER_GROUP == 0))
                            prefetch_share(g, HEADS, AGAIN, PP_ITEM == 4, bytes, distant(row, ahead[j]) + skip,
                                           distant(row, half[j]) + skip, distant(row, here[j]) + PP_NEAR,
                                           distant(row, here[j]) + PP_NEARER);
                    if (BY_SIDES) prefetch_sides(AGAIN, g, HEADS, LINES * i % 4, LINES, &sides);
                    const float *pair = q + (i * HEADS + g) * 2;
                    const pp_spread x = v_spread(pair + !EVEN), y = EVEN && ODD ? v_spread(pair + 1) : x;
                    PP_UNROLL for (int j = 0; j < NV; j++) {
                        if (EVEN) even[g * NV + j] = v_fma_spread(a[j], x, even[g * NV + j]);
                        if (ODD) odd[g * NV + j] = v_fma_spread(b[j], y, odd[g * NV + j]);
                    }
                }
                if (BY_SIDES && LINES * (i + 1) % 4 == 0) sides.at += 64;
            }
        }
        if (heads) PP_NAME(weigh_next)(to_do);
    }
    PP_UNROLL for (int j = 0; j < NV; j++) {
        float *to = s + (first + j) / VECTORS * HEADS * PP_TILE + (first + j) % VECTORS * PP_LANES;
        PP_UNROLL for (int g = 0; g < HEADS; g++)
            store_chains(EVEN, ODD, to + g * PP_TILE, even[g * NV + j], odd[g * NV + j]);
    }
}

/* The same by both chains: at once, if there are registers for them. */
PP_INLINE void PP_NAME(step_scores)(const int HEADS, const int NV, const int WEIGHED, const int AGAIN,
                                    const pp_tile *tile, const int first, const float *q, float *s, weighing *to_do) {
    const int APART = chains_apart(HEADS), later = APART ? WEIGHED / 2 : 0;
    PP_NAME(step_chains)(HEADS, NV, 1, !APART, WEIGHED - later, AGAIN, tile, first, q, s, to_do);
    PP_FORGET(s); /* or the former's sums stay in registers, which the latter needs */
    if (APART) PP_NAME(step_chains)(HEADS, NV, 0, 1, later, AGAIN, tile, first, q, s, to_do);
}

/* Adds p V of both tiles to NV vectors of dims, from `column` of V's dims on; scales: of each tile, or NULL.  What is
 * still to be weighed, of the second tile, is so while the first one is added. */
PP_INLINE void PP_NAME(step_values)(const int HEADS, const int NV, const int WEIGHS, const int AGAIN,
                                    const pp_tile *tile, int column, const float *p, const float *const *scales,
                                    float *o, weighing *to_do) {
    enum { PAIR_BYTES = 2 * PP_V_RUN * PP_ITEM, RUN_BYTES = PP_NAME(RUN_BYTES) };
    const int64_t run = (int64_t)(column / PP_V_RUN) * RUN_BYTES;
    /* Each pass prefetches its part of every pair of rows: Zen 4 drops prefetches that come faster than the memory.
     * `asked` from the part that it reads. */
    const int part = NV * PP_LANES * 2 * PP_ITEM;
    const int64_t from = run + column % PP_V_RUN * PP_COLUMN, asked = column % PP_V_RUN * (2 * PP_ITEM - PP_COLUMN);
    const int last_run = column / PP_V_RUN + 1 == tile->v_head_dim / PP_V_RUN;
    /* In 16 bit wide units whose passes are parts of a run ask for whole runs: a pass for those of some of the four
     * groups, which are as many bytes as its parts of all four. */
    const int PASSES = PP_V_RUN / (NV * PP_LANES), IN_LINE = PP_WIDE && PP_ITEM == 2 && PASSES > 1;
    const int first_asked = column % PP_V_RUN / (NV * PP_LANES) * (4 / PASSES);
    _Static_assert(PP_MAX_HEADS <= 2 * PP_GROUP / 4, "a head with every fourth token of the first tile");
    const int BY_SIDES = is_by_sides(AGAIN, PP_ITEM, PASSES > 1), LINES = NV * PP_ITEM / 2; /* of a pair of rows */
    pp_sides sides;
    pp_v sum[PP_MAX_HEADS * 8];
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            sum[g * NV + j] = v_load(o + g * tile->row_stride + column + j * PP_LANES);
    for (int i = 0; i < 4; i++) {
        if (BY_SIDES && i % 2 == 0)
            sides = sides_at(AGAIN, PP_ITEM, tile, (tile->head_dim + column) * PP_ITEM / 4 + i * 2 * LINES);
        const float *scale = i % 2 ? NULL : scales[i / 2];
        if (scale)
            PP_UNROLL for (int g = 0; g < HEADS; g++)
                PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = v_mul(sum[g * NV + j], v_set1(scale[g]));
        const unsigned char *rows = tile->v[i] + from, *end = tile->v[i] + run + RUN_BYTES;
        int64_t ahead = apart(tile->next_v[i], tile->v[i]) + asked, half = apart(tile->next_k[i], tile->v[i]) + asked;
        const int64_t near = last_run ? half - run : asked + RUN_BYTES;
        const int64_t begin = run + i % PASSES * (RUN_BYTES / PASSES);
        const unsigned char *visit = distant(tile->next_v[first_asked + i / PASSES], begin);
        const int64_t gap = apart(tile->next_k[first_asked + i / PASSES], tile->next_v[first_asked + i / PASSES]);
        const float *weight = p + i / 2 * HEADS * PP_TILE + i % 2 * PP_GROUP;
        for (int pair = 0; pair < PP_GROUP / 2; pair++, rows += PAIR_BYTES, weight += 2) {
            pp_v a[8], b[8];
            const int64_t nearer = asked + (!last_run || rows + asked < end - PP_NEARER ? PP_NEARER : 0);
            if (WEIGHS && pair % 2 == 0 && to_do->next < to_do->end) PP_NAME(weigh_next)(to_do);
            PP_UNROLL for (int j = 0; j < NV; j++) LOAD2(rows, PP_V_RUN, j * PP_LANES, &a[j], &b[j]);
            PP_UNROLL for (int g = 0; g < HEADS; g++) {
                if (BY_SIDES)
                    prefetch_sides(AGAIN, g, HEADS, LINES == 2 ? pair % 2 * 2 : 0, LINES, &sides);
                else if (AGAIN && IN_LINE)
                    prefetch_share(g, HEADS, AGAIN, PP_ITEM == 4, part, visit, distant(visit, gap), visit, visit);
                else if (AGAIN)
                    prefetch_share(g, HEADS, AGAIN, PP_ITEM == 4, part, distant(rows, ahead), distant(rows, half),
                                   distant(rows, near), rows + nearer);
                const pp_spread x = v_spread(weight + g * PP_TILE);
                PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = v_fma_spread(a[j], x, sum[g * NV + j]);
            }
            if (IN_LINE) visit += part;
            if (BY_SIDES && (LINES > 2 || pair % 2)) sides.at += LINES > 4 ? 128 : 64;
            PP_UNROLL for (int g = 0; g < HEADS; g++) {
                const pp_spread x = v_spread(weight + g * PP_TILE + 1);
                PP_UNROLL for (int j = 0; j < NV; j++) sum[g * NV + j] = v_fma_spread(b[j], x, sum[g * NV + j]);
            }
        }
    }
    PP_UNROLL for (int g = 0; g < HEADS; g++)
        PP_UNROLL for (int j = 0; j < NV; j++)
            v_store(o + g * tile->row_stride + column + j * PP_LANES, sum[g * NV + j]);
}
