/* kernels_avx512_wide.c: the AVX-512 kernels for CPUs with 512-bit vector units. */
#define PP_WIDE 1

/* This tuning must come first and cover the whole file. Without it, GCC spills pointers into vector registers within
 * loops, which costs 2 to 8 % of S2. If only a part of the file is tuned, GCC no longer inlines small functions into
 * their callers, which costs 15 % of dot products. */
#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC target("tune=skylake-avx512")
#endif

#include "kernels_avx512.h"
