/* kernels_avx512.c: the kernels in AVX-512 for vector units that are narrower than its vectors. */
#define PP_WIDE 0
#include "kernels_avx512.h"
