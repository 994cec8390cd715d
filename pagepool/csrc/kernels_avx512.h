/* kernels_avx512.h: the kernels for CPUs with AVX-512.  Those of quantised pages need AVX512_VNNI
 * (pp_kernels_quantised).
 *
 * Included once with PP_WIDE 0, for cores with 256-bit vector units (Zen 4), and once with PP_WIDE 1, for cores with
 * 512-bit units. simd_avx512.h describes the differences.  Both compute the same bits. */
#include "kernel_common.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* Code in this region may use these instructions.  Code before it may not, so that no baseline function can be replaced
 * by a copy that uses them. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "simd_avx512.h"
#include "simd_vnni.h"

#if PP_WIDE
#define PP_ISA avx512_wide
#else
#define PP_ISA avx512
#endif
#define PP_TILE_KERNELS pp_tiles_avx2
#include "kernels_of_isa.h"

#if PP_WIDE /* kernels_amx.c replaces the products of tiles; everything else is shared */
#include "simd_tiles.h"
#include "linear_quantised_amx.h"
const pp_kernels pp_kernels_amx = PP_KERNELS("amx", pp_tiles_amx, pp_linear_by_amx, linear_tiles);
#endif

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int pp_not_this_architecture; /* ISO C requires a declaration in every file */
#endif
