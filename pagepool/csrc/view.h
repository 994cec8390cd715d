/* view.h: which tokens of a sequence its query tokens see.
 *
 * A sequence of seq_len tokens has num_queries query tokens, which are its last tokens.  Query i has the position
 *
 *   position(i) = seq_len - num_queries + i        (below 0: before the sequence; it sees no token)
 *
 * It sees token t when first_seen(i) <= t < end_seen(i) and, with a mask, when the mask's bit is set:
 *
 *   mask      bit i * mask_width + (t - mask_first), little-endian in each byte; tokens before mask_first are visible
 *
 * Without a mask a query sees its own token and earlier tokens.  With a mask it also sees later tokens with a set
 * bit. */
#ifndef PP_VIEW_H
#define PP_VIEW_H

#include <stdint.h>

#include "pagepool/attention.h"

typedef struct pp_view {
    int64_t seq_len;
    int32_t num_queries;
    int64_t window; /* 0: unlimited; otherwise a query sees the last `window` tokens up to its own */
    const uint8_t *mask;
    int64_t mask_first, mask_width;
} pp_view;

static inline int64_t pp_position(const pp_view *view, int64_t query) {
    return view->seq_len - view->num_queries + query;
}

/* A window may be the largest value of its type.  The comparison before the subtraction prevents an overflow. */
static inline int64_t pp_first_seen(const pp_view *view, int64_t query) {
    const int64_t position = pp_position(view, query);
    return view->window && position >= view->window ? position + 1 - view->window : 0;
}

static inline int64_t pp_end_seen(const pp_view *view, int64_t query) {
    const int64_t end = view->mask ? view->seq_len : pp_position(view, query) + 1;
    return end > 0 ? end : 0;
}

/* All query tokens see every token from first_seen of the last query up to this position (exclusive). */
static inline int64_t pp_until_all_see(const pp_view *view) {
    return view->mask ? view->mask_first : pp_end_seen(view, 0);
}

/* Returns `count` bits, at most 32, from bit `at` on.  Reads no byte after them. */
static inline uint32_t pp_bits_at(const uint8_t *bits, int64_t at, int count) {
    const int64_t last = (at + count - 1) / 8;
    uint64_t word = 0;
    for (int64_t byte = at / 8; byte <= last; byte++) word |= (uint64_t)bits[byte] << (byte - at / 8) * 8;
    return (uint32_t)(word >> at % 8 & (((uint64_t)1 << count) - 1));
}

/* Bits [from, to) of 32.  Both ends are clamped. */
static inline uint32_t pp_bits_between(int64_t from, int64_t to) {
    if (from < 0) from = 0;
    if (to > PP_TILE) to = PP_TILE;
    return from < to ? (uint32_t)((((uint64_t)1 << to) - 1) & ~(((uint64_t)1 << from) - 1)) : 0;
}

/* The tokens of the tile at `begin` that a query sees, as a bit mask. */
static inline uint32_t pp_tile_seen(const pp_view *view, int64_t query, int64_t begin) {
    uint32_t seen = pp_bits_between(pp_first_seen(view, query) - begin, pp_end_seen(view, query) - begin);
    if (view->mask && seen) {
        const int64_t low = begin > view->mask_first ? begin : view->mask_first;
        const int64_t high = begin + PP_TILE < view->seq_len ? begin + PP_TILE : view->seq_len;
        if (low < high)
            seen &= pp_bits_between(0, low - begin) |
                    pp_bits_at(view->mask, query * view->mask_width + (low - view->mask_first), (int)(high - low))
                        << (low - begin);
    }
    return seen;
}

#endif
