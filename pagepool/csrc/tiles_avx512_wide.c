/* tiles_avx512_wide.c: products of tiles by AVX-512 vectors, for CPUs with 512-bit vector units. */
#define PP_WIDE 1
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

#define PP_ISA avx512_wide
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
