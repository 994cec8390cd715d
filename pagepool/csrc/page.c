/* page.c: the page layout and copies of whole pages. This file needs no kernels, so that a program that only allocates
 * does not link them. */
#include <string.h>

#include "page.h"

int pp_abi_version(void) { return PP_ABI_VERSION; }

int64_t pp_dtype_bytes(pp_dtype dtype) { return dtype == PP_F32 ? 4 : pp_is_quantised(dtype) ? 1 : 2; }

static int is_head_dim(int32_t dim) { return dim >= 8 && dim <= PP_MAX_HEAD_DIM && dim % 8 == 0; }

static int is_dtype(int32_t dtype) { return dtype >= PP_F32 && dtype <= PP_INT4; }

/* Bytes of a head's K or V of `tokens` tokens. */
static int64_t bytes_of(pp_dtype dtype, int64_t dims, int64_t tokens) {
    if (pp_is_quantised(dtype)) return pp_scales_at(dtype, dims) + tokens * (int64_t)sizeof(float);
    return dims * tokens * pp_dtype_bytes(dtype);
}

/* K and V have the same dtype, or K is int8 and V is int4, which is between int8 and int4 in bytes and in error
 * (docs/guide/attention.md). */
static int is_pair(int32_t dtype, int32_t v_dtype) {
    return is_dtype(dtype) && (dtype == v_dtype || (dtype == PP_INT8 && v_dtype == PP_INT4));
}

static pp_status init(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                      int32_t v_head_dim, int v_in_k, int32_t block_size, pp_dtype dtype, pp_dtype v_dtype) {
    const int tiled = block_size % PP_GROUP == 0;
    if (num_layers < 1 || num_kv_heads < 1 || !is_head_dim(head_dim) || !is_head_dim(v_head_dim) ||
        (v_in_k && v_head_dim > head_dim) || block_size < 1 || block_size > PP_MAX_BLOCK_SIZE ||
        !is_pair(dtype, v_dtype) || (pp_is_quantised(dtype) && (!tiled || v_in_k)))
        return PP_INVALID_ARGUMENT;
    const int64_t tokens = tiled ? PP_GROUP : block_size;
    const int64_t k_bytes = bytes_of(dtype, head_dim, tokens);
    const int64_t v_bytes = v_in_k ? 0 : bytes_of(v_dtype, v_head_dim, tokens);
    int64_t group_bytes, layer_bytes, block_bytes;
    if (__builtin_mul_overflow(k_bytes + v_bytes, (int64_t)num_kv_heads, &group_bytes) ||
        __builtin_mul_overflow(group_bytes, (int64_t)(tiled ? block_size / PP_GROUP : 1), &layer_bytes) ||
        __builtin_mul_overflow(layer_bytes, (int64_t)num_layers, &block_bytes) || block_bytes >= (int64_t)1 << 40)
        return PP_INVALID_ARGUMENT;
    *layout = (pp_kv_layout){.num_layers = num_layers,
                             .num_kv_heads = num_kv_heads,
                             .head_dim = head_dim,
                             .v_head_dim = v_head_dim,
                             .v_in_k = v_in_k != 0,
                             .block_size = block_size,
                             .dtype = dtype,
                             .v_dtype = v_dtype,
                             .tiled = tiled,
                             .item_bytes = pp_dtype_bytes(dtype),
                             .k_bytes = k_bytes,
                             .v_bytes = v_bytes,
                             .head_bytes = k_bytes + v_bytes,
                             .group_bytes = group_bytes,
                             .layer_bytes = layer_bytes,
                             .block_bytes = block_bytes};
    return PP_OK;
}

pp_status pp_kv_layout_init(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                            int32_t block_size, pp_dtype dtype) {
    return init(layout, num_layers, num_kv_heads, head_dim, head_dim, 0, block_size, dtype, dtype);
}

pp_status pp_kv_layout_init_v(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                              int32_t v_head_dim, int v_in_k, int32_t block_size, pp_dtype dtype) {
    return init(layout, num_layers, num_kv_heads, head_dim, v_head_dim, v_in_k, block_size, dtype, dtype);
}

pp_status pp_kv_layout_init_dtypes(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                                   int32_t v_head_dim, int32_t block_size, pp_dtype dtype, pp_dtype v_dtype) {
    return init(layout, num_layers, num_kv_heads, head_dim, v_head_dim, 0, block_size, dtype, v_dtype);
}

pp_status pp_kv_copy_block(const pp_kv_pool *pool, int32_t dst, int32_t src) {
    if (dst < 0 || src < 0 || dst >= pool->num_blocks || src >= pool->num_blocks) return PP_INVALID_BLOCK;
    if (dst != src)
        memcpy(pool->base + dst * pool->layout.block_bytes, pool->base + src * pool->layout.block_bytes,
               (size_t)pool->layout.block_bytes);
    return PP_OK;
}
