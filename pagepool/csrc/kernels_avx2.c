/* kernels_avx2.c: the kernels in AVX2, FMA and F16C. */
#include "decode_tile.h"
#include "kernel_common.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* Everything from here to the end of the region may use these instructions; nothing before it does, so that no
 * baseline code can be replaced by a copy that does. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "simd_avx2.h"

#include "decode_math.h"
#include "narrow.h"

#define PP_DTYPE f32
#define PP_ITEM 4
#include "decode_kernel.h"

#define PP_DTYPE f16
#define PP_ITEM 2
#include "decode_kernel.h"

#define PP_DTYPE bf16
#define PP_ITEM 2
#include "decode_kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const pp_kernels pp_kernels_avx2 = {
    .name = "avx2",
    .chunk = {chunk_f32, chunk_f16, chunk_bf16},
    .merge = merge_chunks,
    .merge_rows = merge_rows,
    .pack_queries = pack_queries,
    .narrow = {copy_f32, narrow_f16, narrow_bf16},
    .widen = {copy_to_f32, widen_f16, widen_bf16},
};

#else
typedef int pp_not_this_architecture; /* ISO C wants a declaration in every file */
#endif
