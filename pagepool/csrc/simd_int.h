/* simd_int.h: sums of products of 8-bit with 16-bit integers in plain C, for quantised.h. */
typedef struct pp_int_columns { int32_t of[PP_GROUP]; } pp_ints;
typedef struct pp_factor { int32_t of[4]; } pp_factor;
typedef const unsigned char *pp_int_data;
enum { INT_DATA = 1, INT_SUMS = 1, INT_REGISTERS = 2 };

PP_INLINE void ints_load_k(const unsigned char *row, pp_int_data *data) { *data = row; }
PP_INLINE void ints_load_v(const unsigned char *row, pp_int_data *data) { *data = row; }

PP_INLINE pp_factor ints_spread(const float *words) {
    int16_t four[4];
    memcpy(four, words, sizeof four);
    return (pp_factor){{four[0], four[1], four[2], four[3]}};
}

PP_INLINE pp_ints ints_zero(void) { return (pp_ints){{0}}; }

PP_INLINE void ints_add_k(pp_ints *sums, const pp_int_data *data, const pp_factor *factor) {
    for (int c = 0; c < PP_GROUP; c++)
        for (int i = 0; i < 4; i++) /* modulo 2^32; correct after the bias is subtracted */
            sums->of[c] = (int32_t)((uint32_t)sums->of[c] + (uint32_t)((*data)[4 * c + i] * factor->of[i]));
}
PP_INLINE void ints_add_v(pp_ints *sums, const pp_int_data *data, const pp_factor *factor) {
    for (int c = 0; c < PP_GROUP; c++)
        for (int i = 0; i < 4; i++) sums->of[c] += (int8_t)(*data)[4 * c + i] * factor->of[i];
}

PP_INLINE void ints_to_floats(const pp_ints *sums, uint32_t less, pp_v *floats) {
    float all[PP_GROUP];
    for (int c = 0; c < PP_GROUP; c++) all[c] = (float)(int32_t)((uint32_t)sums->of[c] - less);
    for (int j = 0; j < PP_GROUP / PP_LANES; j++) floats[j] = v_load(all + j * PP_LANES);
}

static inline void ints_of_query(const int32_t *q, float *words) {
    int16_t four[4];
    for (int i = 0; i < 4; i++) four[i] = (int16_t)q[i];
    memcpy(words, four, sizeof four);
}

PP_INLINE void ints_of_weights(const pp_v *rounded, float *words) {
    float all[PP_TILE];
    int16_t weights[PP_TILE];
    for (int j = 0; j < PP_TILE / PP_LANES; j++) v_store(all + j * PP_LANES, rounded[j]);
    for (int t = 0; t < PP_TILE; t++) {
        uint32_t bits;
        memcpy(&bits, all + t, sizeof bits);
        weights[t] = (int16_t)bits;
    }
    memcpy(words, weights, sizeof weights);
}

/* As in simd_vnni.h. */
enum { DOT_OUTPUTS = 16 };
#define DOT_ROWS 2
PP_INLINE void dots_of_group(const int FORMAT, const int COUNT, const unsigned char *w, const int8_t *x,
                             const int32_t *sums_of_x, pp_v (*dots)[DOT_OUTPUTS / PP_LANES]) {
    for (int r = 0; r < COUNT; r++) {
        const int8_t *row = x + r * PP_QUANTISED_GROUP;
        float floats[DOT_OUTPUTS];
        for (int output = 0; output < DOT_OUTPUTS; output++) {
            int32_t sum = FORMAT == PP_QUANTISED_4 ? -8 * sums_of_x[r] : 0;
            for (int i = 0; i < (FORMAT == PP_QUANTISED_8 ? 32 : 16); i++) {
                const unsigned char byte = w[i / 4 * 128 + 4 * output + i % 4];
                sum += (FORMAT == PP_QUANTISED_8 ? (int8_t)byte : byte & 15) * row[i];
                if (FORMAT != PP_QUANTISED_8) sum += (byte >> 4) * row[i + 16];
            }
            floats[output] = (float)sum;
        }
        for (int j = 0; j < DOT_OUTPUTS / PP_LANES; j++) dots[r][j] = v_load(floats + j * PP_LANES);
    }
}
