/* decode_math.h: exp, weights and merging of partial results, in an instruction set's vocabulary.  Once per ISA. */

/* 2^x, and exp(x), for x <= 127: x (or x / ln 2) is n + r with n a multiple of 1/8, 2^n is put together from a table
 * and an exponent, and 2^r a polynomial of degree 3 (minimax: 2.7e-8 of the value); 1.2 ulp in all.  In the kernels
 * everything is in base 2, since splitting x takes sums only there: of all operations 4 are done by units that
 * multiply, which are busy.  0 from -127 down; NaN stays NaN. */
#define PP_EIGHTHS 1572864.0f /* 1.5 * 2^20: adding it leaves eighths; the last bits are n * 8 */
PP_INLINE pp_v exp2_of_parts(pp_v biased, pp_v r) {
    const pp_v power = v_pow2_eighths(biased);
    const pp_v p = v_fma(v_fma(v_set1(5.549622327e-2f), r, v_set1(2.402576357e-1f)), r, v_set1(6.931472421e-1f));
    return v_fma(v_mul(power, r), p, power);
}
PP_INLINE pp_v v_exp2(pp_v x) {
    const pp_v eighths = v_set1(PP_EIGHTHS), bounded = v_max(v_set1(-127.0f), x), biased = v_add(bounded, eighths);
    return exp2_of_parts(biased, v_sub(bounded, v_sub(biased, eighths)));
}
PP_INLINE pp_v v_exp(pp_v x) {
    const pp_v eighths = v_set1(PP_EIGHTHS), log2_e = v_set1((float)PP_LOG2_E);
    const pp_v bounded = v_max(v_set1(-88.03f), x), biased = v_fma(bounded, log2_e, eighths);
    const pp_v r = v_fma(bounded, log2_e, v_sub(eighths, biased));
    return exp2_of_parts(biased, v_fma(bounded, v_set1((float)(PP_LOG2_E - (float)PP_LOG2_E)), r));
}

/* The first lane; and those of one number by the very same operations. */
static inline float v_first(pp_v x) {
    float lanes[PP_LANES];
    v_store(lanes, x);
    return lanes[0];
}
static inline float exp2_one(float x) { return v_first(v_exp2(v_set1(x))); }
static inline float exp_one(float x) { return v_first(v_exp(v_set1(x))); }

/* Scores (in base 2) may lie this much above what they are shifted by before that is raised: a weight is 2^8 at most,
 * as if there were 256 times as many tokens, and hardly any tile but a chunk's first raises a shift (lazy rescaling, as
 * in FlashAttention-4).  Of 7 heads with normally distributed scores one has a new maximum in 10 of a chunk's 16 tiles.
 */
#define PP_SLACK 8.0f

/* The highest scores of a head's tile, lane by lane. */
PP_INLINE pp_v highest_of(const float *s) {
    pp_v highest = v_load(s);
    PP_UNROLL for (int t = PP_LANES; t < PP_TILE; t += PP_LANES) highest = v_max(highest, v_load(s + t));
    return highest;
}

/* Raises the shifts m of `heads` heads to the maxima of their scores s where these are higher by more than the slack:
 * rescale becomes 2^(old - new), or 1, of each head, and its running sums are scaled.  Rare but in a chunk's first
 * tile: all heads at once, so that neither the exps nor the branches are one head's. */
enum {
    PP_MOST_ROWS = PP_PANEL > PP_MAX_HEADS ? PP_PANEL : PP_MAX_HEADS,
    PP_RESCALES = (PP_MOST_ROWS + PP_LANES - 1) / PP_LANES * PP_LANES
};
static __attribute__((noinline)) void raise_shifts(int heads, const float *s, float *m, float *rows,
                                                   int64_t row_stride, float *rescale) {
    for (int g = 0; g < PP_RESCALES; g++) rescale[g] = 0.0f;
    for (int g = 0; g < heads; g++) {
        const pp_v highest = highest_of(s + g * PP_TILE);
        if (!v_any_above(v_sub(highest, v_set1(m[g])), PP_SLACK)) continue;
        const float higher = v_highest(highest);
        rescale[g] = m[g] - higher;
        m[g] = higher;
    }
    for (int g = 0; g < heads; g += PP_LANES) v_store(rescale + g, v_exp2(v_load(rescale + g)));
    for (int g = 0; g < heads; g++) {
        float *sums = rows + (g + 1) * row_stride - PP_GROUP;
        const pp_v scale = v_set1(rescale[g]);
        for (int i = 0; i < PP_GROUP; i += PP_LANES) v_store(sums + i, v_mul(v_load(sums + i), scale));
    }
}

/* The same unless none is higher, which is the rule; whether some shift rose, and rescale was set.  One comparison for
 * all heads: it would take an fma's place for each. */
PP_INLINE int raise_if_above(const int HEADS, const float *s, float *m, float *rows, int64_t row_stride,
                             float *rescale) {
    pp_v most = v_set1(0.0f);
    PP_UNROLL for (int g = 0; g < HEADS; g++) /* a NaN does not count, of whatever head */
        most = v_max(v_sub(highest_of(s + g * PP_TILE), v_set1(m[g])), most);
    const int above = v_any_above(most, PP_SLACK);
    if (above) raise_shifts(HEADS, s, m, rows, row_stride, rescale);
    return above;
}

/* Makes a head's scores s of a tile weights, and adds them to its running sums. */
PP_INLINE void weigh(float *s, float shift, float *sums) {
    enum { VECTORS = PP_TILE / PP_LANES, SUMS = PP_GROUP / PP_LANES };
    pp_v x[VECTORS];
    PP_UNROLL for (int j = 0; j < VECTORS; j++) {
        x[j] = v_exp2(v_sub(v_load(s + j * PP_LANES), v_set1(shift)));
        v_store(s + j * PP_LANES, x[j]);
    }
    PP_UNROLL for (int j = 0; j < SUMS; j++)
        v_store(sums + j * PP_LANES, v_add(v_load(sums + j * PP_LANES), v_add(x[j], x[j + SUMS])));
}

/* Heads [next, end) that are still to be weighed, one by one. */
typedef struct weighing {
    int next, end;
    float *s, *m, *rows;
    int64_t row_stride;
} weighing;

/* The same for all heads, after raising shifts; whether some rose, and rescale was set. */
PP_INLINE int make_weights(const int HEADS, float *s, float *m, float *rows, int64_t row_stride, float *rescale) {
    const int raised = raise_if_above(HEADS, s, m, rows, row_stride, rescale);
    PP_UNROLL for (int g = 0; g < HEADS; g++) weigh(s + g * PP_TILE, m[g], rows + (g + 1) * row_stride - PP_GROUP);
    return raised;
}

/* PP_FOR_HEADS defines PP_NAME(name), a function of `heads`, 1 to PP_MAX_HEADS, that does `call` with HEADS, a
 * constant, for `heads`: loops over heads are unrolled in it.  Each number's call is a function by itself, since gcc
 * took half as long again for one that had all.  Where no loop is unrolled HEADS is a variable and one copy of the call
 * serves all numbers: under ASan gcc takes a fourth of the time for it. */
#if PP_UNROLLS
#define PP_HEADS_TO_4(DO, ...) DO(1, __VA_ARGS__) DO(2, __VA_ARGS__) DO(3, __VA_ARGS__) DO(4, __VA_ARGS__)
#define PP_HEADS_TO_6(DO, ...) PP_HEADS_TO_4(DO, __VA_ARGS__) DO(5, __VA_ARGS__) DO(6, __VA_ARGS__)
#define PP_HEADS_TO_8(DO, ...) PP_HEADS_TO_6(DO, __VA_ARGS__) DO(7, __VA_ARGS__) DO(8, __VA_ARGS__)
#define PP_EACH_HEADS PP_CAT(PP_HEADS_TO_, PP_MAX_HEADS, )
#define PP_DEFINE(n, name, parameters, arguments, call) \
    static __attribute__((noinline)) void PP_NAME(name##_##n) parameters { \
        enum { HEADS = n }; \
        (void)heads; \
        call; \
    }
#define PP_CASE(n, name, parameters, arguments, call) \
    case n: PP_NAME(name##_##n) arguments; break;
#define PP_FOR_HEADS(name, parameters, arguments, call) \
    PP_EACH_HEADS(PP_DEFINE, name, parameters, arguments, call) \
    static __attribute__((noinline)) void PP_NAME(name) parameters { \
        switch (heads) { PP_EACH_HEADS(PP_CASE, name, parameters, arguments, call) } \
    }
#else
#define PP_FOR_HEADS(name, parameters, arguments, call) \
    static __attribute__((noinline)) void PP_NAME(name) parameters { \
        const int HEADS = heads; \
        call; \
    }
#endif

/* tanh(x) for x from -0.625 to 0.625, odd. */
PP_INLINE pp_v tanh_near(pp_v x) {
    const pp_v z = v_mul(x, x);
    pp_v p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, z, v_set1(2.06390887954e-2f));
    p = v_fma(p, z, v_set1(-5.37397155531e-2f));
    p = v_fma(p, z, v_set1(1.33314422036e-1f));
    p = v_fma(p, z, v_set1(-3.33332819422e-1f));
    return v_fma(v_mul(p, z), x, x);
}

/* tanh(x): a polynomial near 0 (Cephes), by exp elsewhere. */
PP_INLINE pp_v v_tanh(pp_v x) {
    const pp_v one = v_set1(1.0f), border = v_set1(0.625f);
    const pp_v size = v_max(x, v_sub(v_set1(0.0f), x)); /* a NaN in x is kept */
    if (!v_any_above(size, 0.62499994f)) return tanh_near(x); /* the float below 0.625: none is far */
    const pp_v e = v_exp2(v_mul(size, v_set1((float)(-2.0 * PP_LOG2_E)))), far = v_div(v_sub(one, e), v_add(one, e));
    const pp_v small = v_sub(v_set1(0.0f), v_max(v_set1(-0.625f), v_sub(v_set1(0.0f), size)));
    const pp_v near = tanh_near(small);
    const pp_v y = v_add(v_zero_below(far, size, border), v_sub(near, v_zero_below(near, size, border)));
    return v_sub(v_zero_below(v_add(y, y), x, v_set1(0.0f)), y);
}

/* Soft cap, in base 2 as scores are. */
static __attribute__((noinline)) void cap_scores(const pp_tile *tile, int heads, float *s) {
    const pp_v cap = v_set1(tile->cap), inverse = v_set1(tile->inverse_cap);
    for (int t = 0; t < heads * PP_TILE; t += PP_LANES)
        v_store(s + t, v_mul(cap, v_tanh(v_mul(v_load(s + t), inverse))));
}

/* The positions first + t of a tile's tokens, each rounded by itself, so that none depends on the number of lanes
 * beyond 2^24 either: a multiple of 256, which is a float up to 2^31, and what is left over are added once. */
PP_INLINE void make_positions(int32_t first, pp_v *positions) {
    static const float tokens[PP_TILE] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    const int32_t left = first & 255;
    const pp_v least = v_set1((float)(first - left)), from = v_set1((float)left);
    PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++)
        positions[j] = v_add(least, v_add(from, v_load(tokens + j * PP_LANES)));
}

/* ALiBi: the scores of rows of a tile that begins `behind` tokens behind the tile at hand. */
static __attribute__((noinline)) void add_slopes(const pp_tile *tile, int behind, int heads, float *s) {
    pp_v positions[PP_TILE / PP_LANES];
    int32_t query = tile->row / tile->group_size, head = tile->row % tile->group_size;
    const int32_t first = (int32_t)tile->distance + behind;
    make_positions(first - query, positions);
    for (int g = 0; g < heads; g++, s += PP_TILE, head++) {
        if (head == tile->group_size) {
            head = 0;
            make_positions(first - ++query, positions);
        }
        const pp_v slope = v_set1(tile->alibi_slopes[head]);
        PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++)
            v_store(s + j * PP_LANES, v_fma(slope, positions[j], v_load(s + j * PP_LANES)));
    }
}

/* Transforms the scores of `heads` rows of the tile that begins `behind` tokens behind the one at hand. */
PP_INLINE void transform_scores(const pp_tile *tile, int behind, int heads, float *s) {
    if (tile->cap != 0.0f) cap_scores(tile, heads, s);
    if (tile->alibi_slopes) add_slopes(tile, behind, heads, s);
}

#define ALL_SEEN 0xffffffffu

/* The first run of tokens that are seen, [from, to), and what is seen behind it; something is. */
PP_INLINE uint32_t take_run(uint32_t seen, int *from, int *to) {
    *from = __builtin_ctz(seen);
    const uint32_t behind = ~(seen >> *from);
    *to = *from + (behind ? __builtin_ctz(behind) : PP_TILE);
    return *to < PP_TILE ? seen >> *to << *to : 0;
}

/* Of the rows of a kv head from row r on, up to `to`, those that see the same of the tile: where they end is returned,
 * and `seen` of the tile is theirs.  Row r is row `at` of all. */
PP_INLINE int32_t rows_alike(const pp_chunk *work, pp_tile *tile, int32_t r, int32_t to, int32_t at) {
    const int32_t group_size = work->group_size;
    if (!work->seen) return to;
    tile->seen = pp_tile_seen(&work->view, r / group_size, tile->begin);
    int32_t end = r - r % group_size + group_size;
    while (end < to && pp_tile_seen(&work->view, end / group_size, tile->begin) == tile->seen) end += group_size;
    if (end > to) end = to;
    for (int32_t i = 0; tile->seen && i < end - r; i++) work->seen[at + i] = 1.0f;
    return end;
}

/* Tokens that are not seen score -inf. */
static __attribute__((noinline)) void mask_scores(const pp_tile *tile, int heads, float *s) {
    for (int g = 0; g < heads; g++, s += PP_TILE)
        for (int t = 0; t < PP_TILE; t++)
            if (!(tile->seen >> t & 1)) s[t] = -INFINITY;
}

/* The sum of 16 numbers: lanes i and i + 8, then i and i + 4, ... */
PP_INLINE float tree_sum(const pp_v *x) {
    pp_v sum[PP_GROUP / PP_LANES];
    for (int j = 0; j < PP_GROUP / PP_LANES; j++) sum[j] = x[j];
    for (int half = PP_GROUP / PP_LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) sum[j] = v_add(sum[j], sum[j + half]);
    return v_sum(sum[0]);
}

/* The sum of the 16 running sums of a row. */
PP_INLINE float total_of(const float *sums) {
    pp_v sum[PP_GROUP / PP_LANES];
    for (int j = 0; j < PP_GROUP / PP_LANES; j++) sum[j] = v_load(sums + j * PP_LANES);
    return tree_sum(sum);
}

/* Adds the weights p of a tile to the sums of its blocks, piece by piece: a piece is what a block has of a group of 16
 * tokens, whatever the block size. */
static __attribute__((noinline)) void add_to_blocks(const pp_tile *tile, int heads, const float *p,
                                                    const float *rescale) {
    float *sums = tile->block_sums;
    for (int g = 0; g < heads; g++, sums += tile->num_blocks, p += PP_TILE) {
        if (rescale)
            for (int b = 0; b < tile->num_blocks; b++) sums[b] *= rescale[g];
        for (int at = 0, end; at < PP_TILE; at = end) {
            const int64_t block = (tile->begin + at) / tile->block_size;
            const int64_t left = (block + 1) * tile->block_size - (tile->begin + at), group = PP_GROUP - at % PP_GROUP;
            end = at + (int)(left < group ? left : group);
            if (!(tile->seen & pp_bits_between(at, end))) continue;
            float piece[PP_GROUP] = {0};
            pp_v x[PP_GROUP / PP_LANES];
            for (int t = at; t < end; t++) piece[t % PP_GROUP] = p[t];
            for (int j = 0; j < PP_GROUP / PP_LANES; j++) x[j] = v_load(piece + j * PP_LANES);
            sums[block - tile->first_block] += tree_sum(x);
        }
    }
}

/* Stores a vector of scores: of the chain over EVEN dims, of both chains, or that over ODD ones added to the former. */
PP_INLINE void store_chains(const int EVEN, const int ODD, float *to, pp_v even, pp_v odd) {
    v_store(to, !ODD ? even : v_add(EVEN ? even : v_load(to), odd));
}

/* How the rows of a kv head are cut into parts that share loads: about equal ones of up to PP_MAX_HEADS. */
PP_INLINE int32_t num_parts(int32_t head_rows) {
    return head_rows / PP_MAX_HEADS + (head_rows % PP_MAX_HEADS != 0);
}
PP_INLINE int32_t part_border(int32_t head_rows, int32_t part) {
    if (num_parts(head_rows) == 1) return part * head_rows; /* the rule: no division */
    return (int32_t)((int64_t)head_rows * part / num_parts(head_rows));
}
/* The first row of a part, where parts are numbered through all kv heads. */
PP_INLINE int32_t row_of_part(int32_t head_rows, int32_t part) {
    if (num_parts(head_rows) == 1) return part * head_rows;
    return part / num_parts(head_rows) * head_rows + part_border(head_rows, part % num_parts(head_rows));
}

/* A row's result while its chunks are merged; `m` and `total` (in all lanes) are those of all chunks so far. */
typedef struct merged_row {
    pp_v total;
    float m;
    int empty;        /* no chunk had a token that the row sees */
    const float *sum; /* a chunk's where it lies, or what merging left */
} merged_row;

/* Merges the next chunk's sums, `width` floats, into those of the chunks before, which are in `to` then. */
PP_INLINE void merge_record(merged_row *merged, float *to, const float *sums, float total, float m, int64_t width) {
    const float both = m > merged->m ? m : merged->m;
    const pp_v old_scale = v_exp2(v_set1(merged->m - both)), scale = v_exp2(v_set1(m - both));
    merged->total = v_add(v_mul(merged->total, old_scale), v_mul(v_set1(total), scale));
    merged->m = both;
    for (int64_t d = 0; d < width; d += PP_LANES)
        v_store(to + d, v_fma(v_load(sums + d), scale, v_mul(v_load(merged->sum + d), old_scale)));
    merged->sum = to;
}

/* The same for a sink: a chunk that has a weight and no value. */
PP_INLINE void merge_sink(merged_row *merged, float *to, float sink, int64_t width) {
    const float m = pp_in_base_2(sink), both = m > merged->m ? m : merged->m;
    const pp_v old_scale = v_exp2(v_set1(merged->m - both));
    merged->total = v_add(v_mul(merged->total, old_scale), v_exp2(v_set1(m - both)));
    merged->m = both;
    for (int64_t d = 0; d < width; d += PP_LANES) v_store(to + d, v_mul(v_load(merged->sum + d), old_scale));
    merged->sum = to;
}

static void merge_row(const pp_merge *work, int64_t r, const float *sink, merged_row *merged, float *scaled) {
    const pp_chunk *chunk = work->chunk;
    const int64_t width = chunk->row_stride - PP_GROUP;
    merged->empty = 1;
    for (int64_t c = 0; c < work->num_chunks; c++) {
        const float *row = chunk->rows + r * chunk->row_stride + c * work->record_stride;
        const float m = chunk->m[r + c * work->record_stride];
        if (chunk->seen && chunk->seen[r + c * work->record_stride] == 0.0f) continue;
        if (merged->empty)
            *merged = (merged_row){.total = v_set1(row[width]), .m = m, .sum = row};
        else
            merge_record(merged, scaled, row, row[width], m, width);
    }
    if (sink && !merged->empty) merge_sink(merged, scaled, *sink, width);
}

/* out[:dims] = the row's result. */
static void write_row(const merged_row *merged, float *out, int64_t dims) {
    if (merged->empty) {
        memset(out, 0, (size_t)dims * sizeof(float));
        return;
    }
    int64_t d = 0;
    for (; d + PP_LANES <= dims; d += PP_LANES) v_store(out + d, v_div(v_load(merged->sum + d), merged->total));
    if (d < dims) {
        float rest[PP_LANES];
        v_store(rest, v_div(v_load(merged->sum + d), merged->total));
        memcpy(out + d, rest, (size_t)(dims - d) * sizeof(float));
    }
}

/* The same in elements of `dtype`, from element `at` of `out` on. */
static void write_result(const merged_row *merged, void *out, int32_t dtype, int64_t at, int64_t dims) {
    if (dtype == PP_F32) {
        write_row(merged, (float *)out + at, dims);
        return;
    }
    float row[PP_MAX_HEAD_DIM];
    write_row(merged, row, dims);
    (dtype == PP_F16 ? narrow_f16 : narrow_bf16)((uint16_t *)out + at, row, dims);
}

/* Block by block the row's weights, out of the sums of its chunks; 0 for blocks outside of what it may see. */
static void merge_block_scores(const pp_merge *work, int64_t r, int64_t query, const merged_row *merged,
                               float *scores) {
    const pp_chunk *chunk = work->chunk;
    const int64_t block_size = chunk->pool->layout.block_size;
    memset(scores, 0, (size_t)work->width * sizeof(float));
    if (merged->empty) return;
    const int64_t begin = pp_first_seen(&chunk->view, query) / block_size;
    const int64_t end = (pp_end_seen(&chunk->view, query) + block_size - 1) / block_size;
    for (int64_t c = 0; c < work->num_chunks; c++) {
        const int64_t first = (chunk->begin + c * PP_CHUNK) / block_size;
        const float *sums = chunk->block_sums + r * chunk->num_blocks + c * work->record_stride;
        if (chunk->seen && chunk->seen[r + c * work->record_stride] == 0.0f) continue;
        const float scale = exp2_one(chunk->m[r + c * work->record_stride] - merged->m); /* may be NaN: 0 of it too */
        for (int64_t b = begin > first ? begin - first : 0; b < chunk->num_blocks && first + b < end; b++) {
            const float weight = sums[b] * scale;
            scores[first + b] += weight;
        }
    }
    const float total = v_first(merged->total);
    for (int64_t b = begin; b < end; b++) scores[b] /= total;
}

static void merge_chunks(const pp_merge *work) {
    const pp_chunk *chunk = work->chunk;
    const int32_t group_size = chunk->group_size, head_rows = group_size * chunk->view.num_queries;
    const int32_t last = row_of_part(head_rows, chunk->part_end);
    merged_row merged;
    float scaled[PP_MAX_HEAD_DIM];
    for (int32_t r = row_of_part(head_rows, chunk->part_begin); r < last; r++) {
        const int32_t query = r % head_rows / group_size, head = r / head_rows * group_size + r % group_size;
        const int64_t at = (int64_t)query * work->num_qo_heads + head;
        merge_row(work, r, work->sinks ? work->sinks + head : NULL, &merged, scaled);
        write_result(&merged, work->out, work->out_dtype, at * work->v_head_dim, work->v_head_dim);
        if (work->lse) work->lse[at] = merged.empty ? -INFINITY : pp_lse(merged.m, v_first(merged.total));
        if (work->block_scores) merge_block_scores(work, r, query, &merged, work->block_scores + at * work->width);
    }
}

/* to[:n] = a * to + b * from, or b * from where a is 0: what has no weight does not count, be it NaN. */
PP_INLINE void add_weighted(float *to, float a, const float *from, float b, int64_t n) {
    int64_t d = 0;
    for (; d + PP_LANES <= n; d += PP_LANES) {
        const pp_v scaled = v_mul(v_load(from + d), v_set1(b));
        v_store(to + d, a != 0.0f ? v_fma(v_load(to + d), v_set1(a), scaled) : scaled);
    }
    if (d < n) { /* the rest, by way of whole vectors, so that it is rounded as they are */
        float x[PP_LANES] = {0}, y[PP_LANES] = {0};
        memcpy(x, to + d, (size_t)(n - d) * sizeof(float));
        memcpy(y, from + d, (size_t)(n - d) * sizeof(float));
        const pp_v scaled = v_mul(v_load(y), v_set1(b));
        v_store(x, a != 0.0f ? v_fma(v_load(x), v_set1(a), scaled) : scaled);
        memcpy(to + d, x, (size_t)(n - d) * sizeof(float));
    }
}

/* Weights first, so that each part is read once and the result is divided by nothing.  Where there are no parts or no
 * dims there may be no arrays of them either. */
static void merge_rows(const pp_merge_args *args) {
    for (int64_t r = 0; r < args->num_rows; r++) {
        const int64_t s = r * args->s_stride_row, v = r * args->v_stride_row;
        float maximum = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < args->num_parts; i++) {
            const float part = args->s[s + i * args->s_stride_part];
            if (!(part <= maximum)) maximum = part; /* of a NaN weight and result are NaN anyway */
        }
        const float shift = maximum == -INFINITY ? 0.0f : maximum; /* nothing less nothing is NaN */
        for (int64_t i = 0; i < args->num_parts; i++) total += exp_one(args->s[s + i * args->s_stride_part] - shift);
        int empty = 1;
        for (int64_t i = 0; i < args->num_parts; i++) {
            const float part = args->s[s + i * args->s_stride_part], weight = exp_one(part - shift) / total;
            if (part == -INFINITY) continue;
            if (args->head_dim)
                add_weighted(args->out + r * args->head_dim, empty ? 0.0f : 1.0f, args->v + v + i * args->v_stride_part,
                             weight, args->head_dim);
            empty = 0;
        }
        if (empty && args->head_dim)
            memset(args->out + r * args->head_dim, 0, (size_t)args->head_dim * sizeof(float));
        if (args->lse) args->lse[r] = empty ? -INFINITY : maximum + logf(total);
    }
}
