/* layout.c: append and gather.  The picture is in pagepool/layout.h. */
#include "pagepool/layout.h"

#include <string.h>

#include "kernels.h"
#include "page.h"

/* A head's K or V row of one token, in the page's dtype, to and from its places in the page.  In tiled pages the dims
 * of K (bf16: pairs of dims) are 16 words apart, those of V side by side (bf16: every other element). */

/* `from` may be the caller's and lie anywhere. */
static void scatter32(uint32_t *to, const void *from, int32_t n) {
    for (int32_t i = 0; i < n; i++) memcpy(to + (int64_t)i * PP_GROUP, (const char *)from + i * 4, 4);
}

static void scatter16(uint16_t *to, const void *from, int32_t n, int32_t step) {
    for (int32_t i = 0; i < n; i++) memcpy(to + (int64_t)i * step, (const char *)from + i * 2, 2);
}

static void collect32(uint32_t *to, const uint32_t *from, int32_t n) {
    for (int32_t i = 0; i < n; i++) to[i] = from[(int64_t)i * PP_GROUP];
}

static void collect16(uint16_t *to, const uint16_t *from, int32_t n, int32_t step) {
    for (int32_t i = 0; i < n; i++) to[i] = from[(int64_t)i * step];
}

/* Dims side by side from the element on: a whole row, or a run of 64 of V. */
static int32_t run_of(const pp_kv_layout *layout, int32_t dim) {
    int32_t left = layout->head_dim - dim;
    return layout->tiled && left > PP_V_RUN ? PP_V_RUN : left;
}

static void write_row(const pp_kv_layout *layout, unsigned char *head, int32_t token, const void *k, const void *v) {
    unsigned char *to_k = head + pp_k_index(layout, token, 0) * layout->item_bytes, *to_v = head + layout->k_bytes;
    const int bf16 = layout->tiled && layout->dtype == PP_BF16;
    if (!layout->tiled)
        memcpy(to_k, k, (size_t)(layout->head_dim * layout->item_bytes));
    else if (layout->dtype == PP_F16)
        scatter16((uint16_t *)to_k, k, layout->head_dim, PP_GROUP);
    else
        scatter32((uint32_t *)to_k, k, bf16 ? layout->head_dim / 2 : layout->head_dim);
    for (int32_t d = 0, n; d < layout->head_dim; d += n) {
        unsigned char *to = to_v + pp_v_index(layout, token, d) * layout->item_bytes;
        const unsigned char *from = (const unsigned char *)v + d * layout->item_bytes;
        n = run_of(layout, d);
        if (bf16)
            scatter16((uint16_t *)to, from, n, 2);
        else
            memcpy(to, from, (size_t)(n * layout->item_bytes));
    }
}

static void read_row(const pp_kv_layout *layout, const unsigned char *head, int32_t token, void *k, void *v) {
    const unsigned char *from_k = head + pp_k_index(layout, token, 0) * layout->item_bytes;
    const unsigned char *from_v = head + layout->k_bytes;
    const int bf16 = layout->tiled && layout->dtype == PP_BF16;
    if (!layout->tiled)
        memcpy(k, from_k, (size_t)(layout->head_dim * layout->item_bytes));
    else if (layout->dtype == PP_F16)
        collect16(k, (const uint16_t *)from_k, layout->head_dim, PP_GROUP);
    else
        collect32(k, (const uint32_t *)from_k, bf16 ? layout->head_dim / 2 : layout->head_dim);
    for (int32_t d = 0, n; d < layout->head_dim; d += n) {
        const unsigned char *from = from_v + pp_v_index(layout, token, d) * layout->item_bytes;
        unsigned char *to = (unsigned char *)v + d * layout->item_bytes;
        n = run_of(layout, d);
        if (bf16)
            collect16((uint16_t *)to, (const uint16_t *)from, n, 2);
        else
            memcpy(to, from, (size_t)(n * layout->item_bytes));
    }
}

/* Tokens from `t` on whose slots follow each other within one group: they share their cache lines. */
static int64_t run_length(const pp_kv_layout *layout, const int64_t *slots, int64_t t, int64_t num_tokens) {
    const int64_t offset = slots[t] % layout->block_size, size = layout->tiled ? PP_GROUP : layout->block_size;
    const int64_t room = size - offset % size;
    int64_t n = 1;
    while (n < room && t + n < num_tokens && slots[t + n] == slots[t] + n) n++;
    return n;
}

pp_status pp_kv_append(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens,
                       const void *k, const void *v, pp_dtype src_dtype, int64_t token_stride, int64_t head_stride) {
    const pp_kv_layout *layout = &pool->layout;
    const int64_t num_slots = pool->num_blocks * layout->block_size, src_bytes = pp_dtype_bytes(src_dtype);
    if (layer < 0 || layer >= layout->num_layers || (src_dtype != PP_F32 && (int32_t)src_dtype != layout->dtype))
        return PP_INVALID_ARGUMENT;
    for (int64_t t = 0; t < num_tokens; t++)
        if (slot_mapping[t] < -1 || slot_mapping[t] >= num_slots) return PP_INVALID_SLOT;
    const int same = (int32_t)src_dtype == layout->dtype;
    void (*narrow)(void *, const float *, int64_t) = pp_kernels_get()->narrow[layout->dtype];
    uint32_t row_k[PP_MAX_HEAD_DIM], row_v[PP_MAX_HEAD_DIM];
    for (int64_t t = 0, n; t < num_tokens; t += n) {
        const int64_t slot = slot_mapping[t];
        n = 1;
        if (slot < 0) continue;
        n = run_length(layout, slot_mapping, t, num_tokens);
        int32_t token;
        unsigned char *head = pp_group_at(pool, layer, slot / layout->block_size, slot % layout->block_size, &token);
        for (int32_t h = 0; h < layout->num_kv_heads; h++, head += layout->head_bytes)
            for (int64_t i = 0; i < n; i++) {
                const int64_t source = ((t + i) * token_stride + h * head_stride) * src_bytes;
                const void *from_k = (const char *)k + source, *from_v = (const char *)v + source;
                if (!same) {
                    narrow(row_k, from_k, layout->head_dim);
                    narrow(row_v, from_v, layout->head_dim);
                    from_k = row_k;
                    from_v = row_v;
                }
                write_row(layout, head, token + (int32_t)i, from_k, from_v);
            }
    }
    return PP_OK;
}

pp_status pp_kv_gather(const pp_kv_pool *pool, int32_t layer, const int32_t *blocks, int64_t num_blocks,
                       int64_t seq_len, float *k, float *v) {
    const pp_kv_layout *layout = &pool->layout;
    if (layer < 0 || layer >= layout->num_layers || seq_len < 0) return PP_INVALID_ARGUMENT;
    const int64_t needed = seq_len / layout->block_size + (seq_len % layout->block_size != 0);
    if (needed > num_blocks) return PP_INVALID_ARGUMENT;
    for (int64_t b = 0; b < needed; b++)
        if (blocks[b] < 0 || blocks[b] >= pool->num_blocks) return PP_INVALID_BLOCK;
    void (*widen)(float *, const void *, int64_t) = pp_kernels_get()->widen[layout->dtype];
    uint32_t row_k[PP_MAX_HEAD_DIM], row_v[PP_MAX_HEAD_DIM];
    for (int64_t t = 0; t < seq_len; t++) {
        int32_t token;
        const unsigned char *head =
            pp_group_at(pool, layer, blocks[t / layout->block_size], t % layout->block_size, &token);
        for (int32_t h = 0; h < layout->num_kv_heads; h++, head += layout->head_bytes) {
            read_row(layout, head, token, row_k, row_v);
            widen(k, row_k, layout->head_dim);
            widen(v, row_v, layout->head_dim);
            k += layout->head_dim;
            v += layout->head_dim;
        }
    }
    return PP_OK;
}

void pp_widen(float *to, const void *from, int64_t n, pp_dtype dtype) { pp_kernels_get()->widen[dtype](to, from, n); }
