/* guarded.h: allocations followed by an inaccessible page.  For programs that define _DEFAULT_SOURCE first. */
#ifndef GUARDED_H
#define GUARDED_H

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

/* Allocates `bytes` bytes that end at an inaccessible page: a copy of `from`, or zeros if it is NULL. */
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
