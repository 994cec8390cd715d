/* kernels_of_isa.h: all kernels of one instruction set, as pp_kernels_<PP_ISA>.  Included once per ISA, inside its
 * target region and after its vocabulary. */
#include "convert_rows.h"
#include "decode_math.h"
#include "draw_kernel.h"
#include "prefetch.h"

#define PP_WORD_BITS 16
#define PP_SIDE 8
#include "transpose_block.h"

#define PP_WORD_BITS 32
#if PP_LANES == 4
#define PP_SIDE 4
#else
#define PP_SIDE 8
#endif
#include "transpose_block.h"

#include "pack_queries.h"

#include "append_kernel.h"

#define PP_DTYPE f32
#define PP_ITEM 4
#define PP_COLUMN 4
#define PP_SQUARE_BITS 32
#define PP_IN_STEPS PP_STEPS
#include "decode_kernel.h"

#define PP_DTYPE f16
#define PP_ITEM 2
#define PP_COLUMN 2
#define PP_SQUARE_BITS 16
#define PP_IN_STEPS PP_STEPS
#include "decode_kernel.h"

#define PP_DTYPE bf16
#define PP_ITEM 2
#define PP_COLUMN 4
#define PP_SQUARE_BITS 64
#define PP_IN_STEPS PP_STEPS
#include "decode_kernel.h"

#include "prefill_common.h"

#define PP_DTYPE exact
#include "prefill_kernel.h"

/* Once more for bf16 pages, whose decode_repack.h it shares: where there is no instruction for it, and no other
 * instruction set whose kernels have the same bits. */
#if defined(PP_DOT_BY_FMA) || defined(PP_DOT_BY_DOUBLE)
#define PP_DTYPE bf16_dot
#define PP_PAGES bf16
#define PP_ITEM 2
#define PP_COLUMN 4
#define PP_DOT 1
#define PP_IN_STEPS 0
#include "decode_kernel.h"
#define PP_OWN_DOT chunk_bf16_dot, prefill_bf16_dot, shared_bf16_dot, PP_CAT(pp_kernels_, PP_ISA, )
#else
#define PP_OWN_DOT NULL, NULL, NULL, pp_kernels_avx2
#endif

#define PP_TEXT_(name) #name
#define PP_TEXT(name) PP_TEXT_(name)

/* All of them, with the kernels of dot products, or NULLs, whose those are, and with those of mixed pages, or NULLs. */
#define PP_KERNELS(isa, own, own_prefill, own_shared, others, mixed, mixed_pack, mixed_prefill, mixed_shared) \
    {                                                           \
        .name = isa,                                            \
        .chunk = {chunk_f32, chunk_f16, chunk_bf16},            \
        .chunk_dot = own,                                       \
        .chunk_mixed = mixed,                                   \
        .dot = &others,                                         \
        .merge = merge_chunks,                                  \
        .merge_rows = merge_rows,                               \
        .pack_queries = {pack_queries, pack_rounded_queries, mixed_pack}, \
        .max_rows = PP_MAX_HEADS,                               \
        .prefill = {prefill_exact, own_prefill, mixed_prefill}, \
        .shared = {shared_exact, own_shared, mixed_shared},     \
        .panel_rows = PP_PANEL,                                 \
        .prefill_bytes = prefill_bytes,                         \
        .narrow = {copy_f32, narrow_f16, narrow_bf16},          \
        .write_rows = write_rows,                               \
        .widen = {copy_to_f32, widen_f16, widen_bf16},          \
        .weigh_tokens = weigh_tokens,                           \
        .keep_ahead = keep_ahead,                               \
    }
#define PP_KERNELS_(...) PP_KERNELS(__VA_ARGS__)

#define PP_MIXED_KERNELS chunk_mixed, pack_mixed_queries, prefill_mixed, shared_mixed
#ifdef PP_INTS /* else other kernels have them */
#include PP_INTS
#include "quantised.h"
#define PP_OWN_MIXED PP_MIXED_KERNELS
#else
#define PP_OWN_MIXED NULL, NULL, NULL, NULL
#endif

const pp_kernels PP_CAT(pp_kernels_, PP_ISA, ) = PP_KERNELS_(PP_TEXT(PP_ISA), PP_OWN_DOT, PP_OWN_MIXED);
