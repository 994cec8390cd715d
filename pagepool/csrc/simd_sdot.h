/* simd_sdot.h: sums of products of 8-bit integers by AArch64's sdot, for quantised.h.  Included inside a target region.
 *
 * A factor of 16 bits is split into two parts of 8 bits, one in each word: 256 a + b. sdot multiplies signed bytes.  K
 * is converted to signed bytes when it is loaded, so scores have no bias.  Both parts of queries and weights are
 * signed. */
#include "int_parts.h"

typedef int32x4_t pp_ints;
typedef pp_ints pp_int_data;
typedef int32x2_t pp_factor;
enum { INT_DATA = 4, INT_SUMS = 8, INT_REGISTERS = 24 };

PP_INLINE void ints_load_v(const unsigned char *row, pp_ints *data) {
    PP_UNROLL for (int i = 0; i < INT_DATA; i++) data[i] = vreinterpretq_s32_u8(vld1q_u8(row + 16 * i));
}
PP_INLINE void ints_load_k(const unsigned char *row, pp_ints *data) {
    const uint8x16_t sign = vdupq_n_u8(0x80);
    PP_UNROLL for (int i = 0; i < INT_DATA; i++)
        data[i] = vreinterpretq_s32_u8(veorq_u8(vld1q_u8(row + 16 * i), sign));
}

PP_INLINE pp_factor ints_spread(const float *words) { return vreinterpret_s32_f32(vld1_f32(words)); }

PP_INLINE pp_ints ints_zero(void) { return vdupq_n_s32(0); }

/* Inline assembler that accumulates in place: clang before 16 allows the intrinsic only in files compiled for the
 * instruction.  The volatile order needs 29 registers; GCC's scheduler would need more and spill within loops. */
PP_INLINE void ints_add_k(pp_ints *sums, const pp_ints *data, const pp_factor *factor) {
    PP_UNROLL for (int i = 0; i < INT_DATA; i++)
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(sums[i]) : "w"(data[i]), "w"(*factor));
    PP_UNROLL for (int i = 0; i < INT_DATA; i++)
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[1]" : "+w"(sums[INT_DATA + i]) : "w"(data[i]), "w"(*factor));
}
PP_INLINE void ints_add_v(pp_ints *sums, const pp_ints *data, const pp_factor *factor) {
    ints_add_k(sums, data, factor);
}

PP_INLINE void ints_to_floats(const pp_ints *sums, uint32_t less, pp_v *floats) {
    (void)less; /* stored integers have no bias */
    PP_UNROLL for (int i = 0; i < INT_DATA; i++)
        floats[i] = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(sums[i], 8), sums[INT_DATA + i]));
}

/* A tile's weights, rounded by PP_ROUND: two words for four tokens. */
PP_INLINE void ints_of_weights(const pp_v *rounded, float *words) {
    PP_UNROLL for (int j = 0; j < PP_TILE / PP_LANES; j++) {
        const uint16x4_t low = vmovn_u32(vreinterpretq_u32_f32(rounded[j]));
        const uint16x4_t high = vrshr_n_u16(low, 8); /* rounded, because the lower 8 bits are signed */
        vst1_u8((unsigned char *)(words + j * 2), vmovn_u16(vcombine_u16(high, low)));
    }
}

/* As in simd_vnni.h; both operands are signed. */
enum { DOT_OUTPUTS = 16 };
#define DOT_ROWS 2
PP_INLINE void dots_of_group(const int FORMAT, const int COUNT, const unsigned char *w, const int8_t *x,
                             const int32_t *sums_of_x, pp_v (*dots)[4]) {
    const int STEPS = FORMAT == PP_QUANTISED_8 ? 8 : 4;
    int32x4_t sums[DOT_ROWS][4];
    PP_UNROLL for (int r = 0; r < COUNT; r++)
        PP_UNROLL for (int j = 0; j < 4; j++)
            sums[r][j] = vdupq_n_s32(FORMAT == PP_QUANTISED_4 ? -8 * sums_of_x[r] : 0);
    PP_UNROLL for (int i = 0; i < STEPS; i++)
        PP_UNROLL for (int j = 0; j < 4; j++) {
            const uint8x16_t own = vld1q_u8(w + 128 * i + 16 * j);
            const uint8x16_t first = FORMAT == PP_QUANTISED_8 ? own : vandq_u8(own, vdupq_n_u8(15));
            const uint8x16_t second = vshrq_n_u8(own, 4);
            PP_UNROLL for (int r = 0; r < COUNT; r++) {
                int32_t four[2];
                const int8_t *from = x + r * PP_QUANTISED_GROUP + 4 * i;
                memcpy(&four[0], from, sizeof *four);
                memcpy(&four[1], from + (FORMAT == PP_QUANTISED_8 ? 0 : 16), sizeof *four);
                const int32x4_t low = vdupq_n_s32(four[0]), high = vdupq_n_s32(four[1]);
                __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sums[r][j]) : "w"(first), "w"(low));
                if (FORMAT != PP_QUANTISED_8)
                    __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sums[r][j]) : "w"(second), "w"(high));
            }
        }
    PP_UNROLL for (int r = 0; r < COUNT; r++)
        PP_UNROLL for (int j = 0; j < 4; j++) dots[r][j] = vcvtq_f32_s32(sums[r][j]);
}
