/* tiles_avx512.c: products of tiles for CPUs with AVX-512 and vector units narrower than 512 bits. */
#define PP_WIDE 0
#include "tiles_avx512.h"
