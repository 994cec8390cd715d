/* transpose_block.h: 8 rows of 8 words become 8 columns.  Included once per word and instruction set, with PP_WORD_BITS
 * (16 or 32) and PP_SIDE, the words of a vector (8 or 4), defined. */
#define PP_BLOCK PP_CAT(pp_block_, PP_WORD_BITS, )
typedef PP_CAT(uint, PP_WORD_BITS, _t) PP_BLOCK __attribute__((vector_size(PP_WORD_BITS / 8 * PP_SIDE)));

/* PP_SIDE rows and columns.  Rounds of interleaving rows i and i + PP_SIDE / 2, three of 8 and two of 4. */
PP_INLINE void PP_CAT(transpose_side_, PP_WORD_BITS, )(unsigned char *to, int64_t to_step, const unsigned char *from,
                                                 int64_t from_step) {
    enum { HALF = PP_SIDE / 2, ROUNDS = PP_SIDE == 8 ? 3 : 2 };
    PP_BLOCK a[PP_SIDE], b[PP_SIDE];
    PP_UNROLL for (int i = 0; i < PP_SIDE; i++) memcpy(&a[i], from + i * from_step, sizeof a[i]);
    PP_UNROLL for (int round = 0; round < ROUNDS; round++) {
        PP_UNROLL for (int i = 0; i < HALF; i++) {
#if PP_SIDE == 8
            b[2 * i] = PP_INTERLEAVE_LOW(a[i], a[i + HALF]);
            b[2 * i + 1] = PP_INTERLEAVE_HIGH(a[i], a[i + HALF]);
#else
            b[2 * i] = PP_INTERLEAVE_LOW_4(a[i], a[i + HALF]);
            b[2 * i + 1] = PP_INTERLEAVE_HIGH_4(a[i], a[i + HALF]);
#endif
        }
        PP_UNROLL for (int i = 0; i < PP_SIDE; i++) a[i] = b[i];
    }
    PP_UNROLL for (int i = 0; i < PP_SIDE; i++) memcpy(to + i * to_step, &a[i], sizeof a[i]);
}

/* Row r of `to` becomes column r of `from`; steps in bytes. */
PP_INLINE void PP_CAT(transpose_block_, PP_WORD_BITS, )(unsigned char *to, int64_t to_step, const unsigned char *from,
                                                  int64_t from_step) {
    enum { WORD = PP_WORD_BITS / 8 };
    PP_UNROLL for (int r = 0; r < 8; r += PP_SIDE)
        PP_UNROLL for (int c = 0; c < 8; c += PP_SIDE)
            PP_CAT(transpose_side_, PP_WORD_BITS, )(to + r * to_step + c * WORD, to_step,
                                                    from + c * from_step + r * WORD, from_step);
}

#undef PP_BLOCK
#undef PP_WORD_BITS
#undef PP_SIDE
