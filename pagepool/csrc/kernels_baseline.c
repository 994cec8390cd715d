/* kernels_baseline.c: the kernels in whatever the compiler's target has. */
#include "decode_tile.h"
#include "kernel_common.h"

#include "simd_baseline.h"

#define PP_ISA baseline
#include "kernels_of_isa.h"
