/* kernels_baseline.c: the kernels for the default target of the compiler. */
#include "kernel_common.h"

#include "simd_baseline.h"
#include "simd_int.h"

#define PP_ISA baseline
#define PP_TILE_KERNELS pp_tiles_baseline
#include "kernels_of_isa.h"
