/* decode_tile.h: what the walk over a chunk hands to the work on one tile of one kv head. */
#ifndef PP_DECODE_TILE_H
#define PP_DECODE_TILE_H

#include "kernels.h"

typedef struct pp_tile {
    const unsigned char *k[4], *v[4];           /* of its two groups of 16 tokens, and of those of the tile after it */
    const unsigned char *next_k[4], *next_v[4]; /* what will be read next: prefetched; next_v may be NULLs */
    int step;                                   /* the tile after it is done along: all rows see all of both */
    uint32_t seen;                              /* a bit for each of its tokens; not 0 */
    int head_dim, v_head_dim;
    float scale, cap, inverse_cap;              /* for queries not scaled; soft cap, or 0, its inverse: in base 2 */
    const float *alibi_slopes;                  /* of the query heads of the kv head, in base 2, or NULL */
    int32_t row, group_size;                    /* the first row at work: query token row / group_size, head the rest */
    int64_t distance;                           /* from the first query token back to the tile's first: 0 or below */
    int64_t row_stride;
    float *block_sums;                          /* NULL, or of the first row at work: sums of weights, block by block */
    int64_t begin, first_block, block_size;     /* the tile's first token, and the block of block_sums[0] */
    int num_blocks;
} pp_tile;

#endif
