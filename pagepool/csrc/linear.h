/* linear.h: linear layers in bf16 with few rows, over the packed weights of oneDNN.
 *
 * A decode step reads each weight once, so that memory is its limit.  For 32 rows this takes 0.8 of the time of
 * oneDNN's own function, which does not prefetch weights. */
#ifndef PP_LINEAR_H
#define PP_LINEAR_H

#include <stdint.h>

#include "pagepool/status.h"

/* oneDNN's layout for AMX: blocks of 32 outputs one after another.  In a block, 32 inputs take 2 KB: 16 rows for pairs
 * of inputs, each with the pairs of all 32 outputs.  Outputs are padded with zeros to a multiple of 32. */
enum { PP_LINEAR_OUTPUTS = 32, PP_LINEAR_INPUTS = 32, PP_LINEAR_ROWS = 32 /* that are computed together */ };

/* Whether the kernels in use have pp_linear_few. */
int pp_linear_has_few(void);

/* out = x weight + bias: x is (rows, inputs), out is (rows, outputs), both contiguous; bias has `outputs` elements or
 * is NULL.  `inputs` is a multiple of 32.  Each sum adds products in the order of the inputs, 32 in an instruction, and
 * is rounded once: a row's result does not depend on the other rows.  PP_NO_MEMORY: nothing was written. */
pp_status pp_linear_few(const uint16_t *x, int64_t rows, int64_t inputs, const void *weight, const uint16_t *bias,
                        int64_t outputs, uint16_t *out, int num_threads);

#endif
