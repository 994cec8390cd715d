/* linear_quantised.h: linear layers with weights of 8 or 4 bits in groups of 32 inputs, as GGUF's Q8_0, Q4_0 and Q4_1.
 *
 * A decode step reads each weight once, so that its bytes are the limit.  Activations are rounded to 8 bits with one
 * scale for each row and group of 32, as llama.cpp does, so products are sums of integers.  Every number of rows takes
 * this way.  A row's result therefore depends on nothing else, and every instruction set returns the same bits.  On
 * CPUs with AMX, tiles of 16 rows take 0.5 to 0.8 of the time of AVX512_VNNI. */
#ifndef PP_LINEAR_QUANTISED_H
#define PP_LINEAR_QUANTISED_H

#include <stdint.h>

#include "pagepool/layout.h"
#include "pagepool/status.h"

/* A weight is q * scale, (q - 8) * scale or q * scale + least.  q is int8 in PP_QUANTISED_8, otherwise 0 to 15. */
typedef enum pp_quantised_format { PP_QUANTISED_8, PP_QUANTISED_4, PP_QUANTISED_4_LEAST } pp_quantised_format;

/* Blocks of 32 outputs one after another, the last one padded.  In a block, each group of 32 inputs has
 *   8 bits:  [8][32 outputs][4 inputs]
 *   4 bits:  [4][32 outputs][4 inputs]: byte i of the group of an output has input i, and input i + 16 in its high half
 *   the scale of each output in f16, and with PP_QUANTISED_4_LEAST the least weight of each output in f16 */
enum { PP_QUANTISED_GROUP = 32, PP_QUANTISED_OUTPUTS = 32 };

/* Bytes of a group of a block. */
static inline int64_t pp_quantised_group_bytes(int32_t format) {
    const int64_t one = PP_QUANTISED_OUTPUTS * 2; /* f16 for each output */
    return PP_QUANTISED_OUTPUTS * (format == PP_QUANTISED_8 ? 32 : 16) + (format == PP_QUANTISED_4_LEAST ? 2 : 1) * one;
}

typedef struct pp_quantised {
    int32_t format;
    int64_t outputs;
    const unsigned char *data; /* aligned to 64 */
    const float *bias;         /* or NULL */
} pp_quantised;

/* out = x weight + bias for one or several layers with the same x, whose outputs follow one another in a row of `out`.
 *
 * x is (rows, inputs), contiguous, in f32, f16 or bf16; `inputs` is a positive multiple of 32.  Rows of `out` have the
 * dtype of x and the sum of all outputs as their length.  A sum adds one group after another in f32:
 *   sum = fma(x's scale * scale, exact sum of products of integers, sum)
 *   sum = fma(least, x's scale * sum of x's integers, sum)                   with PP_QUANTISED_4_LEAST
 * A row of x with a NaN or an infinity gives NaNs.  PP_NO_MEMORY: nothing was written. */
pp_status pp_linear_quantised(const void *x, pp_dtype dtype, int64_t rows, int64_t inputs, const pp_quantised *weights,
                              int32_t num_weights, void *out, int num_threads);

#endif
