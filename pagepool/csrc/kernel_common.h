/* kernel_common.h: common definitions that every kernel source needs before its target region begins. */
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

/* Unrolls the next loop completely, so that its accumulators stay in registers.  Disabled under a sanitizer, where each
 * load is a page of code and compilers take minutes. */
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

/* The bits of 2^(j / 8), minus j << 20.  If the last bits of n * 8 are j, adding n * 8 << 20 gives the bits of 2^n. */
static const uint32_t pp_eighths[8] __attribute__((aligned(32))) = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                                                    0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};

/* Interleaves the lower or the upper halves of two vectors of 8 or 4 elements: a0 b0 a1 b1 ... `words` is their
 * type. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PP_INTERLEAVE_LOW(words, a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define PP_INTERLEAVE_HIGH(words, a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define PP_INTERLEAVE_LOW_4(words, a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define PP_INTERLEAVE_HIGH_4(words, a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif
#endif
#ifndef PP_INTERLEAVE_LOW
#define PP_INTERLEAVE_LOW(words, a, b) ((words){a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]})
#define PP_INTERLEAVE_HIGH(words, a, b) ((words){a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]})
#define PP_INTERLEAVE_LOW_4(words, a, b) ((words){a[0], b[0], a[1], b[1]})
#define PP_INTERLEAVE_HIGH_4(words, a, b) ((words){a[2], b[2], a[3], b[3]})
#endif

/* Adding PP_ROUND rounds a float of magnitude up to 2^22 to the nearest integer, ties to even.  The low bits of the sum
 * minus PP_ROUND_BITS are the integer. */
#define PP_ROUND 12582912.0f /* 1.5 * 2^23 */
#define PP_ROUND_BITS 0x4b400000

/* Smaller maxima are quantised as 0.  From this limit on, the scale and its inverse are normal numbers. */
#define PP_LEAST_QUANTISED 0x1p-100f

/* Hides the value of a variable from the optimiser, so that nothing is derived from it in advance. */
#define PP_OPAQUE(variable) __asm__("" : "+r"(variable))

/* The distance between two addresses, and the address at a distance.  If several addresses advance together, one is
 * incremented and the others are computed from it.  An address used only for prefetching may be invalid. */
PP_INLINE int64_t distance_of(const unsigned char *to, const unsigned char *from) {
    int64_t bytes = (int64_t)((uintptr_t)to - (uintptr_t)from);
    PP_OPAQUE(bytes);
    return bytes;
}
PP_INLINE const unsigned char *at_distance(const unsigned char *from, int64_t bytes) {
    return (const unsigned char *)((uintptr_t)from + (uintptr_t)bytes);
}

/* Prefetches a line into L1; lines of `bytes` into L2. */
PP_INLINE void prefetch_into_l1(const unsigned char *at) { __builtin_prefetch(at, 0, 3); }
PP_INLINE void prefetch_into_l2(const unsigned char *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* Kernels for vector units of 512 bits: kernels_avx512.h. */
#ifndef PP_WIDE
#define PP_WIDE 0
#endif

/* A tile of one kv head, or two tiles, as the loop over a chunk passes it to the functions that compute it. */
typedef struct pp_tile {
    const unsigned char *k[4], *v[4];           /* the tile's two groups of 16 tokens, then those of the next tile */
    const unsigned char *next_k[4], *next_v[4]; /* groups to prefetch; next_v may be NULLs */
    int step;                                   /* compute the next tile together with this one */
    uint32_t seen;                              /* mask of visible tokens; not 0 */
    int head_dim, v_head_dim, k_dtype, v_dtype;
    float scale, cap, inverse_cap;              /* scale: of unscaled queries; cap: 0 for none; all in base 2 */
    const float *alibi_slopes;                  /* NULL, or one for each query head of the kv head, in base 2 */
    int32_t row, group_size;                    /* first row: query token row / group_size, head row % group_size */
    int64_t distance;                           /* the tile's first token minus the position of the first query token */
    int64_t row_stride;
    int64_t begin;                              /* the tile's first token */
} pp_tile;

#endif
