/* kernels_avx2.c: the kernels in AVX2, FMA and F16C. */
#include "kernel_common.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* Code in this region may use these instructions. Code before it may not, so that no baseline function can be replaced
 * by a copy that uses them. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "simd_avx2.h"
#include "simd_madd.h"

#define PP_ISA avx2
#define PP_TILE_KERNELS pp_tiles_avx2
#include "kernels_of_isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int pp_not_this_architecture; /* ISO C requires a declaration in every file */
#endif
