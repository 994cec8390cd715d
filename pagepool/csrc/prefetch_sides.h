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
#ifndef X_FAR16
#define X_FAR16 64
#endif
#ifndef X_NEAR16
#define X_NEAR16 16
#endif
#ifndef X_FAR
#define X_FAR 80
#endif
#ifndef X_NEAR
#define X_NEAR 32
#endif
typedef struct pp_sides {
    const unsigned char *at; /* from there to what is asked for of each group */
    int64_t far[4], near[4];
} pp_sides;

PP_INLINE int is_by_sides(const int AGAIN, const int ITEM, const int ALONE) {
    return PP_WIDE && (AGAIN == PP_PREFETCH_REPEAT || (AGAIN == PP_PREFETCH_PAST && ITEM == 4 && ALONE));
}

/* From `from` to a line of each group, counted from the beginning of this visit on into the next, which is `visit`
 * lines long. */
PP_INLINE void find_line(const pp_tile *tile, int64_t visit, int64_t line, const unsigned char *from, int64_t *bytes) {
    const unsigned char *const *groups = line < visit ? tile->k : tile->next_k;
    const int64_t at = (line < visit ? line : line - visit) * 64;
    PP_UNROLL for (int i = 0; i < 4; i++) bytes[i] = apart(groups[i] + at, from);
}

/* What is asked for when line `line` of each group is read. */
PP_INLINE pp_sides sides_at(const int AGAIN, const int ITEM, const pp_tile *tile, int64_t line) {
    const int FAR = ITEM == 4 ? X_FAR : X_FAR16, NEAR = ITEM == 4 ? X_NEAR : X_NEAR16;
    const int64_t visit = (tile->head_dim + tile->v_head_dim) * ITEM / 4; /* a line is a dim of 16 tokens in f32, else two */
    pp_sides sides = {.at = tile->k[0]};
    (void)AGAIN;
    find_line(tile, visit, line + FAR, sides.at, sides.far);
    find_line(tile, visit, line + NEAR, sides.at, sides.near);
    return sides;
}

/* LINES lines, each of another group from `first` on, both times, in SHARES equal shares as prefetch_share: of 8 the
 * next line of each group as well. */
PP_INLINE void prefetch_sides(const int AGAIN, const int share, const int SHARES, const int first, const int LINES,
                              const pp_sides *sides) {
    PP_UNROLL for (int i = share * 2 * LINES / SHARES; i < (share + 1) * 2 * LINES / SHARES; i++) {
        const unsigned char *at = sides->at + i / 8 * 64;
        if (i % 2 == 0)
            prefetch_first(AGAIN, distant(at, sides->far[first + i / 2 % 4]), 64);
        else
            prefetch_into_l1(distant(at, sides->near[first + i / 2 % 4]), 64);
    }
}
