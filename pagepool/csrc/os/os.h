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
