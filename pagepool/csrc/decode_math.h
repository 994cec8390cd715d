/* decode_math.h: exp and merging of partial results, in an instruction set's vocabulary.  Included once per ISA. */

/* exp(x) for x <= 0, to 1 ulp: x = n ln 2 + r, a polynomial of degree 7 in r (Cephes), times 2^n.  0 below the smallest
 * normal number; NaN stays NaN. */
PP_INLINE pp_v v_exp(pp_v x) {
    const pp_v lowest = v_set1(-87.33654f), magic = v_set1(12582912.0f);
    pp_v bounded = v_max(lowest, x);
    pp_v biased = v_fma(bounded, v_set1(1.44269504f), magic), n = v_sub(biased, magic);
    pp_v r = v_fma(n, v_set1(-0.693359375f), bounded);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    pp_v p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set1(1.0f));
    return v_zero_below(v_mul(p, v_pow2(biased)), x, lowest);
}

/* exp of one number by the very same operations. */
static inline float exp_one(float x) {
    float lanes[PP_LANES];
    v_store(lanes, v_exp(v_set1(x)));
    return lanes[0];
}

/* What scores are shifted by: the maximum, or 0 while every score is -inf: exp(-inf - shift) is 0 then and not NaN. */
PP_INLINE float shift_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

/* tanh(x): a polynomial near 0 (Cephes), by exp elsewhere. */
PP_INLINE pp_v v_tanh(pp_v x) {
    const pp_v one = v_set1(1.0f), border = v_set1(0.625f);
    const pp_v size = v_max(x, v_sub(v_set1(0.0f), x)); /* a NaN in x is kept */
    const pp_v e = v_exp(v_mul(size, v_set1(-2.0f))), far = v_div(v_sub(one, e), v_add(one, e));
    const pp_v small = v_sub(v_set1(0.0f), v_max(v_set1(-0.625f), v_sub(v_set1(0.0f), size)));
    const pp_v z = v_mul(small, small);
    pp_v p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, z, v_set1(2.06390887954e-2f));
    p = v_fma(p, z, v_set1(-5.37397155531e-2f));
    p = v_fma(p, z, v_set1(1.33314422036e-1f));
    p = v_fma(p, z, v_set1(-3.33332819422e-1f));
    const pp_v near = v_fma(v_mul(p, z), small, small);
    const pp_v y = v_add(v_zero_below(far, size, border), v_sub(near, v_zero_below(near, size, border)));
    return v_sub(v_zero_below(v_add(y, y), x, v_set1(0.0f)), y);
}

/* Bends the scores of `heads` heads of a tile: soft cap, then ALiBi.  Each position is rounded by itself, so that it
 * does not depend on the number of lanes beyond 2^24 either. */
static __attribute__((noinline)) void bend_scores(const pp_tile *tile, int heads, float *s) {
    float positions[PP_TILE];
    for (int t = 0; t < PP_TILE; t++) positions[t] = (float)((int32_t)tile->distance + t);
    const pp_v cap = v_set1(tile->logits_soft_cap), inverse = v_set1(1.0f / tile->logits_soft_cap);
    for (int t = 0; t < PP_TILE; t += PP_LANES) {
        const pp_v position = v_load(positions + t);
        for (int g = 0; g < heads; g++) {
            float *at = s + g * PP_TILE + t;
            pp_v x = v_load(at);
            if (tile->logits_soft_cap != 0.0f) x = v_mul(cap, v_tanh(v_mul(x, inverse)));
            if (tile->alibi_slopes) x = v_fma(v_set1(tile->alibi_slopes[g]), position, x);
            v_store(at, x);
        }
    }
}

/* How a group of query heads is cut into parts that share loads: about equal ones of up to PP_MAX_HEADS. */
PP_INLINE int32_t num_parts(int32_t group_size) { return (group_size + PP_MAX_HEADS - 1) / PP_MAX_HEADS; }
PP_INLINE int32_t part_border(int32_t group_size, int32_t part) {
    return (int32_t)((int64_t)group_size * part / num_parts(group_size));
}

static void pack_queries(float *to, const float *q, int64_t q_stride, int32_t num_kv_heads, int32_t group_size,
                         int32_t head_dim) {
    for (int32_t kv = 0; kv < num_kv_heads; kv++)
        for (int32_t part = 0; part < num_parts(group_size); part++) {
            const int32_t from = part_border(group_size, part), heads = part_border(group_size, part + 1) - from;
            const float *rows = q + ((int64_t)kv * group_size + from) * q_stride;
            for (int32_t d = 0; d < head_dim; d += 2)
                for (int32_t g = 0; g < heads; g++, to += 2) memcpy(to, rows + g * q_stride + d, 2 * sizeof(float));
        }
}

static void merge_chunks(const pp_merge *work) {
    const int64_t stride = work->record_stride, width = work->row_stride - PP_GROUP;
    for (int32_t h = work->head_begin; h < work->head_end; h++) {
        const float *row = work->first + h * work->row_stride;
        const float *m = work->first + work->num_qo_heads * work->row_stride + h;
        float sum[PP_MAX_HEAD_DIM];
        float maximum = *m, total = row[width];
        for (int64_t d = 0; d < width; d += PP_LANES) v_store(sum + d, v_load(row + d));
        for (int64_t c = 1; c < work->num_chunks; c++) {
            const float *chunk = row + c * stride;
            const float chunk_maximum = m[c * stride];
            const float both = chunk_maximum > maximum ? chunk_maximum : maximum, shift = shift_of(both);
            const float old_scale = exp_one(maximum - shift), scale = exp_one(chunk_maximum - shift);
            const float scaled = total * old_scale, added = chunk[width] * scale;
            total = scaled + added;
            maximum = both;
            for (int64_t d = 0; d < width; d += PP_LANES)
                v_store(sum + d, v_fma(v_load(chunk + d), v_set1(scale), v_mul(v_load(sum + d), v_set1(old_scale))));
        }
        if (work->sinks) { /* as a chunk that has a weight and no value */
            const float sink = work->sinks[h], both = sink > maximum ? sink : maximum, shift = shift_of(both);
            const float old_scale = exp_one(maximum - shift), scaled = total * old_scale;
            total = scaled + exp_one(sink - shift);
            maximum = both;
            for (int64_t d = 0; d < width; d += PP_LANES) v_store(sum + d, v_mul(v_load(sum + d), v_set1(old_scale)));
        }
        for (int64_t d = 0; d < width; d += PP_LANES) v_store(sum + d, v_div(v_load(sum + d), v_set1(total)));
        memcpy(work->out + (int64_t)h * work->v_head_dim, sum, (size_t)work->v_head_dim * sizeof(float));
        if (work->lse) work->lse[h] = maximum + logf(total);
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

/* Weights first, so that each part is read once and the result is divided by nothing. */
static void merge_rows(const pp_merge_args *args) {
    for (int64_t r = 0; r < args->num_rows; r++) {
        const float *s = args->s + r * args->s_stride_row, *v = args->v + r * args->v_stride_row;
        float *out = args->out + r * args->head_dim;
        float maximum = -INFINITY, total = 0.0f;
        for (int64_t i = 0; i < args->num_parts; i++) {
            const float part = s[i * args->s_stride_part];
            if (!(part <= maximum)) maximum = part; /* a NaN is taken, and stays */
        }
        for (int64_t i = 0; i < args->num_parts; i++)
            total += exp_one(s[i * args->s_stride_part] - shift_of(maximum));
        int empty = 1;
        for (int64_t i = 0; i < args->num_parts; i++) {
            const float part = s[i * args->s_stride_part], weight = exp_one(part - shift_of(maximum)) / total;
            if (part == -INFINITY) continue;
            add_weighted(out, empty ? 0.0f : 1.0f, v + i * args->v_stride_part, weight, args->head_dim);
            empty = 0;
        }
        if (empty) memset(out, 0, (size_t)args->head_dim * sizeof(float));
        if (args->lse) args->lse[r] = empty ? -INFINITY : maximum + logf(total);
    }
}
