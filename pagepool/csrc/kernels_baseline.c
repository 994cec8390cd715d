/* kernels_baseline.c: the kernels in whatever the compiler's target has. */
#include "decode_tile.h"
#include "kernel_common.h"

#include "simd_baseline.h"

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

const pp_kernels pp_kernels_baseline = {
    .name = "baseline",
    .chunk = {chunk_f32, chunk_f16, chunk_bf16},
    .merge = merge_chunks,
    .merge_rows = merge_rows,
    .pack_queries = pack_queries,
    .narrow = {copy_f32, narrow_f16, narrow_bf16},
    .widen = {copy_to_f32, widen_f16, widen_bf16},
};
