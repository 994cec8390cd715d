/* prefetch_sides.h: lines of the four groups of two tiles asked for side by side, each group's one behind the other.
 * For wide units where they read faster than memory delivers: on Zen 5 (PP_PREFETCH_PAST) f32 with 7 and 8 heads, on
 * Intel (PP_PREFETCH_REPEAT) all that is read two tiles at a time.
 *
 * Presumably memory is read best by the hardware prefetchers of the second cache, which follow what is asked for within
 * a page of 4 KB, if it comes slowly enough to be overtaken.  Reading shuffled pages of 16 KB on Zen 5, one core came
 * to 26 GB/s one page after the other, to 33 two, three or four side by side, to 31 eight.
 *
 * Of a group K of one head and V lie behind each other; reading all of it is a visit.  Each line is asked for twice,
 * when so many lines fewer of its group are read: FAR, past L2 or into it, and NEAR, into L1.  On Zen 5 S2 took 0.95 of
 * its time side by side, a visit (128 lines) and half a visit before, and 0.87 so; with 96 and 32, 64 and 32, 80 and 16
 * lines 0.91, 0.89 and 0.89.  On Intel f32 takes 1.00 to 1.03 times as long from 80 and 32 lines, 1.01 from 128 and
 * 64; in 16 bit 1.02 from 64 and 32, 1.06 from 64 and 64.  Both are multiples of what is asked for at a time, in 16 bit
 * and of 7 and 8 heads up to 16 lines of 64 dims, else 32, so that a visit ends between two times. */
typedef struct pp_sides {
    const unsigned char *at; /* from there to what is asked for of each group */
    int64_t far[4], near[4];
} pp_sides;

/* Whether lines are asked for so, where they are asked for AGAIN in a mode: of a stage that goes in parts or as one. */
PP_INLINE int is_by_sides(const int AGAIN, const int ITEM, const int IN_PARTS) {
    return PP_WIDE && (AGAIN == PP_PREFETCH_REPEAT || (AGAIN == PP_PREFETCH_PAST && ITEM == 4 && IN_PARTS));
}

/* From `from` to a line of each group, counted from the beginning of this visit, of `visit` lines, on into the next. */
PP_INLINE void find_line(const pp_tile *tile, int64_t visit, int64_t line, const unsigned char *from, int64_t *bytes) {
    const unsigned char *const *groups = line < visit ? tile->k : tile->next_k;
    const int64_t at = (line < visit ? line : line - visit) * 64;
    PP_UNROLL for (int i = 0; i < 4; i++) bytes[i] = apart(groups[i] + at, from);
}

/* What is asked for when line `line` of each group is read. */
PP_INLINE pp_sides sides_at(const int AGAIN, const int ITEM, const pp_tile *tile, int64_t line) {
    const int PAST = AGAIN == PP_PREFETCH_PAST; /* a visit of 64 dims has 128 lines in f32, else 64 */
    const int FAR = PAST ? 80 : ITEM == 4 ? 96 : 64, NEAR = PAST ? 32 : ITEM == 4 ? 64 : 48;
    const int64_t visit = (tile->head_dim + tile->v_head_dim) * ITEM / 4; /* a line: 16 tokens of 64 / 16 / ITEM dims */
    pp_sides sides = {.at = tile->k[0]};
    find_line(tile, visit, line + FAR, sides.at, sides.far);
    find_line(tile, visit, line + NEAR, sides.at, sides.near);
    return sides;
}

/* LINES lines both times, in SHARES equal shares as prefetch_share: each of another group, from `first` on, and of 8
 * the next one of each group, too. */
PP_INLINE void prefetch_sides(const int AGAIN, const int share, const int SHARES, const int first, const int LINES,
                              const pp_sides *sides) {
    PP_UNROLL for (int i = share * 2 * LINES / SHARES; i < (share + 1) * 2 * LINES / SHARES; i++) {
        const int group = first + i / 2 % 4;
        const unsigned char *at = sides->at + i / 8 * 64;
        if (i % 2 == 0)
            prefetch_first(AGAIN, distant(at, sides->far[group]), 64);
        else
            prefetch_into_l1(distant(at, sides->near[group]), 64);
    }
}
