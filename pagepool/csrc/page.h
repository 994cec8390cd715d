/* page.h: maps (layer, block, token, head) to bytes and a dim to an element. pagepool/layout.h has a diagram. */
#ifndef PP_PAGE_H
#define PP_PAGE_H

#include "pagepool/layout.h"

static inline int pp_is_quantised(int32_t dtype) { return dtype >= PP_INT8; }

/* Offset of the scales of a head's quantised K or V, in bytes from its first element in the group. */
static inline int64_t pp_scales_at(int32_t dtype, int64_t dims) {
    return dtype == PP_INT4 ? dims * PP_GROUP / 2 : dims * PP_GROUP;
}

/* Width of the run of V that contains `dim`: PP_V_RUN (64) dims, or fewer in the last run. */
static inline int32_t pp_run_width(int32_t dims, int32_t dim) {
    const int32_t left = dims - dim / PP_V_RUN * PP_V_RUN;
    return left < PP_V_RUN ? left : PP_V_RUN;
}

/* The scales of K's channels in a layer, from KV head `head` on, or NULL. */
static inline const float *pp_channel_scale(const pp_kv_pool *pool, int32_t layer, int32_t head) {
    const int64_t heads = (int64_t)layer * pool->layout.num_kv_heads + head;
    return pool->k_channel_scale ? pool->k_channel_scale + heads * pool->layout.head_dim : NULL;
}

/* Returns the byte offset of an element of quantised K or V. For int4, sets *upper to 1 if the element is in the upper
 * half of the byte. */
static inline int64_t pp_quantised_at(int32_t dtype, int is_v, int32_t dims, int32_t token, int32_t dim, int *upper) {
    if (is_v) {
        const int32_t width = pp_run_width(dims, dim), columns = dtype == PP_INT4 ? width / 2 : width;
        const int32_t run = dim / PP_V_RUN * PP_V_RUN * PP_GROUP, column = dim % PP_V_RUN;
        *upper = column >= columns;
        return (dtype == PP_INT4 ? run / 2 : run) + token / 4 * columns * 4 + column % columns * 4 + token % 4;
    }
    *upper = dtype == PP_INT4 && dim % 8 >= 4;
    return dim / (dtype == PP_INT4 ? 8 : 4) * 4 * PP_GROUP + token * 4 + dim % 4;
}

/* Returns the address of the group that holds `offset` (K and V of all heads) and sets *token to the position in the
 * group. */
static inline unsigned char *pp_group_at(const pp_kv_pool *pool, int32_t layer, int64_t block, int64_t offset,
                                         int32_t *token) {
    const pp_kv_layout *layout = &pool->layout;
    int64_t group = layout->tiled ? offset / PP_GROUP : 0;
    *token = (int32_t)(offset - group * PP_GROUP);
    return pool->base + block * layout->block_bytes + layer * layout->layer_bytes + group * layout->group_bytes;
}

/* Element index of K[token][dim] within a head's K. */
static inline int64_t pp_k_index(const pp_kv_layout *layout, int32_t token, int32_t dim) {
    if (!layout->tiled) return (int64_t)token * layout->head_dim + dim;
    if (layout->dtype == PP_BF16) return (int64_t)(dim / 2) * (2 * PP_GROUP) + token * 2 + dim % 2;
    return (int64_t)dim * PP_GROUP + token;
}

/* Element index of V[token][dim] within a head's V, which is stored apart from K. */
static inline int64_t pp_v_index(const pp_kv_layout *layout, int32_t token, int32_t dim) {
    if (!layout->tiled) return (int64_t)token * layout->v_head_dim + dim;
    int32_t run = dim / PP_V_RUN, column = dim % PP_V_RUN, width = pp_run_width(layout->v_head_dim, dim);
    int64_t start = (int64_t)run * PP_V_RUN * PP_GROUP;
    if (layout->dtype == PP_BF16) return start + (int64_t)(token / 2) * (2 * width) + column * 2 + token % 2;
    return start + (int64_t)token * width + column;
}

#endif
