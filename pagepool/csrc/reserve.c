/* reserve.c: see reserve.h. */
#define _GNU_SOURCE
#include "reserve.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"

#define ALIGNMENT 64
#define SMALL ((size_t)1 << 17) /* below this size a cleared heap block is cheaper than a mapping */

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
    if (bytes > PTRDIFF_MAX - 2 * PP_OS_HUGE_PAGE) return PP_NO_MEMORY;
    size_t mapped = ((bytes ? bytes : 1) + PP_OS_PAGE - 1) / PP_OS_PAGE * PP_OS_PAGE;
    unsigned char *base = pp_os_reserve(mapped, huge);
    if (!base) return PP_NO_MEMORY;
    *reservation = (pp_reservation){.base = base, .bytes = bytes, .mapped = mapped};
    return PP_OK;
}

void pp_unreserve(pp_reservation *reservation) {
    if (reservation->mapped)
        pp_os_release(reservation->base, reservation->mapped);
    else
        free(reservation->base);
    *reservation = (pp_reservation){0};
}

size_t pp_granule(const pp_reservation *reservation) {
    return reservation->mapped >= PP_OS_HUGE_PAGE ? PP_OS_HUGE_PAGE : PP_OS_PAGE;
}

size_t pp_discard(unsigned char *start, size_t bytes) { return pp_os_decommit(start, bytes) ? bytes : 0; }
