/* draw.h: drawing the next token.  A token is drawn by its weight, which is its probability times a constant.
 *
 * Weights are stored in chunks of PP_DRAW_CHUNK, padded with zeros, and each chunk has its sum.  A draw finds the chunk
 * first and then the token in it, so that running sums of a whole vocabulary are not needed. */
#ifndef PP_DRAW_H
#define PP_DRAW_H

#include <stdint.h>

enum { PP_DRAW_CHUNK = 256 };

/* Chunks of the weights of `n` tokens. */
static inline int64_t pp_draw_chunks(int64_t n) { return (n + PP_DRAW_CHUNK - 1) / PP_DRAW_CHUNK; }

/* weights[i] = 2^((logits[i] - most) * scale) for i < n, and 0 for the padding.  `sums` receives the sum of each chunk.
 * `most` must be at least every logit, and no logit may be NaN. */
void pp_weigh(const float *logits, int64_t n, float most, float scale, float *weights, float *sums);

/* Ranks weights from high to low, and equal weights by position.  Keeps the weights that rank before the weight at
 * `place`, sets all other weights (including this one) to 0, and updates `sums`. */
void pp_keep_ahead(float *weights, int64_t num_chunks, int64_t place, float *sums);

/* The sum of all weights. */
double pp_draw_total(const float *sums, int64_t num_chunks);

/* Returns the position at which the running sum of the weights, as a fraction of the total, exceeds `number`.  Requires
 * 0 <= number < 1 and at least one weight above 0. */
int64_t pp_draw(const float *weights, const float *sums, int64_t num_chunks, double number);

/* Returns the index of the largest of n logits in bf16, the first one if several are equal.  Returns -1 if a logit is
 * NaN or the largest is infinite. */
int64_t pp_largest_bf16(const uint16_t *logits, int64_t n);

#endif
