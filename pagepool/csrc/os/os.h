/* os.h: memory and threads of the operating system.  One source file for each system implements it (linux.c); no
 * other file includes a header that only one system has. */
#ifndef PP_OS_H
#define PP_OS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Memory.  Sizes are multiples of PP_OS_PAGE. */

#define PP_OS_PAGE ((size_t)1 << 16)     /* the largest page of a system; aarch64 has it */
#define PP_OS_HUGE_PAGE ((size_t)2 << 20)

/* Reserves `bytes` of address space, aligned to PP_OS_PAGE or, with `huge`, to PP_OS_HUGE_PAGE.  It reads as zeros, and
 * memory is committed page by page when it is first written.  With `huge` the system is asked to commit huge pages.
 * Returns NULL if the system refuses. */
void *pp_os_reserve(size_t bytes, int huge);

/* Releases a reservation: its address space and its memory. */
void pp_os_release(void *base, size_t bytes);

/* Releases the memory of a part of a reservation and keeps the address space.  The part reads as zeros and is committed
 * again when it is written.  Returns 0 if the system refuses; the memory is unchanged then. */
int pp_os_decommit(void *start, size_t bytes);

/* Files in memory that processes share.  Functions that return int return 0 or an errno, and change nothing then. */

/* Maps the first `bytes` of a file, aligned to PP_OS_HUGE_PAGE, and asks the system for huge pages. */
int pp_os_map_file(int fd, size_t bytes, unsigned char **base);

/* Replaces a mapping by private zeros: the process does not see the file any more. */
void pp_os_hide_file(void *base, size_t bytes);

/* Allocates the memory of a part of a file, so that a later access cannot run out of it, and releases it again. */
int pp_os_commit_file(int fd, int64_t offset, int64_t bytes);
int pp_os_punch_file(int fd, int64_t offset, int64_t bytes);

/* Opens the file of a descriptor again.  Locks of the new descriptor are its own.  Returns -1 and sets errno. */
int pp_os_reopen(int fd);

/* Locks one byte of a file, for the open file that `fd` refers to.  The system releases the lock when the last copy of
 * the descriptor is closed, at the latest when the process ends.  Returns 0 if another open file has the lock. */
int pp_os_lock_byte(int fd, int64_t byte);
void pp_os_unlock_byte(int fd, int64_t byte);

/* Whether another open file has a lock on the byte.  The descriptor may be read-only. */
int pp_os_is_byte_locked(int fd, int64_t byte);

/* When a process began, in units of the system's; 0 if it does not exist or has ended. */
uint64_t pp_os_process_start(int64_t pid);

/* Identifies the table of processes in which this process has its pid. */
uint64_t pp_os_process_table(void);

/* Threads. */

/* Sleeps while *word equals `seen`, until pp_os_wake is called for it.  May return earlier, so the caller must check
 * again. */
void pp_os_wait(_Atomic uint32_t *word, uint32_t seen);

/* Wakes at most `count` threads that wait for `word`. */
void pp_os_wake(_Atomic uint32_t *word, int count);

/* Requests permission to use AMX tiles, once for all threads and children of the process.  Returns 0 if the system
 * refuses.  Linux refuses if the alternate signal stack of a thread is too small for the tile state.  After a grant it
 * refuses to install such stacks. */
int pp_os_permits_tiles(void);

/* A clock in ns that is never set back, and a sleep of at least so many ns unless a signal ends it. */
int64_t pp_os_clock(void);
void pp_os_sleep(int64_t nanoseconds);

/* Lets another thread run on this CPU. */
void pp_os_yield(void);

/* The number of the CPU that the calling thread runs on, or -1. */
int pp_os_current_cpu(void);

/* The number of CPUs that the calling thread may use, at least 1. */
int pp_os_num_cpus(void);

/* Moves the calling thread from `cpu` to another CPU that it may use.  Its affinity is unchanged afterwards, but the
 * system wakes it on the new CPU unless other threads wait there.  Returns 0 if the thread may use only `cpu`. */
int pp_os_leave_cpu(int cpu);

#if defined(__aarch64__)
/* Whether the CPU has dot products of 8-bit integers. */
int pp_os_cpu_has_dotprod(void);
#endif

#endif
