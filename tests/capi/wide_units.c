/* wide_units.c: tests the measurement that selects between the AVX-512 kernels. */
#include <stdint.h>
#include <stdio.h>

double pp_time_over_half(uint64_t (*whole)(void), uint64_t (*half)(void)); /* internal */

/* Times of a busy machine: most are too long, a few in between are undisturbed. */
static uint64_t busy(uint64_t cycles) {
    static unsigned calls;
    return ++calls % 7 ? cycles * 3 + calls : cycles;
}
static uint64_t fast(void) { return busy(1000); }
static uint64_t slow(void) { return busy(2000); }

int main(void) {
    if (pp_time_over_half(slow, fast) != 2.0 || pp_time_over_half(fast, fast) != 1.0) return 1;
    printf("ok\n");
    return 0;
}
