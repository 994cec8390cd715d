/* kernels_baseline.c: the kernels in whatever the compiler's target has. */
#include "kernel_common.h"

#include "simd_baseline.h"
#include "dot_by_double.h"

#define PP_ISA baseline
#define PP_EMULATED by_double
#include "kernels_of_isa.h"
