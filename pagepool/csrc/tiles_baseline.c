/* tiles_baseline.c: products of tiles by the vectors of any CPU. */
#include "kernel_common.h"

#include "simd_baseline.h"

#define PP_ISA baseline
#define PP_DOT_BY_DOUBLE
#include "tiles_vectors.h"
