/* tiles_avx512.h: products of tiles by AVX-512 vectors.
 *
 * Included once with PP_WIDE 0, for cores with 256-bit vector units (Zen 4), and once with PP_WIDE 1, for cores with
 * 512-bit units, like kernels_avx512.h. */
#include "kernel_common.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "simd_avx512.h"

#if PP_WIDE
#define PP_ISA avx512_wide
#else
#define PP_ISA avx512
#endif
#define PP_DOT_BY_FMA
#include "tiles_of_isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int pp_not_this_architecture; /* ISO C requires a declaration in every file */
#endif
