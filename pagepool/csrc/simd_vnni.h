/* simd_vnni.h: sums of products of 8-bit integers by AVX512_VNNI, for quantised.h.  Included inside a target region.
 *
 * A factor of 16 bits is split into two parts of 8 bits, one in each word: 256 a + b. vpdpbusd multiplies unsigned
 * bytes with signed bytes.  K is stored unsigned, so parts of queries are signed.  V is stored signed, so parts of
 * weights are unsigned. */
#include "int_parts.h"

typedef __m512i pp_ints;
typedef pp_ints pp_int_data;
typedef struct pp_factor { __m512i part[2]; } pp_factor;
enum { INT_DATA = 1, INT_SUMS = 2, INT_REGISTERS = 24 };

PP_INLINE void ints_load_k(const unsigned char *row, pp_ints *data) { data[0] = _mm512_loadu_si512(row); }
PP_INLINE void ints_load_v(const unsigned char *row, pp_ints *data) { data[0] = _mm512_loadu_si512(row); }

PP_INLINE pp_factor ints_spread(const float *words) {
    int32_t parts[2];
    memcpy(parts, words, sizeof parts);
    return (pp_factor){{_mm512_set1_epi32(parts[0]), _mm512_set1_epi32(parts[1])}};
}

PP_INLINE pp_ints ints_zero(void) { return _mm512_setzero_si512(); }

/* Inline assembler that accumulates in place: with the intrinsic, compilers move sums between registers and run out of
 * them. */
PP_INLINE void ints_dot(pp_ints *sum, pp_ints is_unsigned, pp_ints is_signed) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(is_unsigned), "v"(is_signed));
}
PP_INLINE void ints_add_k(pp_ints *sums, const pp_ints *data, const pp_factor *q) {
    ints_dot(&sums[0], data[0], q->part[0]);
    ints_dot(&sums[1], data[0], q->part[1]);
}
PP_INLINE void ints_add_v(pp_ints *sums, const pp_ints *data, const pp_factor *weight) {
    ints_dot(&sums[0], weight->part[0], data[0]);
    ints_dot(&sums[1], weight->part[1], data[0]);
}

PP_INLINE void ints_to_floats(const pp_ints *sums, uint32_t less, pp_v *floats) {
    const __m512i all = _mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]);
    floats[0] = _mm512_cvtepi32_ps(_mm512_sub_epi32(all, _mm512_set1_epi32((int32_t)less)));
}

/* A tile's weights, rounded by PP_ROUND: two words for four tokens. */
PP_INLINE void ints_of_weights(const pp_v *rounded, float *words) {
    PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++) {
        const __m512i bits = _mm512_castps_si512(rounded[j]);
        const __m128i low = _mm512_cvtepi32_epi8(bits), high = _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 8));
        _mm_storeu_si128((__m128i *)(words + j * 8), _mm_unpacklo_epi32(high, low));
        _mm_storeu_si128((__m128i *)(words + j * 8 + 4), _mm_unpackhi_epi32(high, low));
    }
}

/* Sums of products of a group of 32 inputs, for linear_quantised.h: DOT_OUTPUTS adjacent outputs, whose weights begin
 * at `w`, and COUNT adjacent rows of x.  x is signed, so signed weights are raised by 128. */
enum { DOT_OUTPUTS = 32 };
#define DOT_ROWS 4
PP_INLINE __m512i four_of(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}
PP_INLINE void dots_of_group(const int FORMAT, const int COUNT, const unsigned char *w, const int8_t *x,
                             const int32_t *sums_of_x, pp_v (*dots)[2]) {
    const int STEPS = FORMAT == PP_QUANTISED_8 ? 8 : 4;
    const __m512i sign = _mm512_set1_epi8((char)0x80), low = _mm512_set1_epi8(15);
    const int raised = FORMAT == PP_QUANTISED_8 ? 128 : FORMAT == PP_QUANTISED_4 ? 8 : 0;
    __m512i sums[DOT_ROWS][2];
    PP_UNROLL for (int r = 0; r < COUNT; r++)
        sums[r][0] = sums[r][1] = _mm512_set1_epi32(raised ? -raised * sums_of_x[r] : 0);
    PP_UNROLL for (int i = 0; i < STEPS; i++) {
        const __m512i a = _mm512_load_si512(w + 128 * i), b = _mm512_load_si512(w + 128 * i + 64);
        const int is_8 = FORMAT == PP_QUANTISED_8;
        const __m512i c = is_8 ? _mm512_xor_si512(a, sign) : _mm512_and_si512(a, low);
        const __m512i d = is_8 ? _mm512_xor_si512(b, sign) : _mm512_and_si512(b, low);
        PP_UNROLL for (int r = 0; r < COUNT; r++) {
            const __m512i four = four_of(x + r * PP_QUANTISED_GROUP + 4 * i);
            ints_dot(&sums[r][0], c, four);
            ints_dot(&sums[r][1], d, four);
        }
        if (is_8) continue;
        const __m512i e = _mm512_and_si512(_mm512_srli_epi16(a, 4), low);
        const __m512i f = _mm512_and_si512(_mm512_srli_epi16(b, 4), low);
        PP_UNROLL for (int r = 0; r < COUNT; r++) {
            const __m512i four = four_of(x + r * PP_QUANTISED_GROUP + 4 * i + 16);
            ints_dot(&sums[r][0], e, four);
            ints_dot(&sums[r][1], f, four);
        }
    }
    PP_UNROLL for (int r = 0; r < COUNT; r++)
        PP_UNROLL for (int i = 0; i < 2; i++) dots[r][i] = _mm512_cvtepi32_ps(sums[r][i]);
}
