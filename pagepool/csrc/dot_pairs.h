/* dot_pairs.h: pairs of bf16 in the lanes of a vector of f32: what arithmetic of bf16 works on.  Once per ISA, after
 * its vocabulary.
 *
 * A lane holds two neighbours, the first in its lower half: dims of q and K, tokens of V and of the weights.  As f32
 * the lanes mean nothing; they are loaded, broadcast and stored as such because that keeps their bits. */

typedef uint32_t pp_bits __attribute__((vector_size(sizeof(pp_v))));

static inline pp_v first_of_pairs(pp_v pairs) { return (pp_v)((pp_bits)pairs << 16); }
static inline pp_v second_of_pairs(pp_v pairs) { return (pp_v)((pp_bits)pairs & 0xffff0000u); }
static inline pp_v keep_bits(pp_v pairs, uint32_t mask) { return (pp_v)((pp_bits)pairs & mask); }

/* n numbers to nearest even, as n / 2 pairs. */
static inline void round_to_pairs(float *pairs, const float *from, int n) {
    uint32_t bits[PP_MAX_HEAD_DIM / 2];
    for (int i = 0; i < n / 2; i++)
        bits[i] = pp_f32_to_bf16(from[2 * i]) | (uint32_t)pp_f32_to_bf16(from[2 * i + 1]) << 16;
    memcpy(pairs, bits, (size_t)n / 2 * sizeof *bits);
}

/* The weights of a tile, subnormal ones as zeros. */
static inline void round_weights(float *pairs, const float *p) {
    float normal[PP_TILE];
    for (int t = 0; t < PP_TILE; t++) normal[t] = p[t] < 0x1p-126f ? 0.0f : p[t];
    round_to_pairs(pairs, normal, PP_TILE);
}

/* The numbers of pairs in f32. */
static inline void widen_pairs(float *to, const float *pairs, int n) {
    for (int i = 0; i < n / 2; i++) {
        uint32_t bits;
        memcpy(&bits, pairs + i, sizeof bits);
        to[2 * i] = pp_float_of(bits << 16);
        to[2 * i + 1] = pp_float_of(bits & 0xffff0000u);
    }
}
