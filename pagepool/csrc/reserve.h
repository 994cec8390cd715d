/* reserve.h: zeroed memory.  Its address space is reserved, and pages are committed when they are first touched. */
#ifndef PP_RESERVE_H
#define PP_RESERVE_H

#include <stddef.h>

#include "pagepool/status.h"

typedef struct pp_reservation {
    unsigned char *base;
    size_t bytes;  /* requested size */
    size_t mapped; /* size of the mapping at base; 0: base is from the C allocator */
} pp_reservation;

/* Reserves `bytes` of zeros, at least 64-byte aligned.  The base is never NULL, even for 0 bytes.  With `huge` the base
 * is 2 MiB aligned and huge pages are requested.  Returns PP_NO_MEMORY, with *reservation unchanged, if the system has
 * no room. */
pp_status pp_reserve(pp_reservation *reservation, size_t bytes, int huge);

/* Frees the memory and zeroes the struct.  Does nothing if the struct is already zero. */
void pp_unreserve(pp_reservation *reservation);

/* The smallest unit that is returned to the system.  If the reservation has room for huge pages, it is one huge page,
 * because returning a part would split the huge page permanently. */
size_t pp_granule(const pp_reservation *reservation);

/* Returns `bytes` from `start` on, whole granules of a mapping, to the system.  They read as zeros afterwards and are
 * committed again at the first access.  Returns the number of bytes released: 0 if the system refuses. */
size_t pp_discard(unsigned char *start, size_t bytes);

#endif
