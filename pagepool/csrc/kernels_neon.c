/* kernels_neon.c: the kernels in AArch64 Advanced SIMD. */
#include "kernel_common.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include "simd_neon.h"

#define PP_ISA neon
#define PP_TILE_KERNELS pp_tiles_neon
#define PP_INTS "simd_int.h"
#include "kernels_of_isa.h"

#else
typedef int pp_not_this_architecture; /* ISO C wants a declaration in every file */
#endif
