/* block_sums.h: sums of weights block by block.  Once per ISA, after softmax_math.h. */

/* Adds the weights p of a tile to the sums of its blocks, piece by piece.  A piece is the intersection of a block and a
 * group of 16 tokens.  This works for any block size. */
static __attribute__((noinline)) void add_to_blocks(const pp_tile *tile, int heads, const float *p,
                                                    const float *rescale) {
    float *sums = tile->block_sums;
    for (int g = 0; g < heads; g++, sums += tile->num_blocks, p += PP_TILE) {
        if (rescale)
            for (int b = 0; b < tile->num_blocks; b++) sums[b] *= rescale[g];
        for (int at = 0, end; at < PP_TILE; at = end) {
            const int64_t block = (tile->begin + at) / tile->block_size;
            const int64_t left = (block + 1) * tile->block_size - (tile->begin + at), group = PP_GROUP - at % PP_GROUP;
            end = at + (int)(left < group ? left : group);
            if (!(tile->seen & pp_bits_between(at, end))) continue;
            float piece[PP_GROUP] = {0};
            pp_v x[PP_GROUP / PP_LANES];
            for (int t = at; t < end; t++) piece[t % PP_GROUP] = p[t];
            for (int j = 0; j < PP_GROUP / PP_LANES; j++) x[j] = v_load(piece + j * PP_LANES);
            sums[block - tile->first_block] += tree_sum(x);
        }
    }
}
