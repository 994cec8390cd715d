/* layout.c: page layout, append, gather and page copy.  The picture is in pagepool/layout.h. */
#include "pagepool/layout.h"

#include <string.h>

#include "convert.h"
#include "page.h"

int pp_abi_version(void) { return PP_ABI_VERSION; }

int64_t pp_dtype_bytes(pp_dtype dtype) { return dtype == PP_F32 ? 4 : 2; }

pp_status pp_kv_layout_init(pp_kv_layout *layout, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                            int32_t block_size, pp_dtype dtype) {
    if (num_layers < 1 || num_kv_heads < 1 || head_dim < 8 || head_dim > PP_MAX_HEAD_DIM || head_dim % 8 ||
        block_size < 1 || block_size > PP_MAX_BLOCK_SIZE || (dtype != PP_F32 && dtype != PP_F16 && dtype != PP_BF16))
        return PP_INVALID_ARGUMENT;
    int tiled = block_size % PP_GROUP == 0;
    int64_t item = pp_dtype_bytes(dtype), k_bytes = (int64_t)head_dim * (tiled ? PP_GROUP : block_size) * item;
    int64_t group_bytes, layer_bytes, block_bytes;
    if (__builtin_mul_overflow(k_bytes * 2, (int64_t)num_kv_heads, &group_bytes) ||
        __builtin_mul_overflow(group_bytes, (int64_t)(tiled ? block_size / PP_GROUP : 1), &layer_bytes) ||
        __builtin_mul_overflow(layer_bytes, (int64_t)num_layers, &block_bytes) || block_bytes >= (int64_t)1 << 40)
        return PP_INVALID_ARGUMENT;
    *layout = (pp_kv_layout){.num_layers = num_layers,
                             .num_kv_heads = num_kv_heads,
                             .head_dim = head_dim,
                             .block_size = block_size,
                             .dtype = dtype,
                             .tiled = tiled,
                             .item_bytes = item,
                             .k_bytes = k_bytes,
                             .head_bytes = k_bytes * 2,
                             .group_bytes = group_bytes,
                             .layer_bytes = layer_bytes,
                             .block_bytes = block_bytes};
    return PP_OK;
}

static void put(const pp_kv_layout *layout, unsigned char *at, const void *source, int64_t index, pp_dtype src_dtype) {
    if (src_dtype == (pp_dtype)layout->dtype) {
        memcpy(at, (const char *)source + index * layout->item_bytes, (size_t)layout->item_bytes);
        return;
    }
    float value = ((const float *)source)[index];
    uint16_t half = layout->dtype == PP_BF16 ? pp_f32_to_bf16(value) : pp_f32_to_f16(value);
    memcpy(at, &half, sizeof half);
}

static float get(const pp_kv_layout *layout, const unsigned char *at) {
    uint16_t half;
    float value;
    if (layout->dtype == PP_F32) {
        memcpy(&value, at, sizeof value);
        return value;
    }
    memcpy(&half, at, sizeof half);
    return layout->dtype == PP_BF16 ? pp_bf16_to_f32(half) : pp_f16_to_f32(half);
}

pp_status pp_kv_append(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens,
                       const void *k, const void *v, pp_dtype src_dtype, int64_t token_stride, int64_t head_stride) {
    const pp_kv_layout *layout = &pool->layout;
    int64_t num_slots = pool->num_blocks * layout->block_size;
    if (layer < 0 || layer >= layout->num_layers || (src_dtype != PP_F32 && (int32_t)src_dtype != layout->dtype))
        return PP_INVALID_ARGUMENT;
    for (int64_t t = 0; t < num_tokens; t++)
        if (slot_mapping[t] < -1 || slot_mapping[t] >= num_slots) return PP_INVALID_SLOT;
    for (int64_t t = 0; t < num_tokens; t++) {
        int64_t slot = slot_mapping[t];
        if (slot < 0) continue;
        int32_t token;
        unsigned char *at = pp_group_at(pool, layer, slot / layout->block_size, slot % layout->block_size, &token);
        for (int32_t h = 0; h < layout->num_kv_heads; h++, at += layout->head_bytes) {
            int64_t source = t * token_stride + h * head_stride;
            for (int32_t d = 0; d < layout->head_dim; d++) {
                put(layout, at + pp_k_index(layout, token, d) * layout->item_bytes, k, source + d, src_dtype);
                put(layout, at + layout->k_bytes + pp_v_index(layout, token, d) * layout->item_bytes, v, source + d,
                    src_dtype);
            }
        }
    }
    return PP_OK;
}

pp_status pp_kv_gather(const pp_kv_pool *pool, int32_t layer, const int32_t *blocks, int64_t num_blocks,
                       int64_t seq_len, float *k, float *v) {
    const pp_kv_layout *layout = &pool->layout;
    int64_t needed = (seq_len + layout->block_size - 1) / layout->block_size;
    if (layer < 0 || layer >= layout->num_layers || seq_len < 0 || needed > num_blocks) return PP_INVALID_ARGUMENT;
    for (int64_t b = 0; b < needed; b++)
        if (blocks[b] < 0 || blocks[b] >= pool->num_blocks) return PP_INVALID_BLOCK;
    for (int64_t t = 0; t < seq_len; t++) {
        int32_t token;
        const unsigned char *at =
            pp_group_at(pool, layer, blocks[t / layout->block_size], t % layout->block_size, &token);
        for (int32_t h = 0; h < layout->num_kv_heads; h++, at += layout->head_bytes)
            for (int32_t d = 0; d < layout->head_dim; d++) {
                *k++ = get(layout, at + pp_k_index(layout, token, d) * layout->item_bytes);
                *v++ = get(layout, at + layout->k_bytes + pp_v_index(layout, token, d) * layout->item_bytes);
            }
    }
    return PP_OK;
}

pp_status pp_kv_copy_block(const pp_kv_pool *pool, int32_t dst, int32_t src) {
    if (dst < 0 || src < 0 || dst >= pool->num_blocks || src >= pool->num_blocks) return PP_INVALID_BLOCK;
    if (dst != src)
        memcpy(pool->base + dst * pool->layout.block_bytes, pool->base + src * pool->layout.block_bytes,
               (size_t)pool->layout.block_bytes);
    return PP_OK;
}
