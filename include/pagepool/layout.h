/* pagepool/layout.h: where the bytes of a token's keys and values lie.
 *
 * A pool is one buffer of `num_blocks` pages.  A page holds the K and V of `block_size` tokens, of every layer:
 *
 *   base                       one block (block_bytes)
 *   |                          v
 *   +--------------------------+--------------------------+--------------------------+--
 *   | block 0                  | block 1                  | block 2                  | ...
 *   +--------------------------+--------------------------+--------------------------+--
 *   | layer 0 | layer 1 | ...  |
 *   +---------+---------+------+      layer_bytes each
 *   | group 0 | group 1 | ...         16 tokens each, group_bytes (tiled layouts)
 *   +---------+---------+---
 *   | head 0   | head 1   | ...       head_bytes each: K (k_bytes), then V (v_bytes)
 *   | K  |  V  | K  |  V  |
 *
 * Tiled layouts (block_size a multiple of 16).  A head's K is token-minor and its V lies in the order in which decode
 * reads it, so that one walk over the page is sequential:
 *
 *   f32, f16   K [head_dim][16]           V [v_head_dim / 64][16][64]
 *   bf16       K [head_dim / 2][16][2]    V [v_head_dim / 64][16 / 2][64][2]
 *
 * The last run of V is v_head_dim % 64 dims wide when 64 does not divide it.  In bf16 two neighbours (dims of K,
 * tokens of V) share a 32-bit word: a shift gives the first as f32, a mask the second.
 *
 * Plain layouts (any other block_size): one group of block_size tokens, K [block_size][head_dim], V
 * [block_size][v_head_dim].
 *
 * K and V may have different dtypes, in tiled layouts; each lies as above.  Quantised ones have an f32 scale for each
 * token and head, behind a head's elements of the group: an element is worth (integer) * scale, of K times that of its
 * channel if the pool has these.
 *
 *   int8       K [head_dim / 4][16][4], of 128 more than the integer (-127 to 127), scales [16]
 *              V [v_head_dim / 64][16 / 4][64][4], two's complement, the last axis four tokens, scales [16]
 *   int4       integers of -7 to 7, 8 more stored, two dims of a token in a byte:
 *              K [head_dim / 8][16][4], the lower half dim 8 i + j, the upper one 8 i + 4 + j, scales [16]
 *              V [v_head_dim / 64][16 / 4][32][4], the lower half dim 64 i + j, the upper one 32 further (half of the
 *              last run's dims where this is shorter), scales [16]
 *
 * K and V need not have the same number of dims.  With v_in_k (the latent cache of multi-head latent attention: 576
 * dims, of which 512 are V, for all query heads) V is the first v_head_dim dims of K and is not stored again: v_bytes
 * is 0.  It is K that lies in its own order then, since all of its dims are read as K and fewer as V; decode brings a
 * tile's V into order once for all query heads that share it.
 */
#ifndef PAGEPOOL_LAYOUT_H
#define PAGEPOOL_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "pagepool/status.h"
#include "pagepool/version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum pp_dtype { PP_F32 = 0, PP_F16 = 1, PP_BF16 = 2, PP_INT8 = 3, PP_INT4 = 4 } pp_dtype;

#define PP_GROUP 16           /* tokens of a group in tiled layouts */
#define PP_V_RUN 64           /* dims of V read in one go */
#define PP_MAX_BLOCK_SIZE 1024
#define PP_MAX_HEAD_DIM 1024  /* of K and of V */

typedef struct pp_kv_layout {
    int32_t num_layers;
    int32_t num_kv_heads;
    int32_t head_dim;   /* of K and of queries */
    int32_t v_head_dim; /* of V and of results */
    int32_t v_in_k;     /* V is the first v_head_dim dims of K, stored once */
    int32_t block_size;
    int32_t dtype;      /* pp_dtype of K */
    int32_t v_dtype;    /* of V */
    int32_t tiled;      /* block_size % 16 == 0 */
    /* derived, in bytes */
    int64_t item_bytes;  /* of an element of K; 1 of a quantised one */
    int64_t k_bytes;     /* a head's K of one group, scales included; its V follows */
    int64_t v_bytes;     /* a head's V of one group; 0 with v_in_k */
    int64_t head_bytes;  /* from one head to the next: k_bytes + v_bytes */
    int64_t group_bytes; /* from one group to the next */
    int64_t layer_bytes; /* from one layer to the next */
    int64_t block_bytes; /* from one block to the next */
} pp_kv_layout;

typedef struct pp_kv_pool {
    pp_kv_layout layout;
    unsigned char *base; /* num_blocks * layout.block_bytes bytes, the caller's: aligned to 4, better to 64, as they
                            are read line by line; fastest on huge pages */
    int64_t num_blocks;  /* at most 2^31: ids are int32 */
    const float *k_channel_scale; /* NULL, or, of quantised K, (num_layers, num_kv_heads, head_dim), all above 0: K is
                                     divided by it before it is quantised, and queries are multiplied by it */
} pp_kv_pool;

/* Fills `layout` from its parameters, V being as wide as K.  PP_INVALID_ARGUMENT, and nothing changed, unless
 * num_layers, num_kv_heads >= 1, head_dim is a multiple of 8 from 8 to 1024, 1 <= block_size <= 1024, dtype is one of
 * pp_dtype and a block is smaller than 2^40 bytes. */
PP_API pp_status pp_kv_layout_init(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                                   int32_t block_size, pp_dtype dtype);

/* The same for a V of other dims, or one that lies inside of K.  v_head_dim is a multiple of 8 from 8 to 1024, too, and
 * with v_in_k at most head_dim. */
PP_API pp_status pp_kv_layout_init_v(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                                     int32_t v_head_dim, int v_in_k, int32_t block_size, pp_dtype dtype);

/* The same for K and V whose dtypes may differ and be quantised: block_size is a multiple of 16 then, and V lies apart
 * from K. */
PP_API pp_status pp_kv_layout_init_dtypes(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads,
                                          int32_t head_dim, int32_t v_head_dim, int32_t block_size, pp_dtype dtype,
                                          pp_dtype v_dtype);

/* The bytes of one element; 1 of a quantised one. */
PP_API int64_t pp_dtype_bytes(pp_dtype dtype);

/* Writes the K and V of `num_tokens` tokens of one layer into their slots (slot = block * block_size + offset).
 *   k, v           element (t, h, d) at index t * token_stride + h * head_stride + d; with v_in_k v is not read
 *   src_dtype      PP_F32, PP_F16 or PP_BF16: bits are copied to pages of the same dtype, others are rounded to nearest
 *                  even, or quantised
 *   slot_mapping   (num_tokens,); -1 skips the token
 * A row to be quantised, of K after its division by channel scales, is one token's and head's.  Its scale is its
 * largest |x| / 127 (int4: 7), its integers round(x / scale) to nearest even.  A row below 2^-100 is stored as zeros;
 * one that is not finite gets a scale of NaN: a result that gives it weight is NaN.
 * PP_INVALID_SLOT when a slot is below -1 or not below num_blocks * block_size; PP_INVALID_ARGUMENT for a layer out of
 * range, a quantised src_dtype or tokens of a pointer that is NULL, the pool's base included; nothing is written then.
 * k and v must not lie in pages that are written.  Threads may append to disjoint slots at the same time. */
PP_API pp_status pp_kv_append(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens,
                              const void *k, const void *v, pp_dtype src_dtype, int64_t token_stride,
                              int64_t head_stride);

/* Rows of K or V as a caller has them: element (t, h, d) at index t * token_stride + h * head_stride + d. */
typedef struct pp_kv_rows {
    const void *data;
    int64_t token_stride, head_stride;
} pp_kv_rows;

/* pp_kv_append for K and V with strides of their own, as they have when their dims differ. */
PP_API pp_status pp_kv_append_rows(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping,
                                   int64_t num_tokens, pp_kv_rows k, pp_kv_rows v, pp_dtype src_dtype);

/* Reads the first `seq_len` tokens of the sequence in `blocks` back as f32, C-contiguous, K (seq_len, num_kv_heads,
 * head_dim) and V (seq_len, num_kv_heads, v_head_dim), widened exactly, what is quantised multiplied by its scales.
 * PP_INVALID_BLOCK when one of the ceil(seq_len / block_size) ids is out of range, PP_INVALID_ARGUMENT for the layer,
 * when num_blocks is too small for seq_len, or for tokens of a pointer that is NULL. */
PP_API pp_status pp_kv_gather(const pp_kv_pool *pool, int32_t layer, const int32_t *blocks, int64_t num_blocks,
                              int64_t seq_len, float *k, float *v);

/* Widens `n` neighbouring elements of PP_F32, PP_F16 or PP_BF16 to f32, exactly. */
PP_API void pp_widen(float *to, const void *from, int64_t n, pp_dtype dtype);

/* Copies the page of `src`, all layers, onto that of `dst`.  PP_INVALID_BLOCK when either is out of range. */
PP_API pp_status pp_kv_copy_block(const pp_kv_pool *pool, int32_t dst, int32_t src);

#ifdef __cplusplus
}
#endif
#endif
