/* tiles_avx2.c: products of tiles by the vectors of AVX2. */
#include "kernel_common.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "simd_avx2.h"

#define PP_ISA avx2
#define PP_DOT_BY_FMA
#include "tiles_vectors.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int pp_not_this_architecture; /* ISO C requires a declaration in every file */
#endif
