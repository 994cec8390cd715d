/* draw.c: drawing the next token by its weight (draw.h). */
#include "draw.h"

#include "float_mode.h"
#include "kernels.h"

void pp_weigh(const float *logits, int64_t n, float most, float scale, float *weights, float *sums) {
    const uint64_t modes = pp_modes_enter();
    pp_kernels_get()->weigh_tokens(logits, n, most, scale, weights, sums);
    pp_modes_leave(modes);
}

void pp_keep_ahead(float *weights, int64_t num_chunks, int64_t place, float *sums) {
    const uint64_t modes = pp_modes_enter();
    pp_kernels_get()->keep_ahead(weights, num_chunks, place, sums);
    pp_modes_leave(modes);
}

/* Maps bf16 to integers in the same order. -0 is below 0. */
static inline int16_t rank_of(uint16_t half) { return (int16_t)(half ^ (0x7fff & -(half >> 15))); }

int64_t pp_largest_bf16(const uint16_t *logits, int64_t n) {
    enum { INFINITE = 0x7f80 };
    int16_t most = INT16_MIN, magnitude = 0;
    for (int64_t i = 0; i < n; i++) {
        const int16_t rank = rank_of(logits[i]), size = (int16_t)(logits[i] & 0x7fff);
        most = rank > most ? rank : most;
        magnitude = size > magnitude ? size : magnitude;
    }
    if (magnitude > INFINITE || most == INFINITE || most == rank_of(0x8000 | INFINITE)) return -1;
    const int16_t least = most == 0 ? -1 : most; /* 0 and -0 are equal */
    int64_t place = 0;
    while (rank_of(logits[place]) < least) place++;
    return place;
}

double pp_draw_total(const float *sums, int64_t num_chunks) {
    double total = 0.0;
    for (int64_t i = 0; i < num_chunks; i++) total += sums[i];
    return total;
}

/* Returns the first index below n at which the running sum of `parts` exceeds *left, and subtracts the earlier parts
 * from *left.  Rounding can make every running sum too small; the last index with a part above 0 is returned then. */
static int64_t first_above(const float *parts, int64_t n, double *left) {
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (*left < parts[i]) return i;
        *left -= parts[i];
        if (parts[i] > 0.0f) last = i;
    }
    *left = parts[last];
    return last;
}

int64_t pp_draw(const float *weights, const float *sums, int64_t num_chunks, double number) {
    double left = number * pp_draw_total(sums, num_chunks), exact = 0.0;
    const int64_t chunk = first_above(sums, num_chunks, &left);
    const float *inside = weights + chunk * PP_DRAW_CHUNK;
    for (int i = 0; i < PP_DRAW_CHUNK; i++) exact += inside[i];
    left *= exact / sums[chunk]; /* scaled to the unrounded sum of the chunk */
    return chunk * PP_DRAW_CHUNK + first_above(inside, PP_DRAW_CHUNK, &left);
}
