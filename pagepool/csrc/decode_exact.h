/* decode_exact.h: what decode_tile.h does to a pair of dims and to a pair of tokens, in exact arithmetic: both elements
 * are widened to f32.  Included once per dtype from decode_kernel.h. */

enum { PP_NAME(QUERY_PAIR) = 2 }; /* numbers in packed queries for a pair of dims, in weights for a pair of tokens */

/* Of up to so many heads the scores of two tiles are made at once, and the first tile's weights before the second one's
 * scores: between products of up to 6 heads softmax took 1 % more than before them. */
enum { PP_NAME(TOGETHER) = 0, PP_NAME(BEFORE) = 6 };

#define LOAD2 PP_CAT(v_load2_, PP_DTYPE, )
#define LOAD2_HALF PP_CAT(v_load2_half_, PP_DTYPE, )
#define SCORE_VECTORS score_vectors
#define CHAINS_APART chains_apart
#define WEIGH weigh
#define ADD_TO_BLOCKS add_to_blocks

/* A pair of dims of K for a vector of tokens. */
PP_INLINE void PP_NAME(load_dims)(const unsigned char *rows, int column, pp_v *a, pp_v *b) {
    LOAD2(rows, PP_GROUP, column, a, b);
}

/* Adds their products with a head's query to NV vectors of scores, in chains over EVEN dims and over ODD ones. */
PP_INLINE void PP_NAME(add_dims)(const int NV, const int EVEN, const int ODD, const pp_v *a, const pp_v *b,
                                 const float *q, pp_v *even, pp_v *odd) {
    const pp_broadcast x = v_broadcast(q + !EVEN), y = EVEN && ODD ? v_broadcast(q + 1) : x;
    PP_UNROLL for (int j = 0; j < NV; j++) {
        if (EVEN) even[j] = v_fma_broadcast(a[j], x, even[j]);
        if (ODD) odd[j] = v_fma_broadcast(b[j], y, odd[j]);
    }
}

/* A vector of scores: of the chain over EVEN dims, of both chains, or that over ODD ones added to the former. */
PP_INLINE void PP_NAME(store_scores)(const int EVEN, const int ODD, const pp_tile *tile, float *to, pp_v even,
                                     pp_v odd) {
    (void)tile;
    store_chains(EVEN, ODD, to, even, odd);
}

/* A pair of tokens of V for a vector of dims, or for HALF of one. */
PP_INLINE void PP_NAME(load_tokens)(const int HALF, const int FIRST, const int SECOND, const unsigned char *rows,
                                    int width, int column, pp_v *a, pp_v *b) {
    (void)FIRST, (void)SECOND;
#if PP_HALF_TAIL
    if (HALF) {
        LOAD2_HALF(rows, width, column, a, b);
        return;
    }
#endif
    (void)HALF;
    LOAD2(rows, width, column, a, b);
}

/* Adds a token times its weight, the FIRST or the other one of a pair. */
PP_INLINE void PP_NAME(add_token)(const int NV, const int FIRST, const pp_v *x, const float *weights, pp_v *sum) {
    const pp_broadcast weight = v_broadcast(weights + !FIRST);
    PP_UNROLL for (int j = 0; j < NV; j++) sum[j] = v_fma_broadcast(x[j], weight, sum[j]);
}
