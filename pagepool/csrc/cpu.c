/* cpu.c: selects the instruction set once. On x86 the selection uses the features of the CPU (CPUID) and the registers
 * that the operating system saves (XCR0). On AArch64 the auxiliary vector reports both. */
#include "pagepool/cpu.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "amx.h"
#include "kernels.h"
#include "os/os.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>

static unsigned long long xcr0(void) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (unsigned long long)high << 32 | low;
}

static int runs_avx2(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    int osxsave = c >> 27 & 1, avx = c >> 28 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
    if (!osxsave || !avx || !fma || !f16c || (xcr0() & 0x6) != 0x6) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 5 & 1);
}

static int runs_avx512(void) {
    unsigned a, b, c, d;
    if (!runs_avx2() || (xcr0() & 0xe6) != 0xe6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    int f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    return f && dq && bw && vl;
}

/* The kernels of AMX also use AVX512_BF16, and every CPU with it has AVX512_VNNI. */
static int runs_avx512_bf16(void) {
    unsigned a, b, c, d;
    if (!runs_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || a < 1) return 0; /* a: the last subleaf */
    const int vnni = c >> 11 & 1;
    return vnni && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

static int runs_amx(void) {
    return runs_avx512_bf16() && (pp_tiles_amx_portable || pp_amx_state() == PP_AMX_PERMITTED);
}
static int suits_amx(void) { return !pp_tiles_amx_portable; }

static int runs_vnni(void) {
    static _Atomic int known; /* the answer plus 1; CPUID is slow under a hypervisor */
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (!answer) {
        unsigned a, b, c, d;
        answer = 1 + (runs_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1));
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer - 1;
}

/* Cycles for 640 fused multiply-adds in registers with this name. 10 chains hide the latency of two units. */
#define FMA_CYCLES(r) \
    static uint64_t cycles_of_##r(void) { \
        int rounds = 64; \
        const uint64_t begin = __rdtsc(); \
        __asm__ volatile("vzeroall\n1:\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "0\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "1\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "2\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "3\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "4\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "5\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "6\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "7\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "8\n\t" \
                         "vfmadd231ps %%" #r "10, %%" #r "10, %%" #r "9\n\t" \
                         "decl %0\n\tjnz 1b\n\tvzeroall" \
                         : "+r"(rounds) \
                         : \
                         : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
                           "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"); \
        return __rdtsc() - begin; \
    }
FMA_CYCLES(ymm)
FMA_CYCLES(zmm)

double pp_time_over_half(uint64_t (*whole)(void), uint64_t (*half)(void)) {
    enum { ROUNDS = 256 }; /* less than 0.1 ms; some CPUs need the first 0.02 ms to power up their upper halves */
    uint64_t least_whole = UINT64_MAX, least_half = UINT64_MAX;
    for (int i = 0; i < ROUNDS; i++) {
        const uint64_t h = half(), w = whole();
        least_half = h < least_half ? h : least_half;
        least_whole = w < least_whole ? w : least_whole;
    }
    return (double)least_whole / (double)least_half;
}

/* Wide units take the same time for 512 bits as for 256. Narrow units take twice as long. */
static int is_wide(void) { return pp_time_over_half(cycles_of_zmm, cycles_of_ymm) < 1.5; }
#endif

static int always(void) { return 1; }

/* Best first.  A test can force any entry that this CPU can run, even if another one is faster. */
static const struct {
    const pp_kernels *kernels;
    int (*runs)(void);
    int (*suits)(void);
} CANDIDATES[] = {
#if defined(__x86_64__)
    {&pp_kernels_amx, runs_amx, suits_amx},
    {&pp_kernels_avx512_wide, runs_avx512, is_wide},
    {&pp_kernels_avx512, runs_avx512, always},
    {&pp_kernels_avx2, runs_avx2, always},
#elif defined(__aarch64__)
    {&pp_kernels_neon_dotprod, pp_os_cpu_has_dotprod, always},
    {&pp_kernels_neon, always, always},
#endif
    {&pp_kernels_baseline, always, always},
};
enum { NUM_CANDIDATES = sizeof CANDIDATES / sizeof CANDIDATES[0] };

/* Returns NULL if the name is unknown or this CPU cannot run the kernels. */
static const pp_kernels *by_name(const char *name) {
    for (int i = 0; i < NUM_CANDIDATES; i++)
        if (!strcmp(CANDIDATES[i].kernels->name, name)) return CANDIDATES[i].runs() ? CANDIDATES[i].kernels : NULL;
    return NULL;
}

static const pp_kernels *best(void) {
    int i = 0;
    while (!CANDIDATES[i].runs() || !CANDIDATES[i].suits()) i++;
    return CANDIDATES[i].kernels;
}

const pp_kernels *pp_kernels_get(void) {
    static _Atomic(const pp_kernels *) chosen;
    const pp_kernels *kernels = atomic_load_explicit(&chosen, memory_order_acquire);
    if (!kernels) {
        const char *name = getenv("PAGEPOOL_ISA");
        const pp_kernels *found = name && *name ? by_name(name) : NULL, *none = NULL;
        found = found ? found : best();
        /* Threads that race here agree on the first one stored, so no two calls ever differ. */
        kernels = atomic_compare_exchange_strong(&chosen, &none, found) ? found : none;
    }
    return kernels;
}

const pp_kernels *pp_kernels_quantised(const pp_kernels *kernels) {
#if defined(__x86_64__)
    const int needs_vnni = kernels == &pp_kernels_avx512 || kernels == &pp_kernels_avx512_wide;
    if (needs_vnni && !runs_vnni()) return &pp_kernels_avx2;
#endif
    return kernels;
}

const char *pp_isa(void) { return pp_kernels_get()->name; }

int pp_isa_forced_unavailable(void) {
    const char *name = getenv("PAGEPOOL_ISA");
    return name && *name && !by_name(name);
}

int pp_tiles_refused(void) {
#if defined(__x86_64__)
    return !pp_tiles_amx_portable && runs_avx512_bf16() && pp_amx_state() == PP_AMX_REFUSED;
#else
    return 0;
#endif
}

const char *pp_isa_available(int i) {
    for (int j = 0; j < NUM_CANDIDATES; j++)
        if (CANDIDATES[j].runs() && i-- == 0) return CANDIDATES[j].kernels->name;
    return NULL;
}
