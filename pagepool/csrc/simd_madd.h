/* simd_madd.h: sums of products of 8-bit with 16-bit integers by AVX2's vpmaddwd, for quantised.h.  Included inside a
 * target region. vpmaddubsw, which multiplies bytes, is not used because it saturates.  A factor is four words of 16
 * bits, for four adjacent bytes.  Each sum adds two products. */
typedef __m256i pp_ints;
typedef pp_ints pp_int_data;
typedef __m256i pp_factor;
enum { INT_DATA = 4, INT_SUMS = 4, INT_REGISTERS = 8 };

PP_INLINE void ints_load_k(const unsigned char *row, pp_ints *data) {
    PP_UNROLL for (int i = 0; i < INT_DATA; i++)
        data[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(row + 16 * i)));
}
PP_INLINE void ints_load_v(const unsigned char *row, pp_ints *data) {
    PP_UNROLL for (int i = 0; i < INT_DATA; i++)
        data[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(row + 16 * i)));
}

PP_INLINE pp_factor ints_spread(const float *words) {
    int64_t four;
    memcpy(&four, words, sizeof four);
    return _mm256_set1_epi64x(four);
}

PP_INLINE pp_ints ints_zero(void) { return _mm256_setzero_si256(); }

PP_INLINE void ints_add_k(pp_ints *sums, const pp_ints *data, const pp_factor *factor) {
    PP_UNROLL for (int i = 0; i < INT_SUMS; i++)
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(data[i], *factor));
}
PP_INLINE void ints_add_v(pp_ints *sums, const pp_ints *data, const pp_factor *factor) {
    ints_add_k(sums, data, factor);
}

PP_INLINE void ints_to_floats(const pp_ints *sums, uint32_t less, pp_v *floats) {
    const __m256i bias = _mm256_set1_epi32((int32_t)less);
    PP_UNROLL for (int i = 0; i < 2; i++) { /* of columns 0 1 4 5 2 3 6 7 */
        const __m256i both = _mm256_hadd_epi32(sums[2 * i], sums[2 * i + 1]);
        floats[i] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_permute4x64_epi64(both, 0xd8), bias));
    }
}

static inline void ints_of_query(const int32_t *q, float *words) {
    int16_t four[4];
    for (int i = 0; i < 4; i++) four[i] = (int16_t)q[i];
    memcpy(words, four, sizeof four);
}

PP_INLINE void ints_of_weights(const pp_v *rounded, float *words) {
    const __m256i half = _mm256_set1_epi32(0xffff);
    PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j += 2) {
        const __m256i a = _mm256_and_si256(_mm256_castps_si256(rounded[j]), half);
        const __m256i b = _mm256_and_si256(_mm256_castps_si256(rounded[j + 1]), half);
        _mm256_storeu_si256((__m256i *)(words + j * 4), _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
    }
}

/* As in simd_vnni.h.  vpmaddubsw multiplies unsigned with signed bytes and adds two products: at most 2 * 128 * 127 in
 * magnitude, which does not saturate.  Signed weights give their sign to x. */
enum { DOT_OUTPUTS = 16 };
#define DOT_ROWS 2
PP_INLINE __m256i four_of(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}
PP_INLINE void dots_of_group(const int FORMAT, const int COUNT, const unsigned char *w, const int8_t *x,
                             const int32_t *sums_of_x, pp_v (*dots)[2]) {
    const int STEPS = FORMAT == PP_QUANTISED_8 ? 8 : 4;
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i sums[DOT_ROWS][2];
    PP_UNROLL for (int r = 0; r < COUNT; r++)
        sums[r][0] = sums[r][1] = _mm256_set1_epi32(FORMAT == PP_QUANTISED_4 ? -8 * sums_of_x[r] : 0);
    PP_UNROLL for (int i = 0; i < STEPS; i++)
        PP_UNROLL for (int half = 0; half < 2; half++) {
            const __m256i own = _mm256_load_si256((const __m256i *)(w + 128 * i + 32 * half));
            PP_UNROLL for (int r = 0; r < COUNT; r++) {
                const int8_t *row = x + r * PP_QUANTISED_GROUP + 4 * i;
                __m256i pairs;
                if (FORMAT == PP_QUANTISED_8) {
                    pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(own), _mm256_sign_epi8(four_of(row), own));
                } else { /* four products are at most 4 * 15 * 127 */
                    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(own, 4), low);
                    pairs = _mm256_add_epi16(_mm256_maddubs_epi16(_mm256_and_si256(own, low), four_of(row)),
                                             _mm256_maddubs_epi16(high, four_of(row + 16)));
                }
                sums[r][half] = _mm256_add_epi32(sums[r][half], _mm256_madd_epi16(pairs, ones));
            }
        }
    PP_UNROLL for (int r = 0; r < COUNT; r++)
        PP_UNROLL for (int half = 0; half < 2; half++) dots[r][half] = _mm256_cvtepi32_ps(sums[r][half]);
}
