/* elementwise.c: cuts the rows of elementwise.h for threads. */
#include "elementwise.h"

#include "float_mode.h"
#include "kernels.h"
#include "pagepool/threads.h"

/* Elements that are worth a thread of their own: waking one takes about as long as 8,000 elements. */
enum { ELEMENTS_OF_THREAD = 1 << 15 };

typedef struct {
    const uint16_t *x, *y, *z;
    uint16_t *sum, *out;
    int64_t stride, n, heads;
    float eps;
} job;

static void run(int num_threads, int64_t rows, int64_t n, void (*body)(void *, int64_t, int64_t), job *work) {
    const int64_t useful = rows * n / ELEMENTS_OF_THREAD + 1;
    pp_parallel_for(num_threads < useful ? num_threads : (int)useful, rows, body, work);
}

static void norm_rows(void *context, int64_t begin, int64_t end) {
    const job *work = context;
    const uint64_t modes = pp_modes_enter();
    for (int64_t row = begin; row < end; row++) {
        const int64_t at = row * work->n;
        pp_kernels_get()->rms_norm_row(work->x + at, work->y ? work->y + at : NULL, work->z, work->eps, work->n,
                                       work->sum + at, work->out + at);
    }
    pp_modes_leave(modes);
}

void pp_rms_norm(const uint16_t *x, const uint16_t *delta, const uint16_t *weight, float eps, int64_t rows, int64_t n,
                 uint16_t *sum, uint16_t *out, int num_threads) {
    job work = {.x = x, .y = delta, .z = weight, .sum = sum, .out = out, .n = n, .eps = eps};
    run(num_threads, rows, n, norm_rows, &work);
}

static void norm_heads(void *context, int64_t begin, int64_t end) {
    const job *work = context;
    const uint64_t modes = pp_modes_enter();
    for (int64_t row = begin; row < end; row++)
        for (int64_t head = 0; head < work->heads; head++) {
            uint16_t *x = work->out + row * work->stride + head * work->n;
            pp_kernels_get()->rms_norm_row(x, NULL, work->z, work->eps, work->n, x, x);
        }
    pp_modes_leave(modes);
}

void pp_rms_norm_heads(uint16_t *x, int64_t stride, const uint16_t *weight, float eps, int64_t rows, int64_t heads,
                       int64_t dim, int num_threads) {
    job work = {.z = weight, .out = x, .stride = stride, .n = dim, .heads = heads, .eps = eps};
    run(num_threads, rows, heads * dim, norm_heads, &work);
}

static void rotate_rows(void *context, int64_t begin, int64_t end) {
    const job *work = context;
    const uint64_t modes = pp_modes_enter();
    for (int64_t row = begin; row < end; row++)
        pp_kernels_get()->rotate_row(work->out + row * work->stride, work->y + row * work->n, work->z + row * work->n,
                                     work->heads, work->n);
    pp_modes_leave(modes);
}

void pp_rotate(uint16_t *x, int64_t stride, const uint16_t *cos, const uint16_t *sin, int64_t rows, int64_t heads,
               int64_t dim, int num_threads) {
    job work = {.y = cos, .z = sin, .out = x, .stride = stride, .n = dim, .heads = heads};
    run(num_threads, rows, heads * dim, rotate_rows, &work);
}

static void lookup_rows(void *context, int64_t begin, int64_t end) {
    const job *work = context;
    const uint64_t modes = pp_modes_enter();
    for (int64_t row = begin; row < end; row++)
        pp_kernels_get()->lookup_mul_row(work->x + row * work->stride, work->y + row * work->stride, work->z, work->n,
                                         work->out + row * work->n);
    pp_modes_leave(modes);
}

void pp_lookup_mul(const uint16_t *gate, const uint16_t *up, int64_t stride, const uint16_t *table, int64_t rows,
                   int64_t n, uint16_t *out, int num_threads) {
    job work = {.x = gate, .y = up, .z = table, .out = out, .stride = stride, .n = n};
    run(num_threads, rows, n, lookup_rows, &work);
}
