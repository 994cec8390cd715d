/* prefetch_sides.h: lines of the four groups of two tiles asked for side by side, each group's one behind the other.
 * For wide units over f32, which they read faster than memory delivers.
 *
 * Presumably memory is read best by the hardware prefetchers of the second cache, which follow what is asked for within
 * a page of 4 KB, if it comes slowly enough to be overtaken.  Reading shuffled pages of 16 KB on Zen 5, one core came
 * to 26 GB/s one page after the other, to 33 two, three or four side by side, to 31 eight.
 *
 * Of a group K of one head and V lie behind each other; reading all of it is a visit.  Each line is asked for twice,
 * when so many lines fewer of its group are read: FAR, past L2, and NEAR, into L1.  S2 took 0.95 of its time side by
 * side, a visit (128 lines) and half a visit before, and 0.87 so; with 96 and 32, 64 and 32, 80 and 16 lines 0.91, 0.89
 * and 0.89.  Both are multiples of what is asked for at a time, 16 lines, so that a visit ends between two times. */
enum { PP_FAR_LINES = 80, PP_NEAR_LINES = 32 };

typedef struct pp_sides {
    const unsigned char *at; /* from there to what is asked for of each group */
    int64_t far[4], near[4];
} pp_sides;

/* From `from` to a line of each group, counted from the beginning of this visit on into the next. */
PP_INLINE void find_line(const pp_tile *tile, int64_t line, const unsigned char *from, int64_t *bytes) {
    const int64_t next = line - tile->head_dim - tile->v_head_dim; /* a line is a dim of 16 tokens */
    const unsigned char *const *groups = next < 0 ? tile->k : tile->next_k;
    const int64_t at = (next < 0 ? line : next) * 64;
    PP_UNROLL for (int i = 0; i < 4; i++) bytes[i] = apart(groups[i] + at, from);
}

/* What is asked for when line `line` of each group is read. */
PP_INLINE pp_sides sides_at(const pp_tile *tile, int64_t line) {
    pp_sides sides = {.at = tile->k[0]};
    find_line(tile, line + PP_FAR_LINES, sides.at, sides.far);
    find_line(tile, line + PP_NEAR_LINES, sides.at, sides.near);
    return sides;
}

/* A line of each of COUNT groups, both times, in SHARES equal shares as prefetch_share. */
PP_INLINE void prefetch_sides(const int share, const int SHARES, const int first, const int COUNT,
                              const pp_sides *sides) {
    PP_UNROLL for (int i = share * 2 * COUNT / SHARES; i < (share + 1) * 2 * COUNT / SHARES; i++) {
        if (i % 2 == 0)
            prefetch_past_l2(distant(sides->at, sides->far[first + i / 2]), 64);
        else
            prefetch_into_l1(distant(sides->at, sides->near[first + i / 2]), 64);
    }
}
