/* linear.c: see linear.h. */
#include "linear.h"

#include <string.h>

#include "float_mode.h"
#include "kernels.h"
#include "pagepool/threads.h"
#include "workspace.h"

int pp_linear_has_few(void) { return pp_kernels_get()->linear != NULL; }

static void run(void *context, int64_t begin, int64_t end) {
    const uint64_t modes = pp_modes_enter();
    pp_kernels_get()->linear(context, begin, end);
    pp_modes_leave(modes);
}

/* Rows of x as they are copied: whole groups of PP_LINEAR_ROWS. */
static int64_t padded(int64_t rows) { return (rows + PP_LINEAR_ROWS - 1) / PP_LINEAR_ROWS * PP_LINEAR_ROWS; }

/* Copies x into tiles of 16 rows and 32 inputs, two tiles for each 32 inputs.  Missing rows become zeros. */
static void copy_into_tiles(const uint16_t *x, int64_t rows, int64_t inputs, unsigned char *tiles) {
    enum { BYTES = PP_LINEAR_INPUTS * sizeof(uint16_t) };
    const int64_t steps = inputs / PP_LINEAR_INPUTS;
    for (int64_t row = 0; row < padded(rows); row++) {
        const int64_t group = row / PP_LINEAR_ROWS, place = row % PP_LINEAR_ROWS;
        for (int64_t step = 0; step < steps; step++) {
            unsigned char *to = tiles + ((group * steps + step) * PP_LINEAR_ROWS + place) * BYTES;
            if (row < rows)
                memcpy(to, x + row * inputs + step * PP_LINEAR_INPUTS, BYTES);
            else
                memset(to, 0, BYTES);
        }
    }
}

pp_status pp_linear_few(const uint16_t *x, int64_t rows, int64_t inputs, const void *weight, const uint16_t *bias,
                        int64_t outputs, uint16_t *out, int num_threads) {
    unsigned char *tiles = pp_workspace_borrow((size_t)(padded(rows) * inputs) * sizeof(uint16_t));
    if (!tiles) return PP_NO_MEMORY;
    copy_into_tiles(x, rows, inputs, tiles);
    pp_linear work = {.tiles = tiles, .rows = rows, .inputs = inputs, .weight = weight, .bias = bias,
                      .outputs = outputs, .out = out};
    pp_parallel_for(num_threads, (outputs + PP_LINEAR_OUTPUTS - 1) / PP_LINEAR_OUTPUTS, run, &work);
    pp_workspace_return(tiles);
    return PP_OK;
}
