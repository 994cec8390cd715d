/* prefetch.h: prefetching of K and V before they are read.  Included once per ISA.
 *
 * Hardware prefetchers stop at the end of a 4 KB page and do not know the block table.  The kernels therefore look up
 * the address of the next head or tile and prefetch it.  A visit is the reading of K and V of one head in a group.
 * Each line is prefetched a visit before it is read, into L2, and once more half a visit before: Zen 4 presumably drops
 * a prefetch while its queue is full, and L1 has too few buffers for the latency of memory.
 *
 * The second prefetch goes into L1 on wide units and into L2 on narrow units.  On narrow units, FAST code (f32, dot
 * products) also prefetches 2 KB and 512 bytes ahead: on Zen 4, S1 in f32 took 0.89 of the time of three prefetches,
 * and in arithmetic of bf16 of two.  Wide units that read two tiles interleave the lines of their groups (below). */

/* Prefetches `bytes` line by line, each line in TIMES ways.  BEGIN, END and OF select the parts [BEGIN, END) of OF. */
PP_INLINE void prefetch_lines(const int TIMES, const int BEGIN, const int END, const int OF, int bytes,
                              const unsigned char *row, const unsigned char *visit, const unsigned char *half) {
    enum { NEAR = 2048, NEARER = 512 };
    const int all = (bytes + 63) / 64 * TIMES;
    PP_UNROLL for (int i = BEGIN * all / OF; i < END * all / OF; i++) {
        const int line = i / TIMES * 64;
        switch (i % TIMES) {
        case 0: prefetch_into_l2(visit + line, 1); break;
        case 1: PP_WIDE ? prefetch_into_l1(half + line) : prefetch_into_l2(half + line, 1); break;
        case 2: prefetch_into_l2(row + line + NEAR, 1); break;
        case 3: prefetch_into_l1(row + line + NEARER); break;
        }
    }
}

/* Prefetches the data that is read one visit and half a visit after the `bytes` at `row`.  BEGIN, END and OF select the
 * parts [BEGIN, END) of OF. */
PP_INLINE void prefetch(const int mode, const int FAST, const int BEGIN, const int END, const int OF, int bytes,
                        const unsigned char *row, const unsigned char *visit, const unsigned char *half) {
    if (mode) prefetch_lines(FAST && !PP_WIDE ? 4 : 2, BEGIN, END, OF, bytes, row, visit, half);
}

/* Interleaved prefetches of the four groups of two tiles: one line of each group in turn.
 *
 * Presumably the hardware prefetchers of L2 read memory best.  They follow the prefetches within a 4 KB page, if these
 * are slow enough to be overtaken.  On Intel all shapes took 0.80 to 0.98 of the time of prefetching once (S2 in 16 bit
 * 0.87 instead of 0.96).  On Zen 5, one core read shuffled pages of 16 KB at 26 GB/s one after the other, at 33 GB/s
 * with two, three or four interleaved, and at 31 GB/s with eight.
 *
 * A line is prefetched FAR lines of its group before it is read, and again NEAR lines before: 96 and 64 in f32, and 64
 * and 48 in 16 bit, where a visit of 64 dims has 64 lines.  On Intel S1 and S4 in f32 took 1.04 times as long with 64
 * and 48, and so did S5 with 128 and 64. */
typedef struct pp_interleaved {
    const unsigned char *at; /* base of the distances to the lines to prefetch in each group */
    int64_t far[4], near[4];
} pp_interleaved;

/* Distances from `from` to line `line` of each group.  Lines are counted from the beginning of this visit, which has
 * `visit` lines, and continue in the next visit. */
PP_INLINE void find_line(const pp_tile *tile, int64_t visit, int64_t line, const unsigned char *from, int64_t *bytes) {
    const unsigned char *const *groups = line < visit ? tile->k : tile->next_k;
    const int64_t at = (line < visit ? line : line - visit) * 64;
    PP_UNROLL for (int i = 0; i < 4; i++) bytes[i] = distance_of(groups[i] + at, from);
}

/* The lines to prefetch when line `line` of each group is read. */
PP_INLINE pp_interleaved interleaved_at(const int ITEM, const pp_tile *tile, int64_t line) {
    const int FAR = 32 + 16 * ITEM, NEAR = 32 + 8 * ITEM;
    const int64_t visit = (tile->head_dim + tile->v_head_dim) * ITEM / 4; /* a line: 16 tokens of 64 / 16 / ITEM dims */
    pp_interleaved ahead = {.at = tile->k[0]};
    find_line(tile, visit, line + FAR, ahead.at, ahead.far);
    find_line(tile, visit, line + NEAR, ahead.at, ahead.near);
    return ahead;
}

/* Prefetches LINES lines at both distances, parts [BEGIN, BEGIN + 1) of OF.  Consecutive lines are in different groups,
 * beginning with group `first`.  If LINES is 8, the next line of each group follows. */
PP_INLINE void prefetch_interleaved(const int BEGIN, const int OF, const int first, const int LINES,
                                    const pp_interleaved *ahead) {
    PP_UNROLL for (int i = BEGIN * 2 * LINES / OF; i < (BEGIN + 1) * 2 * LINES / OF; i++) {
        const int group = first + i / 2 % 4;
        const unsigned char *at = ahead->at + i / 8 * 64;
        if (i % 2 == 0)
            prefetch_into_l2(at_distance(at, ahead->far[group]), 1);
        else
            prefetch_into_l1(at_distance(at, ahead->near[group]));
    }
}

/* Opens pages long before the prefetches of the main loop reach them: prefetches a line of each group, from group
 * `from` of `count` on.  The `bytes` that are read in a group begin at `first`.  Returns the group at which it stopped.
 *
 * A prefetch to an address that is not in the TLB delays the accesses after it.  Under a hypervisor this takes about
 * 100 ns for each page, a quarter of the time over pages of 8 KB on Zen 4 (S2 in bf16: 3.15 ms without this function,
 * 2.78 ms with it).  Translations overlap when these prefetches are issued together; eight or more at once are equally
 * good.  Wide units do not use this function, because their interleaved prefetches open four pages at once: S2 in 16
 * bit took 1.03 times as long on Intel.
 *
 * OPEN_BYTES is the range that a cache line of a page table translates: eight pages of 4 KB, which a hypervisor may map
 * with huge pages. */
enum { OPEN_BYTES = 1 << 15, OPEN_LINES = 32 };
static __attribute__((noinline)) int open_pages(const pp_chunk *work, const unsigned char *const *groups, int from,
                                                int count, int64_t first, int64_t bytes) {
    int group = from;
    for (int64_t left = OPEN_LINES; left > 0 && group < count; group++)
        for (int64_t i = 0; i < bytes; i += OPEN_BYTES, left--) prefetch_into_l2(groups[group] + first + i, 1);
    if (group >= count && work->next[0])
        for (int i = 0; i < 4; i++) prefetch_into_l2(work->next[i], 1);
    return group;
}
