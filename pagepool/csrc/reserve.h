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

/* Gives it back; a reservation of zeros is none. */
void pp_unreserve(pp_reservation *reservation);

/* The smallest piece that goes back to the system: where there is room for huge pages a whole one of them, since a part
 * would break it up for good. */
size_t pp_granule(const pp_reservation *reservation);

/* Gives `bytes` from `start` on, whole granules of a mapping, back to the system: they read as zeros from then on and
 * are committed again by touch.  Returns the bytes that went: 0 when the system refuses. */
size_t pp_discard(unsigned char *start, size_t bytes);

#endif
