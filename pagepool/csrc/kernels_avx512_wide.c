/* kernels_avx512_wide.c: the kernels in AVX-512 for vector units that are as wide as its vectors. */
#define PP_WIDE 1

/* Before everything, so that all of the file is alike: else GCC lets places spill into vectors within loops, 2 to 8 %
 * of S2, or, where only a part is tuned so, no longer puts what is small into its callers, 15 % of dot products. */
#if defined(__x86_64__) && !defined(__clang__)
#pragma GCC target("tune=skylake-avx512")
#endif

#include "kernels_avx512.h"
