/* elementwise.h: operations between the linear layers of a model in bf16, with the bits of torch's eager mode.
 *
 * torch computes each operation in f32 and rounds its result to bf16.  These functions do several operations in one
 * pass and round at the same places, so they return the same bits.  A row is the vector of one token.  Rows are
 * contiguous, and `stride` is the distance of two rows in elements.  `num_threads` as in pp_parallel_for. */
#ifndef PP_ELEMENTWISE_H
#define PP_ELEMENTWISE_H

#include <stdint.h>

/* sum = x + delta, and out = weight * (sum / sqrt(mean(sum^2) + eps)), row by row.  delta may be NULL; then sum is not
 * written and is x.  All rows have n elements, and sum may be x or delta.  The squares are added in the order of torch
 * for vectors of 8 lanes. */
void pp_rms_norm(const uint16_t *x, const uint16_t *delta, const uint16_t *weight, float eps, int64_t rows, int64_t n,
                 uint16_t *sum, uint16_t *out, int num_threads);

/* The norm of each of the first `heads` heads of each row, in place, with `dim` elements each. */
void pp_rms_norm_heads(uint16_t *x, int64_t stride, const uint16_t *weight, float eps, int64_t rows, int64_t heads,
                       int64_t dim, int num_threads);

/* Rotates the first `heads` heads of each row in place, each of `dim` elements: x * cos + rotate_half(x) * sin.  cos
 * and sin have `dim` elements for each row. */
void pp_rotate(uint16_t *x, int64_t stride, const uint16_t *cos, const uint16_t *sin, int64_t rows, int64_t heads,
               int64_t dim, int num_threads);

/* out = f(gate) * up for rows of n elements.  Rows of gate and up are `stride` apart.  `table` has the result of f for
 * each of the 65,536 values of bf16.  At 65,536 elements this takes half of the time of torch's silu and product. */
void pp_lookup_mul(const uint16_t *gate, const uint16_t *up, int64_t stride, const uint16_t *table, int64_t rows,
                   int64_t n, uint16_t *out, int num_threads);

#endif
