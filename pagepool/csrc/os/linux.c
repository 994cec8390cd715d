/* linux.c: os.h for Linux. */
#define _GNU_SOURCE
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
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

int pp_os_map_file(int fd, size_t bytes, unsigned char **base) {
    /* Reserve first: mmap itself does not align to huge pages. */
    unsigned char *place = pp_os_reserve(bytes, 1);
    if (!place) return ENOMEM;
    if (mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        const int error = errno;
        munmap(place, bytes);
        return error;
    }
#ifdef MADV_HUGEPAGE
    madvise(place, bytes, MADV_HUGEPAGE);
#endif
    *base = place;
    return 0;
}

void pp_os_hide_file(void *base, size_t bytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(base, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) munmap(base, bytes);
}

static int allocate_file(int fd, int mode, int64_t offset, int64_t bytes) {
    /* Short calls: a signal makes the system undo and fail the whole call.  Their ends split no huge page. */
    const int64_t step = (int64_t)64 << 20, end = offset + bytes;
    for (int64_t next; offset < end; offset = next) {
        next = (offset / step + 1) * step;
        if (next > end) next = end;
        while (fallocate(fd, mode, offset, next - offset))
            if (errno != EINTR) return errno;
    }
    return 0;
}

int pp_os_commit_file(int fd, int64_t offset, int64_t bytes) {
#if defined(MADV_POPULATE_WRITE) && defined(MADV_HUGEPAGE)
    /* fallocate has no advice about huge pages.  Where the system gives them only on advice, touching pages through an
     * advised mapping gets them.  If that fails, so does fallocate, which also says why. */
    unsigned char *base = NULL;
    if (!pp_os_map_file(fd, (size_t)(offset + bytes), &base)) {
        const size_t begin = (size_t)offset / PP_OS_PAGE * PP_OS_PAGE;
        madvise(base + begin, (size_t)(offset + bytes) - begin, MADV_POPULATE_WRITE);
        munmap(base, (size_t)(offset + bytes));
    }
#endif
    return allocate_file(fd, FALLOC_FL_KEEP_SIZE, offset, bytes);
}

int pp_os_punch_file(int fd, int64_t offset, int64_t bytes) {
    return allocate_file(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, offset, bytes);
}

int pp_os_reopen(int fd) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

static int change_lock(int fd, int64_t byte, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int failed;
    do failed = fcntl(fd, F_OFD_SETLK, &lock);
    while (failed && errno == EINTR);
    return !failed;
}

int pp_os_lock_byte(int fd, int64_t byte) { return change_lock(fd, byte, F_WRLCK); }

void pp_os_unlock_byte(int fd, int64_t byte) { change_lock(fd, byte, F_UNLCK); }

int pp_os_is_byte_locked(int fd, int64_t byte) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    return !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;
}

uint64_t pp_os_process_start(int64_t pid) {
    enum { STATE = 3, START = 22 }; /* numbers of fields in proc(5) */
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    const ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    text[size > 0 ? size : 0] = 0;
    char *field = strrchr(text, ')'); /* the last one: the name of the process ends here, and may contain any text */
    if (!field) return 0;
    uint64_t start = 0;
    for (int number = STATE; number <= START && field; number++) {
        field = strchr(field, ' ');
        if (field) field++;
        if (field && number == STATE && (*field == 'Z' || *field == 'X')) return 0;
    }
    for (; field && *field >= '0' && *field <= '9'; field++) start = start * 10 + (uint64_t)(*field - '0');
    return start + 1;
}

uint64_t pp_os_process_table(void) {
    struct stat status;
    return stat("/proc/self/ns/pid", &status) ? 0 : (uint64_t)status.st_ino;
}

void pp_os_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, seen, NULL, NULL, 0);
}

void pp_os_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, count, NULL, NULL, 0);
}

int64_t pp_os_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void pp_os_sleep(int64_t nanoseconds) {
    const struct timespec time = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    nanosleep(&time, NULL);
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
