/* pagepool/lock.h: a spin lock with one atomic exchange, which yields under contention and survives fork.
 *
 * For sections of a few dozen instructions, with or without the GIL.  Never take the GIL while holding the lock.  An
 * uncontended acquire and release costs about 5 ns.  fork() acquires all registered locks in the forking thread, so
 * that in parent and child each lock is free afterwards and the data that it guards is consistent. */
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
    int32_t readers; /* threads that read the guarded data without the lock; changed only with the lock held */
    int32_t writers; /* threads that wait until readers is 0: meanwhile no reader may enter */
    struct pp_lock *next, *previous; /* the registry */
} pp_lock;

/* Acquires a lock that another thread holds: spins, then yields the processor between attempts. */
PP_API void pp_lock_wait(pp_lock *lock);

/* Acquires the lock if it is free; returns 1 on success. */
static inline int pp_lock_try(pp_lock *lock) { return !__atomic_exchange_n(&lock->held, 1, __ATOMIC_ACQUIRE); }

static inline void pp_lock_acquire(pp_lock *lock) {
    if (!pp_lock_try(lock)) pp_lock_wait(lock);
}

static inline void pp_lock_release(pp_lock *lock) { __atomic_store_n(&lock->held, 0, __ATOMIC_RELEASE); }

/* Initializes `lock` as free and registers it for fork.  PP_NO_MEMORY if the fork handlers cannot be installed; the
 * lock is then not registered.  Unregister it before its memory is freed. */
PP_API pp_status pp_lock_register(pp_lock *lock);
PP_API void pp_lock_unregister(pp_lock *lock);

/* Readers read the guarded data without the lock; only a writer may change that data.  A writer keeps new readers out,
 * waits for the current ones, and holds the lock from begin to end.  A forked child starts without readers. */
PP_API void pp_read_begin(pp_lock *lock);
PP_API void pp_read_end(pp_lock *lock);
PP_API void pp_write_begin(pp_lock *lock);
PP_API void pp_write_end(pp_lock *lock);

#ifdef __cplusplus
}
#endif
#endif
