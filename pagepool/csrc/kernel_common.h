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
#define PP_UNROLL
#elif defined(__clang__)
#define PP_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PP_UNROLL _Pragma("GCC unroll 16")
#endif

/* Prefetches `bytes` from a line-aligned address: the next head's or the next page's, found through the block table;
 * hardware prefetchers stop at the end of a 4 KB page and know nothing of the table. */
PP_INLINE void prefetch_span(const unsigned char *at, int bytes, int level) {
    if (level == PP_PREFETCH_L2)
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
    else
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 3);
}

#endif
