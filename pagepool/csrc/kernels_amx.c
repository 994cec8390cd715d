/* kernels_amx.c: products of tiles by AMX, with vectors of AVX-512 and AVX512_BF16. */
#define PP_WIDE 1
#include "kernel_common.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

#include "simd_avx512.h"
#include "simd_tiles.h"

#include "convert_rows.h"
#include "softmax_math.h"
#include "unit_rows.h"

/* Elements of A are bf16 numbers. */
typedef uint16_t tile_item;

/* As in tiles_vectors.h.  The instruction also treats subnormal numbers as zeros. */
PP_INLINE void cut_into_parts(const int PARTS, const pp_v *x, tile_item *to, int64_t step) {
    pp_v low = x[0], high = x[1];
    PP_UNROLL for (int part = 0; part < PARTS; part++) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_storeu_si512(to + part * step, both);
        if (part + 1 == PARTS) break;
        const __m512i a = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both));
        const __m512i b = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1));
        low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)));
        high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)));
    }
}

/* Adds 32 rounded weights to 16 running sums, the second of each pair first: a dot product with ones. */
PP_INLINE void add_rounded_weights(const tile_item *p, pp_v *sum) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    sum[0] = _mm512_dpbf16_ps(sum[0], (__m512bh)_mm512_loadu_si512(p), ones);
}

#ifdef PP_TILES_PORTABLE
const int pp_tiles_amx_portable = 1;
#else
const int pp_tiles_amx_portable = 0;
#endif

#define IN_FLIGHT 3 /* one panel in each stage */
#include "tiles_panel.h"
#include "tiles_amx.h"
#include "tiles_amx_decode.h"
#include "linear.h"
#include "linear_amx.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int pp_not_this_architecture; /* ISO C requires a declaration in every file */
#endif
