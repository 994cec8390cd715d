/* kernels_baseline.c: the kernels in whatever the compiler's target has. */
#include "decode_tile.h"
#include "kernel_common.h"

#include "simd_baseline.h"

#include "decode_math.h"

#define PP_DTYPE f32
#define PP_ITEM 4
#include "decode_kernel.h"

#define PP_DTYPE f16
#define PP_ITEM 2
#include "decode_kernel.h"

#define PP_DTYPE bf16
#define PP_ITEM 2
#include "decode_kernel.h"

const pp_kernels pp_kernels_baseline = {"baseline", {chunk_f32, chunk_f16, chunk_bf16}, merge_chunks};
