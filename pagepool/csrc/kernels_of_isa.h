/* kernels_of_isa.h: all kernels of one instruction set, as pp_kernels_<PP_ISA>. Included once per ISA, inside its
 * target region and after its vector and integer functions. */
#include "convert_rows.h"
#include "softmax_math.h"
#include "block_sums.h"
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

#include "prefill_common.h"
#include "prefill_kernel.h"
#include "prefill_mixed.h"
#include "linear_quantised_kernel.h"

static void copy_f32(void *to, const float *from, int64_t n) { memcpy(to, from, (size_t)n * sizeof(float)); }

static void copy_to_f32(float *to, const void *from, int64_t n) { memcpy(to, from, (size_t)n * sizeof(float)); }

#define PP_TEXT_(name) #name
#define PP_TEXT(name) PP_TEXT_(name)

/* All kernels of an instruction set.  `own_tiles` holds the kernels of tiles, `own_linear` is the kernel of linear.h or
 * NULL.  The other arguments are the kernels of mixed pages and of quantised weights, or NULL. */
#define PP_KERNELS(isa, own_tiles, own_linear, mixed, mixed_pack, mixed_prefill, mixed_shared, quantised) \
    {                                                           \
        .name = isa,                                            \
        .chunk = {chunk_f32, chunk_f16, chunk_bf16},            \
        .chunk_mixed = mixed,                                   \
        .tiles = &own_tiles,                                    \
        .tiled_bytes = tiled_bytes,                             \
        .read_tiled = read_tiled,                               \
        .merge = merge_chunks,                                  \
        .merge_rows = merge_rows,                               \
        .pack_queries = {pack_queries, pack_plain_queries, mixed_pack}, \
        .max_rows = PP_MAX_HEADS,                               \
        .prefill = {prefill_exact, NULL, mixed_prefill},        \
        .shared = {shared_exact, NULL, mixed_shared},           \
        .panel_rows = PP_PANEL,                                 \
        .prefill_bytes = prefill_bytes,                         \
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
        .linear_quantised = quantised,                          \
    }
#define PP_KERNELS_(...) PP_KERNELS(__VA_ARGS__)

#define PP_MIXED_KERNELS chunk_mixed, pack_mixed_queries, prefill_mixed, shared_mixed, linear_quantised
#ifndef PP_OWN_MIXED /* NULL if the CPU may lack the instructions */
#define PP_OWN_MIXED PP_MIXED_KERNELS
#endif

const pp_kernels PP_CAT(pp_kernels_, PP_ISA, ) = PP_KERNELS_(PP_TEXT(PP_ISA), PP_TILE_KERNELS, NULL, PP_OWN_MIXED);
