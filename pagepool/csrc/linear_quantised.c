/* linear_quantised.c: see linear_quantised.h. */
#include "linear_quantised.h"

#include <string.h>

#include "float_mode.h"
#include "kernels.h"
#include "pagepool/threads.h"
#include "workspace.h"

enum { PANEL = PP_QUANTISED_PANEL, HEIGHT = PP_QUANTISED_HEIGHT };

/* A unit of work is a block of outputs for a panel of rows.  All panels are computed for blocks of about this size
 * before the next ones are read, so that these weights stay in the cache of a core. */
enum { CACHED_BYTES = 512 << 10 };

/* Fewer rows take less time one by one than as a tile. */
enum { LEAST_OF_TILE = 8 };

typedef struct job {
    pp_quantised_rows rows;
    const void *x;
    const pp_kernels *kernels;
    int64_t stride, outputs, blocks; /* stride of x in bytes; outputs and blocks of all layers */
    int64_t panels, cached;          /* cached: number of blocks of CACHED_BYTES */
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

/* Zeros the scales of the rows that the last tile has and the call does not.  Their results are not written, but the
 * memory may hold denormal numbers, with which a multiplication takes 20 times as long. */
static void zero_absent_rows(const pp_quantised_rows *rows) {
    const int64_t tile = rows->groups * rows->height, at = rows->count / rows->height * tile;
    if (rows->count % rows->height == 0) return;
    memset(rows->scale + at, 0, (size_t)tile * sizeof *rows->scale);
    memset(rows->scaled_sum + at, 0, (size_t)tile * sizeof *rows->scaled_sum);
}

static int64_t blocks_of(const pp_quantised *weight) {
    return (weight->outputs + PP_QUANTISED_OUTPUTS - 1) / PP_QUANTISED_OUTPUTS;
}

/* Blocks [begin, end) of a layer for `count` rows. */
static void multiply_blocks(const job *work, const pp_quantised *weight, int64_t row, int64_t count, int64_t begin,
                            int64_t end, char *to, int64_t stride) {
    int64_t by_tiles = work->kernels->linear_tiles ? (count + HEIGHT - LEAST_OF_TILE) / HEIGHT * HEIGHT : 0;
    if (by_tiles > count) by_tiles = count;
    if (by_tiles) work->kernels->linear_tiles(weight, &work->rows, row, by_tiles, begin, end, to, stride);
    if (by_tiles == count) return;
    work->kernels->linear_quantised(weight, &work->rows, row + by_tiles, count - by_tiles, begin, end,
                                    to + by_tiles * stride, stride);
}

static void multiply(void *context, int64_t begin, int64_t end) {
    const job *work = context;
    const int64_t size = work->rows.dtype == PP_F32 ? 4 : 2;
    const uint64_t modes = pp_modes_enter();
    while (begin < end) {
        const int64_t first = begin / (work->cached * work->panels) * work->cached, after = work->blocks - first;
        const int64_t cached = after < work->cached ? after : work->cached, unit = begin - first * work->panels;
        const int64_t row = unit / cached * PANEL, left = work->rows.count - row;
        int64_t units = cached - unit % cached, block = first + unit % cached;
        const pp_quantised *weight = work->weights;
        char *to = (char *)work->out + row * work->outputs * size;
        for (; block >= blocks_of(weight); block -= blocks_of(weight), weight++) to += weight->outputs * size;
        if (units > end - begin) units = end - begin;
        if (units > blocks_of(weight) - block) units = blocks_of(weight) - block;
        multiply_blocks(work, weight, row, left < PANEL ? left : PANEL, block, block + units, to, work->outputs * size);
        begin += units;
    }
    pp_modes_leave(modes);
}

pp_status pp_linear_quantised(const void *x, pp_dtype dtype, int64_t rows, int64_t inputs, const pp_quantised *weights,
                              int32_t num_weights, void *out, int num_threads) {
    if (rows <= 0) return PP_OK;
    const int64_t groups = inputs / PP_QUANTISED_GROUP, height = rows < LEAST_OF_TILE ? rows : HEIGHT;
    const int64_t tiles = rows / height + (rows % height != 0);
    int64_t bytes, count; /* count of groups of all rows */
    if (__builtin_mul_overflow(tiles, groups * height, &count)) return PP_NO_MEMORY;
    if (__builtin_mul_overflow(count, PP_QUANTISED_GROUP + 3 * (int64_t)sizeof(float), &bytes)) return PP_NO_MEMORY;
    unsigned char *memory = pp_workspace_borrow((size_t)bytes);
    if (!memory) return PP_NO_MEMORY;
    float *scale = (float *)(memory + count * PP_QUANTISED_GROUP);
    job work = {
        .rows = {.q = (int8_t *)memory, .scale = scale, .scaled_sum = scale + count,
                 .sum = (int32_t *)(scale + 2 * count), .count = rows, .groups = groups, .height = height,
                 .dtype = dtype},
        .x = x, .kernels = pp_kernels_quantised(pp_kernels_get()), .stride = inputs * (dtype == PP_F32 ? 4 : 2),
        .out = out, .weights = weights, .panels = (rows + PANEL - 1) / PANEL,
        .cached = 1 + CACHED_BYTES / (groups * pp_quantised_group_bytes(PP_QUANTISED_8))};
    for (int32_t i = 0; i < num_weights; i++) {
        work.outputs += weights[i].outputs;
        work.blocks += blocks_of(weights + i);
    }
    zero_absent_rows(&work.rows);
    pp_parallel_for(rows < 4 ? 1 : num_threads, rows, quantise, &work); /* a row takes less time than waking a thread */
    pp_parallel_for(num_threads, work.panels * work.blocks, multiply, &work);
    pp_workspace_return(memory);
    return PP_OK;
}
