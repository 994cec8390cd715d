/* failing_malloc.c: a preloaded library that makes one allocation fail, and counts live blocks and mapped bytes.
 *
 * failing_countdown = n: the n-th allocation from now on fails, once.  0: no allocation fails.  With
 * failing_num_ranges > 0, only allocations from code in failing_ranges count (begin and end address of each range). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>

#define MOST_RANGES 256

long failing_countdown, failing_live, failing_mapped, failing_num_ranges;
size_t failing_ranges[2 * MOST_RANGES];

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static int counts(size_t caller) {
    for (long i = 0; i < failing_num_ranges; i++)
        if (failing_ranges[2 * i] <= caller && caller < failing_ranges[2 * i + 1]) return 1;
    return failing_num_ranges == 0;
}

static int fails_for(void *caller) {
    return failing_countdown > 0 && counts((size_t)caller) && --failing_countdown == 0;
}

#define fails() fails_for(__builtin_return_address(0))

static void *counted(void *memory) {
    failing_live += memory != NULL;
    return memory;
}

void *malloc(size_t size) { return fails() ? NULL : counted(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) { return fails() ? NULL : counted(__libc_calloc(count, size)); }

void *realloc(void *old, size_t size) {
    if (fails()) return NULL;
    void *memory = __libc_realloc(old, size);
    failing_live += !old && memory;
    return memory;
}

void *aligned_alloc(size_t alignment, size_t size) {
    return fails() ? NULL : counted(__libc_memalign(alignment, size));
}

int posix_memalign(void **memory, size_t alignment, size_t size) {
    if (fails()) return ENOMEM;
    void *taken = counted(__libc_memalign(alignment, size));
    if (!taken) return ENOMEM;
    *memory = taken;
    return 0;
}

void free(void *memory) {
    failing_live -= memory != NULL;
    __libc_free(memory);
}

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    static void *(*next)(void *, size_t, int, int, int, off_t);
    if (fails()) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    if (!next) next = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    void *mapped = next(address, size, protection, flags, file, offset);
    failing_mapped += mapped == MAP_FAILED ? 0 : (long)size;
    return mapped;
}

int munmap(void *address, size_t size) {
    static int (*next)(void *, size_t);
    if (!next) next = (int (*)(void *, size_t))dlsym(RTLD_NEXT, "munmap");
    failing_mapped -= (long)size;
    return next(address, size);
}
