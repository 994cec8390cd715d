/* guarded.h: memory behind which nothing may be read or written.  For programs that define _DEFAULT_SOURCE first. */
#ifndef GUARDED_H
#define GUARDED_H

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

/* `bytes` that end where a page begins that cannot be read: all of `from`, or zeros. */
static inline void *at_the_end(const void *from, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page;
    unsigned char *mapping = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapping != MAP_FAILED && mprotect(mapping + room, page, PROT_NONE) == 0);
    if (from && bytes) memcpy(mapping + room - bytes, from, bytes);
    return mapping + room - bytes;
}

static inline void free_at_the_end(void *memory, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page;
    CHECK(munmap((unsigned char *)memory + bytes - room, room + page) == 0);
}

#endif
