/* draw_kernel.h: weights of tokens and the sums of their chunks.  Included once per ISA. */

static void weigh_tokens(const float *logits, int64_t n, float most, float scale, float *weights, float *sums) {
    const pp_v highest = v_set1(most), factor = v_set1(scale);
    float last[PP_DRAW_CHUNK];
    for (int64_t begin = 0; begin < n; begin += PP_DRAW_CHUNK) {
        const float *from = logits + begin;
        if (n - begin < PP_DRAW_CHUNK) {
            for (int64_t i = 0; i < PP_DRAW_CHUNK; i++) last[i] = i < n - begin ? from[i] : -INFINITY;
            from = last;
        }
        pp_v sum = v_set1(0.0f);
        for (int i = 0; i < PP_DRAW_CHUNK; i += PP_LANES) {
            const pp_v weight = v_exp2(v_mul(v_sub(v_load(from + i), highest), factor));
            v_store(weights + begin + i, weight);
            sum = v_add(sum, weight);
        }
        sums[begin / PP_DRAW_CHUNK] = v_sum(sum);
    }
}

static void keep_ahead(float *weights, int64_t num_chunks, int64_t place, float *sums) {
    const float weight = weights[place];
    const pp_v equal = v_set1(weight), above = v_set1(nextafterf(weight, INFINITY));
    /* In the vector that contains `place`, first keep only larger weights, then also equal weights before `place`. */
    const int64_t vector = place / PP_LANES * PP_LANES;
    float own[PP_LANES];
    v_store(own, v_load(weights + vector));
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        float *at = weights + chunk * PP_DRAW_CHUNK;
        pp_v sum = v_set1(0.0f);
        for (int i = 0; i < PP_DRAW_CHUNK; i += PP_LANES) {
            const pp_v all = v_load(at + i);
            const pp_v kept = v_zero_below(all, all, chunk * PP_DRAW_CHUNK + i < vector ? equal : above);
            v_store(at + i, kept);
            sum = v_add(sum, kept);
        }
        sums[chunk] = v_sum(sum);
    }
    for (int64_t i = 0; vector + i < place; i++)
        if (own[i] == weight) {
            weights[vector + i] = weight;
            sums[place / PP_DRAW_CHUNK] += weight;
        }
}
