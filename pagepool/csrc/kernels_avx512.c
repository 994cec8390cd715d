/* kernels_avx512.c: the AVX-512 kernels for CPUs with vector units narrower than 512 bits. */
#define PP_WIDE 0
#include "kernels_avx512.h"
