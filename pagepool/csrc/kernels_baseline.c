/* kernels_baseline.c: the kernels in whatever the compiler's target has. */
#include "kernel_common.h"

#include "simd_baseline.h"

#define PP_ISA baseline
#define PP_DOT_BY_DOUBLE
#define PP_INTS "simd_int.h"
#include "kernels_of_isa.h"
