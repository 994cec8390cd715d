/* kernels_of_isa.h: all kernels of one instruction set, as pp_kernels_<PP_ISA>. Included once per ISA, inside its
 * target region and after its vector and integer functions. */
#include "convert_rows.h"
#include "softmax_math.h"
#include "unit_rows.h"
#include "decode_math.h"
#include "draw_kernel.h"
#include "elementwise_kernel.h"
#include "prefetch.h"

#include "transpose_block.h"
#include "pack_queries.h"
#include "append_kernel.h"

#if PP_16_REGISTERS
#include "decode_avx2.h"
#else
#include "decode_tile.h"
#endif
#include "decode_repack.h"
#include "quantised_pages.h"
#include "quantised.h"
#include "decode_kernel.h"

#include "prefill_kernel.h"
#include "prefill_quantised.h"
#include "linear_quantised_kernel.h"

static void copy_f32(void *to, const float *from, int64_t n) { memcpy(to, from, (size_t)n * sizeof(float)); }

static void copy_to_f32(float *to, const void *from, int64_t n) { memcpy(to, from, (size_t)n * sizeof(float)); }

#define PP_TEXT_(name) #name
#define PP_TEXT(name) PP_TEXT_(name)

/* All kernels of an instruction set.  `own_tiles` holds the kernels of tiles.  `own_linear` and `own_linear_tiles` are
 * kernels of linear layers, or NULL. */
#define PP_KERNELS(isa, own_tiles, own_linear, own_linear_tiles) \
    {                                                           \
        .name = isa,                                            \
        .ways = {&way_exact, &own_tiles, &way_quantised},       \
        .tiled_bytes = tiled_bytes,                             \
        .read_tiled = read_tiled,                               \
        .merge = merge_chunks,                                  \
        .merge_rows = merge_rows,                               \
        .pack_queries = {pack_queries, pack_plain_queries, pack_quantised_queries}, \
        .max_rows = PP_MAX_HEADS,                               \
        .narrow = {copy_f32, narrow_f16, narrow_bf16},          \
        .write_rows = write_rows,                               \
        .widen = {copy_to_f32, widen_f16, widen_bf16},          \
        .weigh_tokens = weigh_tokens,                           \
        .keep_ahead = keep_ahead,                               \
        .rms_norm_row = rms_norm_row,                           \
        .rotate_row = rotate_row,                               \
        .lookup_mul_row = lookup_mul_row,                       \
        .linear = own_linear,                                   \
        .quantise_x = quantise_x,                               \
        .linear_quantised = linear_quantised,                   \
        .linear_tiles = own_linear_tiles,                       \
    }

const pp_kernels PP_CAT(pp_kernels_, PP_ISA, ) = PP_KERNELS(PP_TEXT(PP_ISA), PP_TILE_KERNELS, NULL, NULL);
