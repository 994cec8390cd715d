/* decode_tile.h: what the walk over a chunk hands to the work on one tile of one kv head. */
#ifndef PP_DECODE_TILE_H
#define PP_DECODE_TILE_H

#include "kernels.h"

typedef struct pp_tile {
    const unsigned char *k[2], *v[2];           /* of its two groups of 16 tokens */
    const unsigned char *next_k[2], *next_v[2]; /* what will be read next: prefetched; next_v may be NULLs */
    int first, tokens;                          /* tokens [first, tokens) are seen: 0 <= first < tokens <= PP_TILE */
    int head_dim, v_head_dim;
    float sm_scale, logits_soft_cap;
    const float *alibi_slopes;                  /* of the heads at work, or NULL */
    int64_t distance;                           /* from the query back to the tile's first token, below 0 or 0 */
    int64_t row_stride;
} pp_tile;

#endif
