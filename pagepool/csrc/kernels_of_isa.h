/* kernels_of_isa.h: all kernels of one instruction set, as pp_kernels_<PP_ISA>.  Included once per ISA, inside its
 * target region and after its vocabulary. */
#include "decode_math.h"
#include "convert_rows.h"
#include "prefetch_paced.h"
#include "prefetch_sides.h"

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
#include "decode_kernel.h"

#define PP_DTYPE f16
#define PP_ITEM 2
#define PP_COLUMN 2
#define PP_SQUARE_BITS 16
#include "decode_kernel.h"

#define PP_DTYPE bf16
#define PP_ITEM 2
#define PP_COLUMN 4
#define PP_SQUARE_BITS 64
#include "decode_kernel.h"

/* Once more for bf16 pages: after bf16, whose decode_repack.h it shares.  PP_EMULATED is how this instruction set does
 * without one for dot products. */
#define PP_DTYPE bf16_dot
#define PP_PAGES bf16
#define PP_ITEM 2
#define PP_COLUMN 4
#define PP_QUERY_PAIR 1
#define PP_DOT PP_EMULATED
#define PP_IN_STEPS 0
#include "decode_kernel.h"

#define PP_TEXT_(name) #name
#define PP_TEXT(name) PP_TEXT_(name)

/* All of them, with a way to do dot products. */
#define PP_KERNELS(isa, dot)                                    \
    {                                                           \
        .name = isa,                                            \
        .chunk = {chunk_f32, chunk_f16, chunk_bf16},            \
        .chunk_dot = dot,                                       \
        .merge = merge_chunks,                                  \
        .merge_rows = merge_rows,                               \
        .pack_queries = {pack_queries, pack_rounded_queries},   \
        .max_rows = PP_MAX_HEADS,                               \
        .narrow = {copy_f32, narrow_f16, narrow_bf16},          \
        .write_rows = write_rows,                               \
        .widen = {copy_to_f32, widen_f16, widen_bf16},          \
    }

const pp_kernels PP_CAT(pp_kernels_, PP_ISA, ) = PP_KERNELS(PP_TEXT(PP_ISA), chunk_bf16_dot);
