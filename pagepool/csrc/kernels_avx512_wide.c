/* kernels_avx512_wide.c: the kernels in AVX-512 for vector units that are as wide as its vectors. */
#define PP_WIDE 1
#include "kernels_avx512.h"
