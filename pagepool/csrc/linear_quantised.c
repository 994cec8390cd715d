/* linear_quantised.c: see linear_quantised.h. */
#include "linear_quantised.h"

#include "float_mode.h"
#include "kernels.h"
#include "pagepool/threads.h"
#include "workspace.h"

/* Rows that one unit of work computes.  For more rows, weights are read again, and x stays in the cache of a core. */
enum { PANEL = 128 };

typedef struct job {
    pp_quantised_rows rows;
    const void *x;
    const pp_kernels *kernels;
    int64_t stride, outputs, blocks; /* stride of x in bytes; outputs and blocks of all layers */
    void *out;
    const pp_quantised *weights;
} job;

static void quantise(void *context, int64_t begin, int64_t end) {
    const job *work = context;
    const uint64_t modes = pp_modes_enter();
    for (int64_t row = begin; row < end; row++)
        work->kernels->quantise_x((const char *)work->x + row * work->stride, &work->rows, row);
    pp_modes_leave(modes);
}

static int64_t blocks_of(const pp_quantised *weight) {
    return (weight->outputs + PP_QUANTISED_OUTPUTS - 1) / PP_QUANTISED_OUTPUTS;
}

static void multiply(void *context, int64_t begin, int64_t end) {
    const job *work = context;
    const int64_t size = work->rows.dtype == PP_F32 ? 4 : 2;
    const uint64_t modes = pp_modes_enter();
    while (begin < end) { /* a unit is a block of outputs for a panel of rows */
        const int64_t panel = begin / work->blocks, row = panel * PANEL, left = work->rows.count - row;
        int64_t block = begin % work->blocks, units = work->blocks - block;
        const pp_quantised *weight = work->weights;
        char *to = (char *)work->out + row * work->outputs * size;
        for (; block >= blocks_of(weight); block -= blocks_of(weight), weight++) to += weight->outputs * size;
        if (units > end - begin) units = end - begin;
        if (units > blocks_of(weight) - block) units = blocks_of(weight) - block;
        work->kernels->linear_quantised(weight, &work->rows, row, left < PANEL ? left : PANEL, block, block + units, to,
                                        work->outputs * size);
        begin += units;
    }
    pp_modes_leave(modes);
}

pp_status pp_linear_quantised(const void *x, pp_dtype dtype, int64_t rows, int64_t inputs, const pp_quantised *weights,
                              int32_t num_weights, void *out, int num_threads) {
    const int64_t groups = inputs / PP_QUANTISED_GROUP, of_group = sizeof(pp_quantised_scale);
    int64_t bytes;
    if (__builtin_mul_overflow(rows, inputs + groups * of_group, &bytes)) return PP_NO_MEMORY;
    unsigned char *memory = pp_workspace_borrow((size_t)bytes);
    if (!memory) return PP_NO_MEMORY;
    job work = {
        .rows = {.scales = (pp_quantised_scale *)memory, .q = (int8_t *)(memory + rows * groups * of_group),
                 .count = rows, .inputs = inputs, .groups = groups, .dtype = dtype},
        .x = x, .kernels = pp_kernels_quantised(pp_kernels_get()), .stride = inputs * (dtype == PP_F32 ? 4 : 2),
        .out = out, .weights = weights};
    for (int32_t i = 0; i < num_weights; i++) {
        work.outputs += weights[i].outputs;
        work.blocks += blocks_of(weights + i);
    }
    pp_parallel_for(rows < 4 ? 1 : num_threads, rows, quantise, &work); /* a row takes less time than waking a thread */
    pp_parallel_for(num_threads, (rows + PANEL - 1) / PANEL * work.blocks, multiply, &work);
    pp_workspace_return(memory);
    return PP_OK;
}
