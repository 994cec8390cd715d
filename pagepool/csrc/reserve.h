/* reserve.h: zeroed memory that is reserved as address space and committed page by page, when it is first touched. */
#ifndef PP_RESERVE_H
#define PP_RESERVE_H

#include <stddef.h>

#include "pagepool/status.h"

typedef struct pp_reservation {
    unsigned char *base;
    size_t bytes;  /* as asked for */
    size_t mapped; /* of the mapping that starts at base; 0: base is from the C allocator */
} pp_reservation;

/* `bytes` of zeros, at least 64-byte aligned; never NULL, not even for 0 bytes.  With `huge` the base is 2 MiB aligned
 * and huge pages are asked for.  PP_NO_MEMORY when the system has no room; *reservation is then untouched. */
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
