/* kernels_neon_dotprod.c: the kernels in AArch64 Advanced SIMD with dot products of 8-bit integers. */
#include "kernel_common.h"

#if defined(__aarch64__)
#include <arm_neon.h>

/* Code in this region may use these instructions. Code before it may not, so that no baseline function can be replaced
 * by a copy that uses them. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include "simd_neon.h"
#include "simd_sdot.h"

#define PP_ISA neon_dotprod
#define PP_TILE_KERNELS pp_tiles_neon
#include "kernels_of_isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int pp_not_this_architecture; /* ISO C requires a declaration in every file */
#endif
