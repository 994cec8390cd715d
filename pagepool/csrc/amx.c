/* amx.c: see amx.h. */
#include "amx.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdatomic.h>

#include "os/os.h"

/* Whether the CPU has AMX with bf16 and bytes, and the system saves the state of tiles. */
static int has_amx(void) {
    enum { STATE = 3 << 17 }; /* of XCR0: configuration and data of tiles */
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0; /* OSXSAVE */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & STATE) != STATE || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1); /* bits AMX-BF16, AMX-TILE and AMX-INT8 */
}

int pp_amx_state(void) {
    static _Atomic int known; /* the state plus 1; threads that race here may ask twice */
    int state = atomic_load_explicit(&known, memory_order_relaxed) - 1;
    if (state < 0) {
        state = !has_amx() ? PP_AMX_MISSING : pp_os_permits_tiles() ? PP_AMX_PERMITTED : PP_AMX_REFUSED;
        atomic_store_explicit(&known, state + 1, memory_order_relaxed);
    }
    return state;
}
#else
int pp_amx_state(void) { return PP_AMX_MISSING; }
#endif
