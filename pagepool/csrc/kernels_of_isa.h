/* kernels_of_isa.h: all kernels of one instruction set, as pp_kernels_<PP_ISA>.  Included once per ISA, inside its
 * target region and after its vocabulary. */
#include "decode_math.h"
#include "narrow.h"

/* The middle halves of 64 bits change places: decode_arrange.h. */
#define PP_TURN_SQUARE(word) \
    (((word) & 0xffff00000000ffffu) | (((word) & 0xffff0000u) << 16) | (((word) >> 16) & 0xffff0000u))

#define PP_DTYPE f32
#define PP_ITEM 4
#define PP_WORD uint32_t
#define PP_TURN_WORD(word) (word)
#include "decode_kernel.h"

#define PP_DTYPE f16
#define PP_ITEM 2
#define PP_WORD uint16_t
#define PP_TURN_WORD(word) (word)
#include "decode_kernel.h"

#define PP_DTYPE bf16
#define PP_ITEM 2
#define PP_WORD uint64_t
#define PP_TURN_WORD(word) PP_TURN_SQUARE(word)
#include "decode_kernel.h"

#define PP_TEXT_(name) #name
#define PP_TEXT(name) PP_TEXT_(name)

const pp_kernels PP_CAT(pp_kernels_, PP_ISA, ) = {
    .name = PP_TEXT(PP_ISA),
    .chunk = {chunk_f32, chunk_f16, chunk_bf16},
    .merge = merge_chunks,
    .merge_rows = merge_rows,
    .pack_queries = pack_queries,
    .max_rows = PP_MAX_HEADS,
    .narrow = {copy_f32, narrow_f16, narrow_bf16},
    .widen = {copy_to_f32, widen_f16, widen_bf16},
};
