/* prefetch.c: tests PAGEPOOL_PREFETCH, which sets the number of prefetches per line, and the measurement that selects
 * between the AVX-512 kernels.  Argument: the value of PAGEPOOL_PREFETCH, if it is set. */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pagepool/cpu.h"

#if defined(__x86_64__)
double pp_time_over_half(uint64_t (*whole)(void), uint64_t (*half)(void)); /* internal */

/* Times of a busy machine: most are too long, a few in between are undisturbed. */
static uint64_t busy(uint64_t cycles) {
    static unsigned calls;
    return ++calls % 7 ? cycles * 3 + calls : cycles;
}
static uint64_t fast(void) { return busy(1000); }
static uint64_t slow(void) { return busy(2000); }
#endif

int main(int argc, char **argv) {
    const char *asked = argc > 1 ? argv[1] : "";
    const int known = !strcmp(asked, "none") || !strcmp(asked, "once") || !strcmp(asked, "twice");
    if (argc > 1 ? setenv("PAGEPOOL_PREFETCH", asked, 1) : unsetenv("PAGEPOOL_PREFETCH")) return 1;
#if defined(__x86_64__)
    if (pp_time_over_half(slow, fast) != 2.0 || pp_time_over_half(fast, fast) != 1.0) return 1;
#endif
    if (pp_prefetch_forced_unknown() != (*asked && !known)) return 2;
    if (strcmp(pp_prefetch(), known ? asked : "twice")) return 3;
    if (setenv("PAGEPOOL_PREFETCH", "none", 1)) return 1;
    if (strcmp(pp_prefetch(), known ? asked : "twice")) return 4; /* the variable is read only once */
    printf("ok %s\n", pp_prefetch());
    return 0;
}
