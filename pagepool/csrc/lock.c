/* lock.c: waiting, readers and writers, and the registry that keeps locks usable after fork. */
#include "pagepool/lock.h"

#include <pthread.h>
#include <stddef.h>

#include "os/os.h"
#include "relax.h"

#define SPINS 64 /* about 2 us of pauses before the first yield: longer than any critical section except checks */

void pp_lock_wait(pp_lock *lock) {
    int spins = 0;
    do {
        while (__atomic_load_n(&lock->held, __ATOMIC_RELAXED)) {
            if (++spins < SPINS)
                pp_relax();
            else
                pp_os_yield();
        }
    } while (__atomic_exchange_n(&lock->held, 1, __ATOMIC_ACQUIRE));
}

/* A doubly linked list through the locks themselves, so that registering needs no memory and cannot fail. */
static pp_lock registry = {0, 0, 0, &registry, &registry};
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int handlers_failed;

/* Lock order: the lock of the registry comes first. A thread that holds a registered lock never acquires the lock of
 * the registry. */
static void before_fork(void) {
    pp_lock_acquire(&registry);
    for (pp_lock *lock = registry.next; lock != &registry; lock = lock->next) pp_lock_acquire(lock);
}

static void after_fork_in_parent(void) {
    for (pp_lock *lock = registry.next; lock != &registry; lock = lock->next) pp_lock_release(lock);
    pp_lock_release(&registry);
}

/* The child has only the thread that forked. The readers and writers of other threads do not exist there. */
static void after_fork_in_child(void) {
    for (pp_lock *lock = registry.next; lock != &registry; lock = lock->next) lock->readers = lock->writers = 0;
    after_fork_in_parent();
}

static void install_handlers(void) {
    handlers_failed = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

pp_status pp_lock_register(pp_lock *lock) {
    if (pthread_once(&once, install_handlers) || handlers_failed) return PP_NO_MEMORY;
    *lock = (pp_lock){.next = &registry};
    pp_lock_acquire(&registry);
    lock->previous = registry.previous;
    lock->previous->next = lock;
    registry.previous = lock;
    pp_lock_release(&registry);
    return PP_OK;
}

void pp_lock_unregister(pp_lock *lock) {
    pp_lock_acquire(&registry);
    lock->previous->next = lock->next;
    lock->next->previous = lock->previous;
    pp_lock_release(&registry);
}

void pp_read_begin(pp_lock *lock) {
    pp_lock_acquire(lock);
    while (lock->writers) {
        pp_lock_release(lock);
        pp_os_yield();
        pp_lock_acquire(lock);
    }
    lock->readers++;
    pp_lock_release(lock);
}

void pp_read_end(pp_lock *lock) {
    pp_lock_acquire(lock);
    lock->readers--;
    pp_lock_release(lock);
}

void pp_write_begin(pp_lock *lock) {
    pp_lock_acquire(lock);
    lock->writers++;
    while (lock->readers) {
        pp_lock_release(lock);
        pp_os_yield();
        pp_lock_acquire(lock);
    }
}

void pp_write_end(pp_lock *lock) {
    lock->writers--;
    pp_lock_release(lock);
}
