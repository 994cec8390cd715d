/* turn_squares.h: words of 64 bits, in bf16 squares of two dims and two tokens, become columns, in an instruction set's
 * vectors.  Included once per ISA. */

/* The middle halves of 64 bits change places: each square is turned, too. */
#define PP_TURN_SQUARE(word) \
    (((word) & 0xffff00000000ffffu) | (((word) & 0xffff0000u) << 16) | (((word) >> 16) & 0xffff0000u))

enum { PP_PAIRS = PP_LANES / 2 }; /* pairs of lanes in a vector, and rows that v_turn_pairs turns at once */

/* Row r of `to` becomes column r of `from`; steps in bytes. */
PP_INLINE void turn_squares(unsigned char *to, int64_t to_step, const unsigned char *from, int64_t from_step) {
    typedef uint64_t squares __attribute__((vector_size(PP_PAIRS * sizeof(uint64_t))));
    pp_v a[PP_PAIRS];
    PP_UNROLL for (int i = 0; i < PP_PAIRS; i++) {
        squares x;
        memcpy(&x, from + i * from_step, sizeof x);
        a[i] = (pp_v)PP_TURN_SQUARE(x);
    }
    v_turn_pairs(a);
    PP_UNROLL for (int i = 0; i < PP_PAIRS; i++) memcpy(to + i * to_step, &a[i], sizeof a[i]);
}
