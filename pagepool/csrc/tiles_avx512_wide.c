/* tiles_avx512_wide.c: products of tiles for CPUs with AVX-512 and 512-bit vector units. */
#define PP_WIDE 1
#include "tiles_avx512.h"
