/* stream.c: the streaming limit, i.e. what the memory delivers to a loop that does nothing but read.
 *
 * 64-byte loads, xor-ed into 8 accumulators, over the same number of bytes as the kernel it is compared with, in one
 * contiguous buffer on huge pages.  Built by bench/limit.py with -O3 for the machine it runs on. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef uint64_t line __attribute__((vector_size(64)));

enum { STEP = 8 * sizeof(line), HUGE_PAGE = 2 << 20 };

static _Atomic uint64_t sink; /* what was read must be used, or the compiler drops the loads */

static void read_all(const char *at, size_t bytes, size_t ahead) {
    line sum[8] = {{0}};
    for (const char *end = at + bytes; at < end; at += STEP) {
        if (ahead)
            for (int i = 0; i < 8; i++) __builtin_prefetch(at + ahead + i * sizeof(line), 0, 3);
        for (int i = 0; i < 8; i++) sum[i] ^= ((const line *)at)[i];
    }
    for (int i = 1; i < 8; i++) sum[0] ^= sum[i];
    uint64_t word = 0;
    for (int i = 0; i < 8; i++) word ^= sum[0][i];
    atomic_fetch_xor_explicit(&sink, word, memory_order_relaxed);
}

/* A buffer that begins at a huge page, all of it touched; NULL when there is no memory.  What lies before the first
 * whole huge page and behind the last is given back at once, so that stream_free needs only the address. */
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
    const char *at;
    size_t bytes, ahead;
    atomic_int *go;
    atomic_int done;
    int quit;
} reader;

static void *helper(void *argument) {
    reader *self = argument;
    for (int seen = 0;; seen++) {
        while (atomic_load_explicit(self->go, memory_order_acquire) == seen) relax();
        if (self->quit) return NULL;
        read_all(self->at, self->bytes, self->ahead);
        atomic_store_explicit(&self->done, seen + 1, memory_order_release);
    }
}

/* Reads `bytes` from `buffer` `rounds` times with `threads` threads, each its own contiguous share, and writes the
 * seconds of each round; the rounds rotate over `copies` neighbouring stretches, so that none is found in a cache. */
int stream_run(const char *buffer, size_t bytes, int copies, int threads, size_t ahead, int rounds, double *seconds) {
    reader *readers = calloc((size_t)threads, sizeof *readers);
    atomic_int go = 0;
    if (!readers) return 1;
    size_t share = bytes / (size_t)threads / STEP * STEP;
    for (int i = 1; i < threads; i++) {
        readers[i].go = &go;
        if (pthread_create(&readers[i].thread, NULL, helper, &readers[i])) return 1;
    }
    for (int round = 0; round < rounds; round++) {
        const char *at = buffer + (size_t)(round % copies) * bytes;
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (int i = 1; i < threads; i++) {
            readers[i].at = at + (size_t)i * share;
            readers[i].bytes = share;
            readers[i].ahead = ahead;
        }
        atomic_fetch_add_explicit(&go, 1, memory_order_release);
        read_all(at, share, ahead);
        for (int i = 1; i < threads; i++)
            while (atomic_load_explicit(&readers[i].done, memory_order_acquire) != round + 1) relax();
        clock_gettime(CLOCK_MONOTONIC, &end);
        seconds[round] = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    }
    for (int i = 1; i < threads; i++) readers[i].quit = 1;
    atomic_fetch_add_explicit(&go, 1, memory_order_release);
    for (int i = 1; i < threads; i++) pthread_join(readers[i].thread, NULL);
    free(readers);
    return 0;
}
