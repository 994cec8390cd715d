/* kernels_avx512.h: the kernels for CPUs with AVX-512, AVX512_VNNI and AVX512_BF16.
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
#define PP_TILE_KERNELS pp_tiles_avx512_wide
#else
#define PP_ISA avx512
#define PP_TILE_KERNELS pp_tiles_avx512
#endif
#define PP_OWN_MIXED NULL, NULL, NULL, NULL, NULL /* they use AVX512_VNNI */
#include "kernels_of_isa.h"

#define PP_ISA_BF16 PP_CAT(PP_ISA, _bf16, )
const pp_kernels PP_CAT(pp_kernels_, PP_ISA_BF16, ) =
    PP_KERNELS_(PP_TEXT(PP_ISA_BF16), PP_TILE_KERNELS, NULL, PP_MIXED_KERNELS);
#if PP_WIDE /* kernels_amx.c replaces the products of tiles; everything else is shared */
const pp_kernels pp_kernels_amx = PP_KERNELS_("amx", pp_tiles_amx, pp_linear_by_amx, PP_MIXED_KERNELS);
#endif

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int pp_not_this_architecture; /* ISO C requires a declaration in every file */
#endif
