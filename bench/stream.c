/* stream.c: read bandwidth of the memory.
 *
 * 64-byte loads are xor-ed into 8 accumulators.  These are used at the end; otherwise the compiler would drop the
 * loads.  The loop reads one contiguous range, the limit that kernels are compared with, or chunks in the order of a
 * list, like pages in the order of a block table.  Chunks are read one after another or several interleaved, with
 * prefetches along the list.  The buffer is on huge pages.  Built by bench/machine.py with -O3 and -march=native. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef uint64_t line __attribute__((vector_size(64)));

enum { STEP = 8 * sizeof(line), SIDES = 4, SIDE_STEP = STEP / SIDES, HUGE_PAGE = 2 << 20 };

static _Atomic uint64_t sink; /* keeps the compiler from dropping the loads */

static void use(line sum[8]) {
    for (int i = 1; i < 8; i++) sum[0] ^= sum[i];
    uint64_t word = 0;
    for (int i = 0; i < 8; i++) word ^= sum[0][i];
    atomic_fetch_xor_explicit(&sink, word, memory_order_relaxed);
}

/* Work of one thread.  Without `order` it reads `bytes` bytes from `at`.  With `order` it reads `bytes / chunk` chunks,
 * the i-th at `at + chunk * order[i]`.  `ahead` is the prefetch distance in bytes; 0 disables prefetches.  `level` is
 * the cache level that prefetches fill: L1 may have too few fill buffers for the latency of the memory.  With
 * `by_sides`, SIDES chunks are read line by line in alternation, and `ahead` counts within each chunk. */
typedef struct stretch {
    const char *at;
    size_t bytes, ahead;
    int level;
    const uint32_t *order;
    size_t chunk;
    int by_sides;
} stretch;

static inline void prefetch(const char *at, size_t bytes, int level) {
    for (size_t i = 0; i < bytes; i += sizeof(line)) {
        if (level == 1)
            __builtin_prefetch(at + i, 0, 3);
        else
            __builtin_prefetch(at + i, 0, 2);
    }
}

static void read_contiguous(const stretch *self) {
    line sum[8] = {{0}};
    const size_t ahead = self->ahead;
    const int level = self->level;
    const char *const end = self->at + self->bytes;
    for (const char *at = self->at; at < end; at += STEP) {
        if (ahead) prefetch(at + ahead, STEP, level);
        for (int i = 0; i < 8; i++) sum[i] ^= ((const line *)at)[i];
    }
    use(sum);
}

/* Reads all chunks from `first` on, in the order of the list; their size is a multiple of STEP.  Prefetches run `ahead`
 * bytes ahead of the loads. */
static void read_chunks(const stretch *self, size_t first) {
    line sum[8] = {{0}};
    const size_t chunk = self->chunk, chunks = self->bytes / chunk, ahead = self->ahead;
    const int level = self->level;
    size_t far = first + ahead / chunk, far_offset = ahead % chunk;
    for (size_t c = first; c < chunks; c++) {
        const char *const at = self->at + self->order[c] * chunk;
        for (size_t offset = 0; offset < chunk; offset += STEP) {
            if (ahead) {
                prefetch(self->at + self->order[far < chunks ? far : chunks - 1] * chunk + far_offset, STEP, level);
                far_offset += STEP;
                if (far_offset == chunk) far_offset = 0, far++;
            }
            for (int i = 0; i < 8; i++) sum[i] ^= ((const line *)(at + offset))[i];
        }
    }
    use(sum);
}

/* The last chunks, fewer than SIDES, are read one after another. */
static void read_by_sides(const stretch *self) {
    line sum[8] = {{0}};
    const size_t chunk = self->chunk, chunks = self->bytes / chunk;
    const size_t ahead = self->ahead < chunk ? self->ahead : chunk;
    const char *at[SIDES], *next[SIDES];
    size_t c = 0;
    for (; c + SIDES <= chunks; c += SIDES) {
        for (int i = 0; i < SIDES; i++) {
            const size_t behind = c + 2 * SIDES <= chunks ? c + SIDES : c;
            at[i] = self->at + self->order[c + (size_t)i] * chunk;
            next[i] = self->at + self->order[behind + (size_t)i] * chunk;
        }
        for (size_t offset = 0; offset < chunk; offset += SIDE_STEP) {
            const size_t far = offset + ahead;
            for (int i = 0; ahead && i < SIDES; i++)
                prefetch(far < chunk ? at[i] + far : next[i] + (far - chunk), SIDE_STEP, self->level);
            for (int i = 0; i < 8; i++) sum[i] ^= ((const line *)(at[i % SIDES] + offset))[i / SIDES];
        }
    }
    use(sum);
    read_chunks(self, c);
}

static void read_all(const stretch *self) {
    if (!self->order)
        read_contiguous(self);
    else if (self->by_sides)
        read_by_sides(self);
    else
        read_chunks(self, 0);
}

/* stream_buffer allocates a huge-page-aligned buffer and touches all of it; NULL if out of memory.  It unmaps the slack
 * around the buffer at once, so that stream_free needs only address and size. */
static size_t rounded(size_t bytes) { return (bytes + 2 * (size_t)HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }

char *stream_buffer(size_t bytes) {
    const size_t all = rounded(bytes), slack = HUGE_PAGE;
    char *map = mmap(NULL, all + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return NULL;
    char *buffer = (char *)(((uintptr_t)map + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    if (buffer > map) munmap(map, (size_t)(buffer - map));
    if (map + slack > buffer) munmap(buffer + all, (size_t)(map + slack - buffer));
    madvise(buffer, all, MADV_HUGEPAGE);
    memset(buffer, 1, all);
    return buffer;
}

void stream_free(char *buffer, size_t bytes) { munmap(buffer, rounded(bytes)); }

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

typedef struct reader {
    pthread_t thread;
    stretch work;
    atomic_int *go;
    atomic_int done;
    int quit;
} reader;

static void *helper(void *argument) {
    reader *self = argument;
    for (int seen = 0;; seen++) {
        while (atomic_load_explicit(self->go, memory_order_acquire) == seen) relax();
        if (self->quit) return NULL;
        read_all(&self->work);
        atomic_store_explicit(&self->done, seen + 1, memory_order_release);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Reads `bytes` from `buffer` `rounds` times with `threads` threads, each its own contiguous share, and writes the
 * seconds of each round.  The rounds rotate over `copies` adjacent ranges, so that no range is in a CPU cache.  `order`
 * lists the numbers of `bytes / chunk` chunks, and each thread reads its own share of the list. */
int stream_run(const char *buffer, size_t bytes, int copies, int threads, size_t ahead, int level, int by_sides,
               const uint32_t *order, size_t chunk, int rounds, double *seconds) {
    reader *readers = calloc((size_t)threads, sizeof *readers);
    atomic_int go = 0;
    if (!readers) return 1;
    const size_t unit = order ? chunk : STEP, share = bytes / (size_t)threads / unit * unit;
    int started = 1;
    for (; started < threads; started++) {
        readers[started].go = &go;
        if (pthread_create(&readers[started].thread, NULL, helper, &readers[started])) break;
    }
    for (int round = 0; started == threads && round < rounds; round++) {
        const char *const at = buffer + (size_t)(round % copies) * bytes;
        for (int i = 0; i < threads; i++) {
            const size_t offset = (size_t)i * share;
            readers[i].work = order ? (stretch){at, share, ahead, level, order + offset / chunk, chunk, by_sides}
                                    : (stretch){at + offset, share, ahead, level, NULL, 0, 0};
        }
        const double begin = now();
        atomic_fetch_add_explicit(&go, 1, memory_order_release);
        read_all(&readers[0].work);
        for (int i = 1; i < threads; i++)
            while (atomic_load_explicit(&readers[i].done, memory_order_acquire) != round + 1) relax();
        seconds[round] = now() - begin;
    }
    for (int i = 1; i < started; i++) readers[i].quit = 1;
    atomic_fetch_add_explicit(&go, 1, memory_order_release);
    for (int i = 1; i < started; i++) pthread_join(readers[i].thread, NULL);
    free(readers);
    return started < threads;
}
