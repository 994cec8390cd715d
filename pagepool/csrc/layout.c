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
    int32_t left = layout->v_head_dim - dim;
    return layout->tiled && left > PP_V_RUN ? PP_V_RUN : left;
}

static void write_k(const pp_kv_layout *layout, unsigned char *head, int32_t token, const void *k) {
    unsigned char *to = head + pp_k_index(layout, token, 0) * layout->item_bytes;
    const int bf16 = layout->dtype == PP_BF16;
    if (!layout->tiled)
        memcpy(to, k, (size_t)(layout->head_dim * layout->item_bytes));
    else if (layout->dtype == PP_F16)
        scatter16((uint16_t *)to, k, layout->head_dim, PP_GROUP);
    else
        scatter32((uint32_t *)to, k, bf16 ? layout->head_dim / 2 : layout->head_dim);
}

static void write_v(const pp_kv_layout *layout, unsigned char *head, int32_t token, const void *v) {
    for (int32_t d = 0, n; d < layout->v_head_dim; d += n) {
        unsigned char *to = head + layout->k_bytes + pp_v_index(layout, token, d) * layout->item_bytes;
        const unsigned char *from = (const unsigned char *)v + d * layout->item_bytes;
        n = run_of(layout, d);
        if (layout->tiled && layout->dtype == PP_BF16)
            scatter16((uint16_t *)to, from, n, 2);
        else
            memcpy(to, from, (size_t)(n * layout->item_bytes));
    }
}

static void read_k(const pp_kv_layout *layout, const unsigned char *head, int32_t token, void *k) {
    const unsigned char *from = head + pp_k_index(layout, token, 0) * layout->item_bytes;
    const int bf16 = layout->dtype == PP_BF16;
    if (!layout->tiled)
        memcpy(k, from, (size_t)(layout->head_dim * layout->item_bytes));
    else if (layout->dtype == PP_F16)
        collect16(k, (const uint16_t *)from, layout->head_dim, PP_GROUP);
    else
        collect32(k, (const uint32_t *)from, bf16 ? layout->head_dim / 2 : layout->head_dim);
}

static void read_v(const pp_kv_layout *layout, const unsigned char *head, int32_t token, void *v) {
    for (int32_t d = 0, n; d < layout->v_head_dim; d += n) {
        const unsigned char *from = head + layout->k_bytes + pp_v_index(layout, token, d) * layout->item_bytes;
        unsigned char *to = (unsigned char *)v + d * layout->item_bytes;
        n = run_of(layout, d);
        if (layout->tiled && layout->dtype == PP_BF16)
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

/* One row of K or V: where it lies or, where the page has another dtype, rounded into `row`. */
static const void *stored_row(const pp_kv_rows *rows, int64_t token, int64_t head, int64_t src_bytes,
                              void (*narrow)(void *, const float *, int64_t), int32_t dims, uint32_t *row) {
    const void *from = (const char *)rows->data + (token * rows->token_stride + head * rows->head_stride) * src_bytes;
    if (!narrow) return from;
    narrow(row, from, dims);
    return row;
}

pp_status pp_kv_append_rows(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens,
                            pp_kv_rows k, pp_kv_rows v, pp_dtype src_dtype) {
    const pp_kv_layout *layout = &pool->layout;
    const int64_t num_slots = pool->num_blocks * layout->block_size, bytes = pp_dtype_bytes(src_dtype);
    if (layer < 0 || layer >= layout->num_layers || (src_dtype != PP_F32 && (int32_t)src_dtype != layout->dtype))
        return PP_INVALID_ARGUMENT;
    for (int64_t t = 0; t < num_tokens; t++)
        if (slot_mapping[t] < -1 || slot_mapping[t] >= num_slots) return PP_INVALID_SLOT;
    const int same = (int32_t)src_dtype == layout->dtype;
    void (*narrow)(void *, const float *, int64_t) = same ? NULL : pp_kernels_get()->narrow[layout->dtype];
    uint32_t row[PP_MAX_HEAD_DIM];
    for (int64_t t = 0, n; t < num_tokens; t += n) {
        const int64_t slot = slot_mapping[t];
        n = 1;
        if (slot < 0) continue;
        n = run_length(layout, slot_mapping, t, num_tokens);
        int32_t first;
        unsigned char *head = pp_group_at(pool, layer, slot / layout->block_size, slot % layout->block_size, &first);
        for (int32_t h = 0; h < layout->num_kv_heads; h++, head += layout->head_bytes)
            for (int64_t i = 0; i < n; i++) {
                const int32_t token = first + (int32_t)i;
                write_k(layout, head, token, stored_row(&k, t + i, h, bytes, narrow, layout->head_dim, row));
                if (!layout->v_in_k)
                    write_v(layout, head, token, stored_row(&v, t + i, h, bytes, narrow, layout->v_head_dim, row));
            }
    }
    return PP_OK;
}

pp_status pp_kv_append(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens,
                       const void *k, const void *v, pp_dtype src_dtype, int64_t token_stride, int64_t head_stride) {
    return pp_kv_append_rows(pool, layer, slot_mapping, num_tokens, (pp_kv_rows){k, token_stride, head_stride},
                             (pp_kv_rows){v, token_stride, head_stride}, src_dtype);
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
    uint32_t row[PP_MAX_HEAD_DIM];
    for (int64_t t = 0; t < seq_len; t++) {
        int32_t token;
        const unsigned char *head =
            pp_group_at(pool, layer, blocks[t / layout->block_size], t % layout->block_size, &token);
        for (int32_t h = 0; h < layout->num_kv_heads; h++, head += layout->head_bytes) {
            read_k(layout, head, token, row);
            widen(k, row, layout->head_dim);
            if (layout->v_in_k)
                memcpy(v, k, (size_t)layout->v_head_dim * sizeof(float));
            else {
                read_v(layout, head, token, row);
                widen(v, row, layout->v_head_dim);
            }
            k += layout->head_dim;
            v += layout->v_head_dim;
        }
    }
    return PP_OK;
}

void pp_widen(float *to, const void *from, int64_t n, pp_dtype dtype) { pp_kernels_get()->widen[dtype](to, from, n); }
