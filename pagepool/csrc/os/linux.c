/* linux.c: os.h for Linux. */
#define _GNU_SOURCE
#include "os.h"

#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

enum { CPU_SETS = 8 }; /* of 1,024 CPUs each */

void *pp_os_reserve(size_t bytes, int huge) {
    /* A mapping is aligned to a page of the system.  Nothing needs more than that unless it is huge. */
    const size_t alignment = huge ? PP_OS_HUGE_PAGE : 1, mapped = huge ? bytes + PP_OS_HUGE_PAGE : bytes;
    unsigned char *start =
        mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    unsigned char *base = (unsigned char *)(((uintptr_t)start + alignment - 1) / alignment * alignment);
    /* Unmap the parts before and after the aligned range.  If the system refuses, they stay reserved. */
    if (base > start) munmap(start, (size_t)(base - start));
    if (mapped - (size_t)(base - start) > bytes) munmap(base + bytes, mapped - (size_t)(base - start) - bytes);
#ifdef MADV_HUGEPAGE
    if (huge && bytes >= PP_OS_HUGE_PAGE) madvise(base, bytes, MADV_HUGEPAGE); /* kernels without it refuse */
#endif
    return base;
}

void pp_os_release(void *base, size_t bytes) { munmap(base, bytes); }

int pp_os_decommit(void *start, size_t bytes) { return madvise(start, bytes, MADV_DONTNEED) == 0; }

void pp_os_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, seen, NULL, NULL, 0);
}

void pp_os_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, count, NULL, NULL, 0);
}

void pp_os_yield(void) { sched_yield(); }

int pp_os_current_cpu(void) { return sched_getcpu(); }

int pp_os_num_cpus(void) {
    cpu_set_t set[CPU_SETS];
    /* The system call returns how many bytes the kernel has filled in; glibc's function does not say. */
    const long bytes = syscall(SYS_sched_getaffinity, 0, sizeof set, set);
    const int count = bytes < 1 ? 0 : CPU_COUNT_S((size_t)bytes, set);
    return count < 1 ? 1 : count;
}

int pp_os_leave_cpu(int cpu) {
    cpu_set_t all[CPU_SETS], others[CPU_SETS];
    if (cpu < 0 || sched_getaffinity(0, sizeof all, all)) return 0;
    memcpy(others, all, sizeof all);
    CPU_CLR_S(cpu, sizeof others, others);
    if (!CPU_COUNT_S(sizeof others, others) || sched_setaffinity(0, sizeof others, others)) return 0;
    sched_setaffinity(0, sizeof all, all);
    return 1;
}

#if defined(__x86_64__)
int pp_os_permits_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM; the component of XCR0 */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

#if defined(__aarch64__)
int pp_os_cpu_has_dotprod(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#endif
