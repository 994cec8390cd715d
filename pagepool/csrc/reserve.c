/* reserve.c: see reserve.h. */
#define _GNU_SOURCE
#include "reserve.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT 64
#define SYSTEM_PAGE ((size_t)1 << 16) /* the largest that aarch64 has */
#define HUGE_PAGE ((size_t)2 << 20)
#define SMALL ((size_t)1 << 17) /* below it a heap block, cleared, is cheaper than a mapping */

static pp_status reserve_small(pp_reservation *reservation, size_t bytes) {
    void *base;
    size_t room = bytes ? bytes : ALIGNMENT;
    if (posix_memalign(&base, ALIGNMENT, room)) return PP_NO_MEMORY;
    memset(base, 0, room);
    *reservation = (pp_reservation){.base = base, .bytes = bytes};
    return PP_OK;
}

pp_status pp_reserve(pp_reservation *reservation, size_t bytes, int huge) {
    if (!huge && bytes < SMALL) return reserve_small(reservation, bytes);
    size_t alignment = huge ? HUGE_PAGE : 1; /* a mapping is aligned to a system page anyhow */
    if (bytes > PTRDIFF_MAX - 2 * HUGE_PAGE) return PP_NO_MEMORY;
    size_t wanted = ((bytes ? bytes : 1) + SYSTEM_PAGE - 1) / SYSTEM_PAGE * SYSTEM_PAGE;
    size_t mapped = huge ? wanted + HUGE_PAGE : wanted;
    unsigned char *start =
        mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return PP_NO_MEMORY;
    unsigned char *base = (unsigned char *)(((uintptr_t)start + alignment - 1) / alignment * alignment);
    /* What lies before and behind the aligned part goes back; should the system refuse, it stays, as address space. */
    if (base > start) munmap(start, (size_t)(base - start));
    if (mapped - (size_t)(base - start) > wanted) munmap(base + wanted, mapped - (size_t)(base - start) - wanted);
#ifdef MADV_HUGEPAGE
    if (huge && bytes >= HUGE_PAGE) madvise(base, wanted, MADV_HUGEPAGE); /* a wish: the kernel may be without */
#endif
    *reservation = (pp_reservation){.base = base, .bytes = bytes, .mapped = wanted};
    return PP_OK;
}

void pp_unreserve(pp_reservation *reservation) {
    if (reservation->mapped)
        munmap(reservation->base, reservation->mapped);
    else
        free(reservation->base);
    *reservation = (pp_reservation){0};
}

size_t pp_granule(const pp_reservation *reservation) {
    return reservation->mapped >= HUGE_PAGE ? HUGE_PAGE : SYSTEM_PAGE;
}

size_t pp_discard(unsigned char *start, size_t bytes) { return madvise(start, bytes, MADV_DONTNEED) ? 0 : bytes; }
