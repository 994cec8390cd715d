/* pagepool/layout.h: the memory layout of keys and values in a pool.
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
 * Tiled layouts (block_size a multiple of 16).  A head's K is token-minor, and its V is in the order in which decode
 * reads it, so that decode reads a page sequentially:
 *
 *   f32, f16   K [head_dim][16]           V [v_head_dim / 64][16][64]
 *   bf16       K [head_dim / 2][16][2]    V [v_head_dim / 64][16 / 2][64][2]
 *
 * If v_head_dim is not a multiple of 64, the last run of V has v_head_dim % 64 dims.  In bf16 two neighbours (dims of
 * K, tokens of V) share a 32-bit word: a shift gives the first as f32, a mask the second.
 *
 * Plain layouts (any other block_size): one group of block_size tokens, K [block_size][head_dim], V
 * [block_size][v_head_dim].
 *
 * In tiled layouts K and V may be quantised, in the same dtype or K in int8 and V in int4.  They have an f32 scale for
 * each token and head, stored after the head's elements of the group.  The value of an element is integer * scale; for
 * K it is also multiplied by the channel scale, if the pool has channel scales.
 *
 *   int8       K [head_dim / 4][16][4], integers from -127 to 127 stored plus 128, scales [16]
 *              V [v_head_dim / 64][16 / 4][64][4], two's complement, the last axis is four tokens, scales [16]
 *   int4       integers from -7 to 7 stored plus 8, two dims of a token in a byte:
 *              K [head_dim / 8][16][4], low nibble dim 8 i + j, high nibble dim 8 i + 4 + j, scales [16]
 *              V [v_head_dim / 64][16 / 4][32][4], low nibble dim 64 i + j, high nibble 32 dims later (half of the
 *              run's dims in a shorter last run), scales [16]
 *
 * K and V may have different numbers of dims.  With v_in_k, V is the first v_head_dim dims of K and is not stored
 * again: v_bytes is 0.  This is the latent cache of multi-head latent attention, with 576 dims for all query heads, the
 * first 512 of them V.  The pages then have the order of K, since all dims are read as K.  Decode reorders a tile's V
 * once for all query heads that share it.
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

#define PP_GROUP 16           /* tokens per group in tiled layouts */
#define PP_V_RUN 64           /* dims of V that are contiguous for one token in tiled layouts */
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
    int64_t item_bytes;  /* bytes of an element of K; 1 if quantised */
    int64_t k_bytes;     /* bytes of a head's K in one group, including scales; its V follows */
    int64_t v_bytes;     /* bytes of a head's V in one group; 0 with v_in_k */
    int64_t head_bytes;  /* from one head to the next: k_bytes + v_bytes */
    int64_t group_bytes; /* from one group to the next */
    int64_t layer_bytes; /* from one layer to the next */
    int64_t block_bytes; /* from one block to the next */
} pp_kv_layout;

typedef struct pp_kv_pool {
    pp_kv_layout layout;
    unsigned char *base; /* num_blocks * layout.block_bytes bytes, owned by the caller; at least 4-byte aligned, 64-byte
                            alignment and huge pages are faster */
    int64_t num_blocks;  /* at most 2^31: ids are int32 */
    const float *k_channel_scale; /* NULL, or for quantised K (num_layers, num_kv_heads, head_dim), all positive: K is
                                     divided by it before quantisation, and queries are multiplied by it */
} pp_kv_pool;

/* Fills `layout`, with the same dims for V as for K.  Requires num_layers >= 1, num_kv_heads >= 1, head_dim a multiple
 * of 8 from 8 to 1024, 1 <= block_size <= 1024, a dtype of pp_dtype and a block below 2^40 bytes.  Otherwise returns
 * PP_INVALID_ARGUMENT and changes nothing. */
PP_API pp_status pp_kv_layout_init(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                                   int32_t block_size, pp_dtype dtype);

/* The same for a V with v_head_dim dims, a multiple of 8 from 8 to 1024.  With v_in_k, V is part of K and v_head_dim is
 * at most head_dim. */
PP_API pp_status pp_kv_layout_init_v(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                                     int32_t v_head_dim, int v_in_k, int32_t block_size, pp_dtype dtype);

/* The same for K in `dtype` and V in `v_dtype`: equal, or PP_INT8 and PP_INT4.  Quantised dtypes require a block_size
 * that is a multiple of 16; v_in_k is not supported. */
PP_API pp_status pp_kv_layout_init_dtypes(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads,
                                          int32_t head_dim, int32_t v_head_dim, int32_t block_size, pp_dtype dtype,
                                          pp_dtype v_dtype);

/* Bytes of one element; 1 for quantised dtypes. */
PP_API int64_t pp_dtype_bytes(pp_dtype dtype);

/* Writes the K and V of `num_tokens` tokens of one layer into their slots (slot = block * block_size + offset).
 *   k, v           element (t, h, d) at index t * token_stride + h * head_stride + d; with v_in_k v is not read
 *   src_dtype      PP_F32, PP_F16 or PP_BF16: pages of the same dtype get the same bits; other pages get values rounded
 *                  to nearest even, or quantised
 *   slot_mapping   (num_tokens,); -1 skips the token
 *
 * Quantisation works on rows, a row being one head of one token; K is divided by its channel scales first.  A row's
 * scale is its largest |x| / 127 (int4: / 7), its integers are x / scale rounded to nearest even.  A row with all |x|
 * below 2^-100 is stored as zeros.  A row that is not finite gets a NaN scale, and any result that gives it weight is
 * NaN.
 *
 * Returns PP_INVALID_SLOT for a slot below -1 or at least num_blocks * block_size.  Returns PP_INVALID_ARGUMENT for a
 * layer out of range, a quantised src_dtype, or a NULL pointer (the pool's base included) with num_tokens > 0.  On
 * failure nothing is written.  k and v must not overlap written pages.  Threads may append to disjoint slots
 * concurrently. */
PP_API pp_status pp_kv_append(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens,
                              const void *k, const void *v, pp_dtype src_dtype, int64_t token_stride,
                              int64_t head_stride);

/* Rows of K or V in the caller's memory: element (t, h, d) at index t * token_stride + h * head_stride + d. */
typedef struct pp_kv_rows {
    const void *data;
    int64_t token_stride, head_stride;
} pp_kv_rows;

/* pp_kv_append for K and V with different strides, for example for different dims. */
PP_API pp_status pp_kv_append_rows(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping,
                                   int64_t num_tokens, pp_kv_rows k, pp_kv_rows v, pp_dtype src_dtype);

/* Reads the first `seq_len` tokens of the sequence in `blocks` as C-contiguous f32: K (seq_len, num_kv_heads, head_dim)
 * and V (seq_len, num_kv_heads, v_head_dim).  Values are widened exactly; quantised values are multiplied by their
 * scales.  Returns PP_INVALID_BLOCK if one of the ceil(seq_len / block_size) ids is out of range, PP_INVALID_ARGUMENT
 * for a layer out of range, num_blocks too small for seq_len, or a NULL pointer with seq_len > 0. */
PP_API pp_status pp_kv_gather(const pp_kv_pool *pool, int32_t layer, const int32_t *blocks, int64_t num_blocks,
                              int64_t seq_len, float *k, float *v);

/* Widens `n` contiguous elements of PP_F32, PP_F16 or PP_BF16 to f32, exactly. */
PP_API void pp_widen(float *to, const void *from, int64_t n, pp_dtype dtype);

/* Copies all layers of block `src` to block `dst`.  PP_INVALID_BLOCK if either id is out of range. */
PP_API pp_status pp_kv_copy_block(const pp_kv_pool *pool, int32_t dst, int32_t src);

#ifdef __cplusplus
}
#endif
#endif
