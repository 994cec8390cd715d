/* page.h: from (layer, block, token, head) to bytes and from a dim to an element; pagepool/layout.h has the picture. */
#ifndef PP_PAGE_H
#define PP_PAGE_H

#include "pagepool/layout.h"

/* Where the K and V of all heads of the group that holds `offset` begin; *token becomes the place within the group. */
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
    int32_t run = dim / PP_V_RUN, column = dim % PP_V_RUN;
    int32_t left = layout->v_head_dim - run * PP_V_RUN, width = left < PP_V_RUN ? left : PP_V_RUN;
    int64_t start = (int64_t)run * PP_V_RUN * PP_GROUP;
    if (layout->dtype == PP_BF16) return start + (int64_t)(token / 2) * (2 * width) + column * 2 + token % 2;
    return start + (int64_t)token * width + column;
}

#endif
