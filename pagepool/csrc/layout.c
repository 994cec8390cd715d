/* layout.c: append and gather. pagepool/layout.h has a diagram of the layout. */
#include "pagepool/layout.h"

#include <string.h>

#include "float_mode.h"
#include "kernels.h"
#include "page.h"

/* Reads one token's K or V row of a head from a page, in the dtype of the page.  In tiled pages, the dims of K (bf16:
 * pairs of dims) are 16 words apart.  The dims of V are adjacent (bf16: every other element). */

static void collect32(uint32_t *to, const uint32_t *from, int32_t n) {
    for (int32_t i = 0; i < n; i++) to[i] = from[(int64_t)i * PP_GROUP];
}

static void collect16(uint16_t *to, const uint16_t *from, int32_t n, int32_t step) {
    for (int32_t i = 0; i < n; i++) to[i] = from[(int64_t)i * step];
}

/* Number of adjacent dims from the given dim on: a whole row, or a run of 64 of V. */
static int32_t run_of(const pp_kv_layout *layout, int32_t dim) {
    int32_t left = layout->v_head_dim - dim;
    return layout->tiled && left > PP_V_RUN ? PP_V_RUN : left;
}

/* Reads a quantised row of K or V from a group: the integers times the scale of the row.  K is also multiplied by the
 * scale of each channel, unless channel_scale is NULL. */
static void read_quantised(int32_t dtype, int is_v, const unsigned char *group, int32_t token, int32_t dims,
                           const float *channel_scale, float *to) {
    float scale;
    memcpy(&scale, group + pp_scales_at(dtype, dims) + token * (int)sizeof scale, sizeof scale);
    for (int32_t d = 0; d < dims; d++) {
        int upper;
        const unsigned char byte = group[pp_quantised_at(dtype, is_v, dims, token, d, &upper)];
        const int integer = dtype == PP_INT4 ? (byte >> 4 * upper & 15) - 8 : is_v ? (int8_t)byte : byte - 128;
        to[d] = (float)integer * scale;
        if (channel_scale) to[d] *= channel_scale[d];
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
        const int64_t item = layout->item_bytes;
        const unsigned char *from = head + layout->k_bytes + pp_v_index(layout, token, d) * item;
        unsigned char *to = (unsigned char *)v + d * item;
        n = run_of(layout, d);
        if (layout->tiled && layout->dtype == PP_BF16)
            collect16((uint16_t *)to, (const uint16_t *)from, n, 2);
        else
            memcpy(to, from, (size_t)(n * item));
    }
}

/* Returns how many of the next `left` tokens, beginning with `slot`, have consecutive slots in one group.  They share
 * their cache lines. */
static int64_t run_length(const pp_kv_layout *layout, int64_t slot, const int64_t *slots, int64_t left) {
    const int64_t offset = slot % layout->block_size, size = layout->tiled ? PP_GROUP : layout->block_size;
    const int64_t room = size - offset % size;
    int64_t n = 1;
    while (n < room && n < left && slots[n] == slot + n) n++;
    return n;
}

static unsigned char *group_of(const pp_kv_pool *pool, int32_t layer, int64_t slot, int32_t *token) {
    const int64_t size = pool->layout.block_size;
    return pp_group_at(pool, layer, slot / size, slot % size, token);
}

/* Rows of K or V, in elements of `from_dtype`, to write to pages of `dtype`. */
typedef struct source {
    pp_kv_rows rows;
    int64_t bytes; /* of an element */
    int32_t from_dtype, dtype, dims;
    const float *channel_scale; /* NULL, or (num_kv_heads, dims) of the layer */
} source;

static const void *row_at(const source *source, int64_t token, int32_t head) {
    const int64_t index = token * source->rows.token_stride + head * source->rows.head_stride;
    return (const char *)source->rows.data + index * source->bytes;
}

static const float *channel_scale_of(const source *source, int32_t head) {
    return source->channel_scale ? source->channel_scale + (int64_t)head * source->dims : NULL;
}

/* Writes `count` adjacent tokens of a tiled page, from token `t` of the source on.  `ahead` is the group that is
 * written next; it receives `more` tokens. */
static void write_tiled(const pp_kv_layout *layout, unsigned char *group, const unsigned char *ahead, int32_t token,
                        int64_t count, int64_t more, const source sources[2], int64_t t) {
    void (*write)(const pp_rows *) = pp_kernels_get()->write_rows;
    const int64_t k_bytes = layout->k_bytes;
    for (int32_t h = 0; h < layout->num_kv_heads; h++, group += layout->head_bytes) {
        const int last = h + 1 == layout->num_kv_heads;
        const unsigned char *next = last ? ahead : group + layout->head_bytes;
        for (int is_v = 0; is_v < (layout->v_in_k ? 1 : 2); is_v++)
            write(&(pp_rows){.to = group + (is_v ? k_bytes : 0),
                             .ahead = next + (is_v ? k_bytes : 0),
                             .is_v = is_v,
                             .dtype = sources[is_v].dtype,
                             .dims = sources[is_v].dims,
                             .token = token,
                             .count = (int32_t)count,
                             .from = row_at(&sources[is_v], t, h),
                             .step = sources[is_v].rows.token_stride * sources[is_v].bytes,
                             .next = row_at(&sources[is_v], last ? t + count : t, last ? 0 : h + 1),
                             .next_count = (int32_t)(last ? more : count),
                             .from_dtype = sources[is_v].from_dtype,
                             .channel_scale = channel_scale_of(&sources[is_v], h)});
    }
}

/* Writes a row of a plain page from elements of any dtype. */
static void write_row(void *to, const source *from, const void *row) {
    const pp_kernels *kernels = pp_kernels_get();
    float wide[PP_MAX_HEAD_DIM];
    if (from->from_dtype == from->dtype) {
        memcpy(to, row, (size_t)(from->dims * from->bytes));
        return;
    }
    if (from->from_dtype != PP_F32) {
        kernels->widen[from->from_dtype](wide, row, from->dims);
        row = wide;
    }
    kernels->narrow[from->dtype](to, row, from->dims);
}

/* Writes `count` adjacent tokens of a plain page.  A row of such a page is one token. */
static void write_plain(const pp_kv_layout *layout, unsigned char *block, int32_t token, int64_t count,
                        const source sources[2], int64_t t) {
    for (int32_t h = 0; h < layout->num_kv_heads; h++, block += layout->head_bytes)
        for (int is_v = 0; is_v < (layout->v_in_k ? 1 : 2); is_v++)
            for (int64_t i = 0; i < count; i++) {
                const source *from = &sources[is_v];
                unsigned char *to = block + (is_v ? layout->k_bytes : 0);
                write_row(to + (token + i) * from->dims * layout->item_bytes, from, row_at(from, t + i, h));
            }
}

pp_status pp_kv_append_rows(const pp_kv_pool *pool, int32_t layer, const int64_t *slot_mapping, int64_t num_tokens,
                            pp_kv_rows k, pp_kv_rows v, pp_dtype src_dtype) {
    const pp_kv_layout *layout = &pool->layout;
    const int64_t num_slots = pool->num_blocks * layout->block_size, bytes = pp_dtype_bytes(src_dtype);
    if (layer < 0 || layer >= layout->num_layers || src_dtype < PP_F32 || src_dtype > PP_BF16 ||
        (num_tokens > 0 && (!pool->base || !slot_mapping || !k.data || (!layout->v_in_k && !v.data))))
        return PP_INVALID_ARGUMENT;
    for (int64_t t = 0; t < num_tokens; t++)
        if (slot_mapping[t] < -1 || slot_mapping[t] >= num_slots) return PP_INVALID_SLOT;
    const float *channel_scale = pp_channel_scale(pool, layer, 0);
    const source sources[2] = {{k, bytes, (int32_t)src_dtype, layout->dtype, layout->head_dim, channel_scale},
                               {v, bytes, (int32_t)src_dtype, layout->v_dtype, layout->v_head_dim, NULL}};
    const uint64_t modes = pp_modes_enter();
    for (int64_t t = 0, n; t < num_tokens; t += n) {
        /* Read and check the slot again, because another thread may have changed it.  The write then still stays inside
         * the pool. */
        const int64_t slot = __atomic_load_n(&slot_mapping[t], __ATOMIC_RELAXED);
        n = 1;
        if (slot < 0 || slot >= num_slots) continue;
        n = run_length(layout, slot, slot_mapping + t, num_tokens - t);
        int32_t first, unused;
        unsigned char *to = group_of(pool, layer, slot, &first), *ahead = to;
        if (layout->tiled) {
            const int64_t left = num_tokens - t - n;
            const int64_t next = left ? __atomic_load_n(&slot_mapping[t + n], __ATOMIC_RELAXED) : -1;
            if (next >= 0 && next < num_slots) ahead = group_of(pool, layer, next, &unused);
            write_tiled(layout, to, ahead, first, n, left < n ? left : n, sources, t);
        } else {
            write_plain(layout, to, first, n, sources, t);
        }
    }
    pp_modes_leave(modes);
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
    if (layer < 0 || layer >= layout->num_layers || seq_len < 0 ||
        (seq_len > 0 && (!pool->base || !blocks || !k || !v)))
        return PP_INVALID_ARGUMENT;
    const int64_t needed = seq_len / layout->block_size + (seq_len % layout->block_size != 0);
    if (needed > num_blocks) return PP_INVALID_ARGUMENT;
    for (int64_t b = 0; b < needed; b++)
        if (blocks[b] < 0 || blocks[b] >= pool->num_blocks) return PP_INVALID_BLOCK;
    const pp_kernels *kernels = pp_kernels_get();
    uint32_t row[PP_MAX_HEAD_DIM];
    pp_status status = PP_OK;
    const uint64_t modes = pp_modes_enter();
    for (int64_t t = 0; t < seq_len; t++) {
        int32_t token;
        const int32_t block = __atomic_load_n(&blocks[t / layout->block_size], __ATOMIC_RELAXED);
        if (block < 0 || block >= pool->num_blocks) { /* another thread has changed it */
            status = PP_INVALID_BLOCK;
            break;
        }
        const unsigned char *head = pp_group_at(pool, layer, block, t % layout->block_size, &token);
        for (int32_t h = 0; h < layout->num_kv_heads; h++, head += layout->head_bytes) {
            if (pp_is_quantised(layout->dtype)) {
                read_quantised(layout->dtype, 0, head, token, layout->head_dim, pp_channel_scale(pool, layer, h), k);
                read_quantised(layout->v_dtype, 1, head + layout->k_bytes, token, layout->v_head_dim, NULL, v);
            } else {
                read_k(layout, head, token, row);
                kernels->widen[layout->dtype](k, row, layout->head_dim);
                if (!layout->v_in_k) read_v(layout, head, token, row);
                kernels->widen[layout->dtype](v, row, layout->v_head_dim);
            }
            k += layout->head_dim;
            v += layout->v_head_dim;
        }
    }
    pp_modes_leave(modes);
    return status;
}

void pp_widen(float *to, const void *from, int64_t n, pp_dtype dtype) {
    const uint64_t modes = pp_modes_enter();
    pp_kernels_get()->widen[dtype](to, from, n);
    pp_modes_leave(modes);
}
