/* kernels_neon.c: the kernels in AArch64 Advanced SIMD. */
#include "decode_tile.h"
#include "kernel_common.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include "simd_neon.h"

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

const pp_kernels pp_kernels_neon = {
    .name = "neon",
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
