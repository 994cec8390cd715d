/* draw.h: drawing the next token.  A token is drawn by its weight, which is its probability times a constant.
 *
 * Weights lie in chunks of PP_DRAW_CHUNK, with zeros behind the last one, and each chunk has its sum: a token is found
 * by its chunk and then within it, so that running sums of a whole vocabulary are not needed. */
#ifndef PP_DRAW_H
#define PP_DRAW_H

#include <stdint.h>

enum { PP_DRAW_CHUNK = 256 };

/* Chunks of the weights of `n` tokens. */
static inline int64_t pp_draw_chunks(int64_t n) { return (n + PP_DRAW_CHUNK - 1) / PP_DRAW_CHUNK; }

/* weights[i] = 2^((logits[i] - most) * scale) for i < n, 0 behind; sums: those of chunks.  No logit is above `most`,
 * and none is NaN. */
void pp_weigh(const float *logits, int64_t n, float most, float scale, float *weights, float *sums);

/* Keeps the weights that come before that of `place` in falling order, of equal ones the first first; the others and
 * its own become 0.  `sums` follow. */
void pp_keep_ahead(float *weights, int64_t num_chunks, int64_t place, float *sums);

/* The sum of all. */
double pp_draw_total(const float *sums, int64_t num_chunks);

/* The place whose share of all weights has `number`, from 0 up to but not 1, in it; at least one is above 0. */
int64_t pp_draw(const float *weights, const float *sums, int64_t num_chunks, double number);

#endif
