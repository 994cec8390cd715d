/* decode_math.h: softmax weights and merging of partial results for decode.  Included once per ISA, after
 * softmax_math.h. */

/* Lazy rescaling, as in FlashAttention-4: a score (in base 2) may exceed the current shift by this much before the
 * shift is raised.  A weight is then at most 2^8, as if there were 256 times as many tokens.  Few tiles except the
 * first one of a chunk raise the shift.  Without it, among 7 heads with normally distributed scores, one has a new
 * maximum in 10 of the 16 tiles of a chunk. */
#define PP_SLACK 8.0f

/* The maximum of a head's scores in a tile, in each lane. */
PP_INLINE pp_v highest_of(const float *s) {
    pp_v highest = v_load(s);
    PP_UNROLL for (int t = PP_LANES; t < PP_TILE; t += PP_LANES) highest = v_max(highest, v_load(s + t));
    return highest;
}

/* Raises the shifts m of `heads` heads to the maxima of their scores s, where the maximum exceeds the shift by more
 * than the slack.  Sets rescale to 2^(old - new), or 1, for each head and scales its running sums.  This is rare except
 * in the first tile of a chunk.  It handles all heads together, which shares the cost of exp2 and of the branches. */
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

/* The same with a fast path for the usual case that no shift rises.  Returns 1 if a shift rose and rescale was set.  A
 * single comparison covers all heads, because a comparison for each head would take an issue slot of an fma. */
PP_INLINE int raise_if_above(const int HEADS, const float *s, float *m, float *rows, int64_t row_stride,
                             float *rescale) {
    pp_v most = v_set1(0.0f);
    PP_UNROLL for (int g = 0; g < HEADS; g++) /* the maximum ignores NaN, in any head */
        most = v_max(v_sub(highest_of(s + g * PP_TILE), v_set1(m[g])), most);
    const int above = v_any_above(most, PP_SLACK);
    if (above) raise_shifts(HEADS, s, m, rows, row_stride, rescale);
    return above;
}

/* Converts a head's scores s of a tile to weights, and adds them to its running sums. */
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

/* Heads [next, end): their weights are still to be computed, one by one. */
typedef struct weighing {
    int next, end;
    float *s, *m, *rows;
    int64_t row_stride;
} weighing;

/* Raises shifts where scores exceed them, then calls `weigh` for each head.  Returns 1 if a shift rose: only then is
 * `rescale` set. */
PP_INLINE int make_weights(const int HEADS, float *s, float *m, float *rows, int64_t row_stride, float *rescale) {
    const int raised = raise_if_above(HEADS, s, m, rows, row_stride, rescale);
    PP_UNROLL for (int g = 0; g < HEADS; g++) weigh(s + g * PP_TILE, m[g], rows + (g + 1) * row_stride - PP_GROUP);
    return raised;
}

/* DT, the dtype of a page, is a constant argument of the functions that read pages: a pp_dtype, or PP_QUANTISED. */
enum { PP_QUANTISED = -1 };

/* Bytes of an element, and from one element of a row to the next: in bf16 two rows are interleaved. */
PP_INLINE int item_bytes(const int DT) { return DT == PP_F32 ? 4 : 2; }
PP_INLINE int column_bytes(const int DT) { return DT == PP_F16 ? 2 : 4; }
/* Returns 1 if the products take less time than loading the data from memory: prefetch.h. */
PP_INLINE int is_fast(const int DT) { return DT == PP_F32; }

/* Functions that are not inlined exist once for each dtype, under the name of the inline function that they call.
 * PP_FOR_DTYPES defines name_f32, name_f16 and name_bf16, which call `name` with the dtype and `arguments`.
 * PP_BY_DTYPE is the one for DT. */
#define PP_FOR_DTYPE(name, suffix, dtype, parameters, ...) \
    static __attribute__((noinline)) void name##_##suffix parameters { name(dtype, __VA_ARGS__); }
#define PP_FOR_DTYPES(name, parameters, ...) \
    PP_FOR_DTYPE(name, f32, PP_F32, parameters, __VA_ARGS__) \
    PP_FOR_DTYPE(name, f16, PP_F16, parameters, __VA_ARGS__) \
    PP_FOR_DTYPE(name, bf16, PP_BF16, parameters, __VA_ARGS__)
#define PP_BY_DTYPE(DT, name) ((DT) == PP_F32 ? name##_f32 : (DT) == PP_F16 ? name##_f16 : name##_bf16)

/* PP_FOR_HEADS defines `name`, a function of `heads`, 1 to PP_MAX_HEADS.  It does `call` with the constant HEADS equal
 * to `heads`, so that loops over heads are unrolled.  Each number of heads has a separate function: gcc took half as
 * long again to compile one function with all of them.  If loops are not unrolled, HEADS is a variable and one copy of
 * the call serves all numbers, which gcc compiles in a fourth of the time under ASan.  PP_FOR_DTYPES_AND_HEADS defines
 * name_f32, name_f16 and name_bf16, with the constant DT in `call`. */
#if PP_UNROLLS
#define PP_HEADS_TO_4(DO, ...) DO(1, __VA_ARGS__) DO(2, __VA_ARGS__) DO(3, __VA_ARGS__) DO(4, __VA_ARGS__)
#define PP_HEADS_TO_6(DO, ...) PP_HEADS_TO_4(DO, __VA_ARGS__) DO(5, __VA_ARGS__) DO(6, __VA_ARGS__)
#define PP_HEADS_TO_8(DO, ...) PP_HEADS_TO_6(DO, __VA_ARGS__) DO(7, __VA_ARGS__) DO(8, __VA_ARGS__)
#define PP_EACH_HEADS PP_CAT(PP_HEADS_TO_, PP_MAX_HEADS, )
#define PP_DEFINE(n, name, dtype, parameters, arguments, call) \
    static __attribute__((noinline)) void name##_##n parameters { \
        enum { HEADS = n, DT = dtype }; \
        (void)heads; \
        call; \
    }
#define PP_CASE(n, name, dtype, parameters, arguments, call) \
    case n: name##_##n arguments; break;
#define PP_FOR_HEADS(name, dtype, parameters, arguments, call) \
    PP_EACH_HEADS(PP_DEFINE, name, dtype, parameters, arguments, call) \
    static __attribute__((noinline)) void name parameters { \
        switch (heads) { PP_EACH_HEADS(PP_CASE, name, dtype, parameters, arguments, call) } \
    }
#else
#define PP_FOR_HEADS(name, dtype, parameters, arguments, call) \
    static __attribute__((noinline)) void name parameters { \
        enum { DT = dtype }; \
        const int HEADS = heads; \
        call; \
    }
#endif
#define PP_FOR_DTYPES_AND_HEADS(name, parameters, arguments, call) \
    PP_FOR_HEADS(name##_f32, PP_F32, parameters, arguments, call) \
    PP_FOR_HEADS(name##_f16, PP_F16, parameters, arguments, call) \
    PP_FOR_HEADS(name##_bf16, PP_BF16, parameters, arguments, call)

/* Applies soft cap and ALiBi to the scores of `heads` rows, for the tile that begins `behind` tokens after `tile`. */
PP_INLINE void transform_scores(const pp_tile *tile, int behind, int heads, float *s) {
    if (tile->cap != 0.0f) cap_scores(tile, heads, s);
    if (tile->alibi_slopes) add_slopes(tile, behind, heads, s);
}

/* Sets [from, to) to the first run of visible tokens and returns the visible tokens after it.  `seen` must not be 0. */
PP_INLINE uint32_t take_run(uint32_t seen, int *from, int *to) {
    *from = __builtin_ctz(seen);
    const uint32_t behind = ~(seen >> *from);
    *to = *from + (behind ? __builtin_ctz(behind) : PP_TILE);
    return *to < PP_TILE ? seen >> *to << *to : 0;
}

/* Finds the rows of a kv head, from row r and before row `to`, that see the same tokens of the tile.  Returns the end
 * of this range and sets tile->seen to the tokens.  Row r is row `at` of all rows. */
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

/* Masked tokens get a score of -inf. */
static __attribute__((noinline)) void mask_scores(const pp_tile *tile, int heads, float *s) {
    for (int g = 0; g < heads; g++, s += PP_TILE)
        for (int t = 0; t < PP_TILE; t++)
            if (!(tile->seen >> t & 1)) s[t] = -INFINITY;
}

/* Stores a vector of scores: the sum over EVEN dims, the sum over ODD dims added to the stored sum, or both. */
PP_INLINE void store_chains(const int EVEN, const int ODD, float *to, pp_v even, pp_v odd) {
    v_store(to, !ODD ? even : v_add(EVEN ? even : v_load(to), odd));
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

static void merge_chunks(const pp_merge *work) {
    const pp_chunk *chunk = work->chunk;
    const int32_t group_size = chunk->group_size, head_rows = group_size * chunk->view.num_queries;
    merged_row merged;
    float scaled[PP_MAX_HEAD_DIM];
    for (int32_t r = chunk->row_begin; r < chunk->row_end; r++) {
        const int32_t query = r % head_rows / group_size, head = r / head_rows * group_size + r % group_size;
        const int64_t at = (int64_t)query * work->num_qo_heads + head;
        merge_row(work, r, work->sinks ? work->sinks + head : NULL, &merged, scaled);
        write_result(&merged, work->out, work->out_dtype, at * work->v_head_dim, work->v_head_dim);
        if (work->lse) work->lse[at] = merged.empty ? -INFINITY : pp_lse(merged.m, v_first(merged.total));
    }
}

/* to[:n] = a * to + b * from, or b * from if a is 0: a part without weight is ignored, even if it is NaN. */
PP_INLINE void add_weighted(float *to, float a, const float *from, float b, int64_t n) {
    int64_t d = 0;
    for (; d + PP_LANES <= n; d += PP_LANES) {
        const pp_v scaled = v_mul(v_load(from + d), v_set1(b));
        v_store(to + d, a != 0.0f ? v_fma(v_load(to + d), v_set1(a), scaled) : scaled);
    }
    if (d < n) { /* the remainder, with vector operations, for the same rounding */
        float x[PP_LANES] = {0}, y[PP_LANES] = {0};
        memcpy(x, to + d, (size_t)(n - d) * sizeof(float));
        memcpy(y, from + d, (size_t)(n - d) * sizeof(float));
        const pp_v scaled = v_mul(v_load(y), v_set1(b));
        v_store(x, a != 0.0f ? v_fma(v_load(x), v_set1(a), scaled) : scaled);
        memcpy(to + d, x, (size_t)(n - d) * sizeof(float));
    }
}

/* Computes the weights first.  Each part is then read once, and no final division is needed.  The arrays may be NULL if
 * num_parts or the number of dims is 0. */
static void merge_rows(const pp_merge_args *args) {
    for (int64_t r = 0; r < args->num_rows; r++) {
        const int64_t s = r * args->s_stride_row, v = r * args->v_stride_row;
        float maximum = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < args->num_parts; i++) {
            const float part = args->s[s + i * args->s_stride_part];
            if (!(part <= maximum)) maximum = part; /* a NaN makes weight and result NaN in any case */
        }
        const float shift = maximum == -INFINITY ? 0.0f : maximum; /* -inf - (-inf) is NaN */
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
