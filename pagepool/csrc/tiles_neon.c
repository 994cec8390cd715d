/* tiles_neon.c: products of tiles by the vectors of AArch64. */
#include "kernel_common.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include "simd_neon.h"

#define PP_ISA neon
#define PP_DOT_BY_DOUBLE
#include "tiles_vectors.h"

#else
typedef int pp_not_this_architecture; /* ISO C requires a declaration in every file */
#endif
