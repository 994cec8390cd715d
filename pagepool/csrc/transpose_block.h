/* transpose_block.h: transposes blocks of 8 rows of 8 words.  Included once per ISA.
 *
 * Squares of `side` rows and columns are transposed in vectors.  Each round interleaves rows i and i + side / 2.  There
 * are three rounds for side 8 and two for side 4.  A vector has 8 words of 16 bits, or 8 or 4 words of 32 bits. */
typedef uint16_t pp_words_16 __attribute__((vector_size(16)));
enum { PP_SIDE_32 = PP_LANES == 4 ? 4 : 8 };
typedef uint32_t pp_words_32 __attribute__((vector_size(4 * PP_SIDE_32)));

/* Column r of `from` becomes row r of `to`; steps in bytes. */
PP_INLINE void transpose_block_16(unsigned char *to, int64_t to_step, const unsigned char *from, int64_t from_step) {
    pp_words_16 a[8], b[8];
    PP_UNROLL for (int i = 0; i < 8; i++) memcpy(&a[i], from + i * from_step, sizeof a[i]);
    PP_UNROLL for (int round = 0; round < 3; round++) {
        PP_UNROLL for (int i = 0; i < 4; i++) {
            b[2 * i] = PP_INTERLEAVE_LOW(pp_words_16, a[i], a[i + 4]);
            b[2 * i + 1] = PP_INTERLEAVE_HIGH(pp_words_16, a[i], a[i + 4]);
        }
        PP_UNROLL for (int i = 0; i < 8; i++) a[i] = b[i];
    }
    PP_UNROLL for (int i = 0; i < 8; i++) memcpy(to + i * to_step, &a[i], sizeof a[i]);
}

/* Transposes a square of PP_SIDE_32 rows and columns. */
PP_INLINE void transpose_side_32(unsigned char *to, int64_t to_step, const unsigned char *from, int64_t from_step) {
    enum { SIDE = PP_SIDE_32, HALF = SIDE / 2, ROUNDS = SIDE == 8 ? 3 : 2 };
    pp_words_32 a[SIDE], b[SIDE];
    PP_UNROLL for (int i = 0; i < SIDE; i++) memcpy(&a[i], from + i * from_step, sizeof a[i]);
    PP_UNROLL for (int round = 0; round < ROUNDS; round++) {
        PP_UNROLL for (int i = 0; i < HALF; i++) {
#if PP_LANES == 4
            b[2 * i] = PP_INTERLEAVE_LOW_4(pp_words_32, a[i], a[i + HALF]);
            b[2 * i + 1] = PP_INTERLEAVE_HIGH_4(pp_words_32, a[i], a[i + HALF]);
#else
            b[2 * i] = PP_INTERLEAVE_LOW(pp_words_32, a[i], a[i + HALF]);
            b[2 * i + 1] = PP_INTERLEAVE_HIGH(pp_words_32, a[i], a[i + HALF]);
#endif
        }
        PP_UNROLL for (int i = 0; i < SIDE; i++) a[i] = b[i];
    }
    PP_UNROLL for (int i = 0; i < SIDE; i++) memcpy(to + i * to_step, &a[i], sizeof a[i]);
}

PP_INLINE void transpose_block_32(unsigned char *to, int64_t to_step, const unsigned char *from, int64_t from_step) {
    PP_UNROLL for (int r = 0; r < 8; r += PP_SIDE_32)
        PP_UNROLL for (int c = 0; c < 8; c += PP_SIDE_32)
            transpose_side_32(to + r * to_step + c * 4, to_step, from + c * from_step + r * 4, from_step);
}
