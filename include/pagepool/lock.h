/* pagepool/lock.h: a spin lock of one atomic exchange that yields and survives fork.
 *
 * For sections of a few dozen instructions, also without the GIL; never take the GIL while it is held.  Taking and
 * leaving an uncontended one costs about 5 ns.  A registered lock is held by the thread that forks while it forks, so
 * that parent and child both find it free and what it guards whole. */
#ifndef PAGEPOOL_LOCK_H
#define PAGEPOOL_LOCK_H

#include <stdint.h>

#include "pagepool/status.h"
#include "pagepool/version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pp_lock {
    int32_t held;    /* 0 or 1; atomic */
    int32_t readers; /* threads that read, outside the lock, what it guards; changed only with the lock held */
    int32_t writers; /* threads that wait for readers to reach 0: no reader may enter meanwhile */
    struct pp_lock *next, *previous; /* the registry */
} pp_lock;

/* Waits for a lock that was found held: pauses, then gives up the processor between tries. */
PP_API void pp_lock_wait(pp_lock *lock);

/* Whether it was free, and is now the caller's. */
static inline int pp_lock_try(pp_lock *lock) { return !__atomic_exchange_n(&lock->held, 1, __ATOMIC_ACQUIRE); }

static inline void pp_lock_acquire(pp_lock *lock) {
    if (!pp_lock_try(lock)) pp_lock_wait(lock);
}

static inline void pp_lock_release(pp_lock *lock) { __atomic_store_n(&lock->held, 0, __ATOMIC_RELEASE); }

/* Makes `lock` a free lock that survives fork.  PP_NO_MEMORY when the fork handlers cannot be installed; then it is not
 * registered.  Unregister it before its memory goes. */
PP_API pp_status pp_lock_register(pp_lock *lock);
PP_API void pp_lock_unregister(pp_lock *lock);

/* Readers work outside the lock on what only a writer may change.  A writer waits for the readers that are in, keeps
 * new ones out, and holds the lock from begin to end.  In a forked child no reader is in. */
PP_API void pp_read_begin(pp_lock *lock);
PP_API void pp_read_end(pp_lock *lock);
PP_API void pp_write_begin(pp_lock *lock);
PP_API void pp_write_end(pp_lock *lock);

#ifdef __cplusplus
}
#endif
#endif
