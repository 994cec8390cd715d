/* turn_block.h: 8 rows of 8 words become 8 columns.  Included once per word and instruction set, with PP_WORD_BITS (16
 * or 32) defined. */
#define PP_BLOCK PP_CAT(pp_block_, PP_WORD_BITS, )
#define PP_WORD PP_CAT(uint, PP_WORD_BITS, _t)
typedef PP_WORD PP_BLOCK __attribute__((vector_size(PP_WORD_BITS)));

/* Row r of `to` becomes column r of `from`; steps in bytes.  Three rounds of interleaving rows i and i + 4. */
PP_INLINE void PP_CAT(turn_block_, PP_WORD_BITS, )(unsigned char *to, int64_t to_step, const unsigned char *from,
                                                  int64_t from_step) {
    PP_BLOCK a[8], b[8];
    PP_UNROLL for (int i = 0; i < 8; i++) memcpy(&a[i], from + i * from_step, sizeof a[i]);
    PP_UNROLL for (int round = 0; round < 3; round++) {
        PP_UNROLL for (int i = 0; i < 4; i++) {
            b[2 * i] = PP_INTERLEAVE_LOW(a[i], a[i + 4]);
            b[2 * i + 1] = PP_INTERLEAVE_HIGH(a[i], a[i + 4]);
        }
        PP_UNROLL for (int i = 0; i < 8; i++) a[i] = b[i];
    }
    PP_UNROLL for (int i = 0; i < 8; i++) memcpy(to + i * to_step, &a[i], sizeof a[i]);
}

#undef PP_BLOCK
#undef PP_WORD
#undef PP_WORD_BITS
