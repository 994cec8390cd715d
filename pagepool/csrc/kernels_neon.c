/* kernels_neon.c: the kernels in AArch64 Advanced SIMD. */
#include "kernel_common.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include "simd_neon.h"
#include "simd_int.h"

#define PP_ISA neon
#define PP_TILE_KERNELS pp_tiles_neon
#include "kernels_of_isa.h"

#else
typedef int pp_not_this_architecture; /* ISO C requires a declaration in every file */
#endif
