/* kernel_common.h: what every kernel source of an instruction set needs before its target region begins. */
#ifndef PP_KERNEL_COMMON_H
#define PP_KERNEL_COMMON_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "convert.h"
#include "kernels.h"
#include "page.h"

#define PP_INLINE static inline __attribute__((always_inline))
#define PP_CAT_(a, b, c) a##b##c
#define PP_CAT(a, b, c) PP_CAT_(a, b, c)

/* Unrolls the next loop whole: its accumulators must live in registers.  Not under a sanitizer, where each load is a
 * page of code and compilers take minutes. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PP_UNROLLS 0
#else
#define PP_UNROLLS 1
#endif
#if !PP_UNROLLS
#define PP_UNROLL
#elif defined(__clang__)
#define PP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PP_UNROLL _Pragma("GCC unroll 16")
#endif

/* The bits of 2^(j / 8), less j << 20: with n * 8 << 20 added they are those of 2^n, where the last bits of n * 8 are
 * j. */
static const uint32_t pp_eighths[8] __attribute__((aligned(32))) = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                                                    0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};

/* a0 b0 a1 b1 ... of the lower and of the upper halves of two vectors of 8 or 4. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PP_INTERLEAVE_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define PP_INTERLEAVE_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define PP_INTERLEAVE_LOW_4(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define PP_INTERLEAVE_HIGH_4(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif
#endif
#ifndef PP_INTERLEAVE_LOW
#define PP_INTERLEAVE_LOW(a, b) ((PP_BLOCK){a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]})
#define PP_INTERLEAVE_HIGH(a, b) ((PP_BLOCK){a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]})
#define PP_INTERLEAVE_LOW_4(a, b) ((PP_BLOCK){a[0], b[0], a[1], b[1]})
#define PP_INTERLEAVE_HIGH_4(a, b) ((PP_BLOCK){a[2], b[2], a[3], b[3]})
#endif

/* Compilers forget what they know of a variable, and work out nothing from it beforehand. */
#define PP_FORGET(variable) __asm__("" : "+r"(variable))

/* How far it is from one place to another, and the place so far away: of places that run along together one is counted
 * up and the others are found from it.  Where memory is asked for only, nothing need be there. */
PP_INLINE int64_t apart(const unsigned char *to, const unsigned char *from) {
    int64_t bytes = (int64_t)((uintptr_t)to - (uintptr_t)from);
    PP_FORGET(bytes);
    return bytes;
}
PP_INLINE const unsigned char *distant(const unsigned char *from, int64_t bytes) {
    return (const unsigned char *)((uintptr_t)from + (uintptr_t)bytes);
}

/* Kernels for vector units of 512 bits: kernels_avx512.h. */
#ifndef PP_WIDE
#define PP_WIDE 0
#endif

PP_INLINE void prefetch_into_l1(const unsigned char *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 3);
}
PP_INLINE void prefetch_into_l2(const unsigned char *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}
PP_INLINE void prefetch_past_l2(const unsigned char *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 0);
}

/* The first time where lines are asked for again. */
PP_INLINE void prefetch_first(int mode, const unsigned char *at, int bytes) {
    if (PP_WIDE && mode == PP_PREFETCH_PAST)
        prefetch_past_l2(at, bytes);
    else
        prefetch_into_l2(at, bytes);
}

/* How some parts of a head's rows prefetch, beside the modes of kernels.h, where that is PP_PREFETCH_REPEAT or PAST.
 * EARLY, LATE: two parts, one asks for what is read first, the other for the rest.
 * RUN: lines that lie one behind another for long are read about as fast as memory delivers.  Zen 4's own prefetchers
 * alone reach 0.93 to 0.98 of that, and at times (on a host that others use, presumably as they are throttled) less
 * than half: asked for three times, none of them into L1, lines come at 0.85 to 0.95 of it always.  Wide units ask a
 * run of V ahead, into L1 past L2, and in f32 once more PP_NEAR bytes ahead. */
enum { PP_PREFETCH_EARLY = PP_PREFETCH_PAST + 1, PP_PREFETCH_LATE, PP_PREFETCH_RUN };

/* Prefetches `bytes` (whole lines) at places that are read later: a head's visit later and, where lines are asked for
 * again, half a visit later and, by what reads FAST (f32, dot products) and in runs, also a run of V or PP_NEAR bytes
 * later and, by the former, PP_NEARER bytes later.  The next head's or page's are found through the block table;
 * hardware prefetchers stop at the end of a 4 KB page and know nothing of the table.
 *
 * For wide units a visit and half a visit before, the latter into L1, are best, but for runs and what asks by sides
 * (prefetch_sides.h).  On Zen 5 S1 in bf16 took 0.92 of the time of a visit before alone, by four times as on Zen 4
 * 0.97.  There the first time is past L2, from which nothing need make way for what is read once: S2 in 16 bit in 0.96
 * of the time, others in 0.98 to 1.  What is larger than L1 and no longer there is brought by the second time.  One
 * tile at a time both wait for what is computed, but for some heads: prefetch_paced.h. */
enum { PP_NEAR = 2048, PP_NEARER = 512 };
PP_INLINE void prefetch_walk(int mode, const int FAST, int bytes, const unsigned char *visit, const unsigned char *half,
                             const unsigned char *near, const unsigned char *nearer) {
    if (PP_WIDE && mode == PP_PREFETCH_RUN) {
        prefetch_past_l2(near, bytes);
        return;
    }
    if (PP_WIDE && (mode == PP_PREFETCH_REPEAT || mode == PP_PREFETCH_PAST)) {
        prefetch_first(mode, visit, bytes);
        prefetch_into_l1(half, bytes);
        return;
    }
    if (mode == PP_PREFETCH_L1) {
        prefetch_into_l1(visit, bytes);
        return;
    }
    prefetch_into_l2(visit, bytes);
    if (mode == PP_PREFETCH_L2) return;
    prefetch_into_l2(half, bytes);
    if (FAST || mode == PP_PREFETCH_RUN) prefetch_into_l2(near, bytes);
    if (FAST && mode == PP_PREFETCH_REPEAT) prefetch_into_l1(nearer, bytes);
}

/* Prefetches `bytes` (whole lines), not again, into the cache of the mode, which may be PP_PREFETCH_NONE. */
PP_INLINE void prefetch_once(int mode, const unsigned char *at, int bytes) {
    if (mode == PP_PREFETCH_L1)
        prefetch_into_l1(at, bytes);
    else if (mode != PP_PREFETCH_NONE)
        prefetch_into_l2(at, bytes);
}

/* As prefetch_walk where lines are asked for again, in SHARES equal shares, line by line, to be done between products:
 * all at once, or behind tests of the mode, they take places for instructions, of which a busy neighbour on the core
 * leaves few. */
PP_INLINE void prefetch_share(const int share, const int SHARES, const int MODE, const int FAST, const int bytes,
                              const unsigned char *visit, const unsigned char *half, const unsigned char *near,
                              const unsigned char *nearer) {
    const int kinds = FAST && !PP_WIDE ? 4 : 2, all = bytes / 64 * kinds;
    PP_UNROLL for (int i = share * all / SHARES; i < (share + 1) * all / SHARES; i++) {
        const int line = i / kinds * 64;
        switch (i % kinds) {
        case 0: prefetch_first(MODE, visit + line, 64); break;
        case 1: PP_WIDE ? prefetch_into_l1(half + line, 64) : prefetch_into_l2(half + line, 64); break;
        case 2: prefetch_into_l2(near + line, 64); break;
        case 3: prefetch_into_l1(nearer + line, 64); break;
        }
    }
}

/* What the walk over a chunk hands to the work on one tile of one kv head. */
typedef struct pp_tile {
    const unsigned char *k[4], *v[4];           /* of its two groups of 16 tokens, and of those of the tile after it */
    const unsigned char *next_k[4], *next_v[4]; /* what will be read next: prefetched; next_v may be NULLs */
    int step;                                   /* the tile after it is done along: all rows see all of both */
    uint32_t seen;                              /* a bit for each of its tokens; not 0 */
    int head_dim, v_head_dim;
    float scale, cap, inverse_cap;              /* for queries not scaled; soft cap, or 0, its inverse: in base 2 */
    const float *alibi_slopes;                  /* of the query heads of the kv head, in base 2, or NULL */
    int32_t row, group_size;                    /* the first row at work: query token row / group_size, head the rest */
    int64_t distance;                           /* from the first query token back to the tile's first: 0 or below */
    int64_t row_stride;
    float *block_sums;                          /* NULL, or of the first row at work: sums of weights, block by block */
    int64_t begin, first_block, block_size;     /* the tile's first token, and the block of block_sums[0] */
    int num_blocks;
} pp_tile;

#endif
