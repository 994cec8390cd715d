/* convert.h: converts single elements between f32 and the dtypes of pages. Conversions to 16 bit round to nearest
 * even. */
#ifndef PP_CONVERT_H
#define PP_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline uint32_t pp_bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float pp_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float pp_bf16_to_f32(uint16_t half) { return pp_float_of((uint32_t)half << 16); }

/* A NaN keeps its sign and upper payload and becomes quiet. */
static inline uint16_t pp_f32_to_bf16(float value) {
    uint32_t bits = pp_bits_of(value);
    uint32_t nan = (bits & 0x7fffffffu) > 0x7f800000u;
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(nan ? (bits >> 16) | 0x40u : rounded);
}

/* Exact. A multiplication by 2^112 corrects the bias of the exponent, for subnormals also. */
static inline float pp_f16_to_f32(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = (uint32_t)(half & 0x7fffu) << 13;
    uint32_t bits = pp_bits_of(pp_float_of(magnitude) * 0x1p112f);
    if ((half & 0x7c00u) == 0x7c00u) bits = magnitude | 0x7f800000u | ((half & 0x3ffu) ? 0x400000u : 0u);
    return pp_float_of(sign | bits);
}

static inline uint16_t pp_f32_to_f16(float value) {
    uint32_t bits = pp_bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 2^16 or more */
    if (magnitude < 0x38800000u) { /* subnormal: adding 0.5 rounds at 2^-24, the spacing of f16 subnormals */
        uint32_t shifted = pp_bits_of(pp_float_of(magnitude) + 0.5f);
        return (uint16_t)(sign | (shifted - 0x3f000000u));
    }
    uint32_t odd = (magnitude >> 13) & 1u;
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

#endif
