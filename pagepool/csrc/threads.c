/* threads.c: the worker threads behind pp_parallel_for.
 *
 * Only one job runs at once.  `gate` says which job it is, whether the job still admits workers, and how many are
 * inside:
 *
 *   gate = job number << 32 | OPEN | workers inside
 *
 * A worker enters by adding 1 to an open gate and leaves by subtracting 1.  The caller also works on the job.  When no
 * unit is left, it closes the gate and waits until no worker is inside.  It does not wait for a worker that has not
 * entered by then (its core is busy): that worker finds the gate closed.  The fields of a job are therefore only read
 * between entering and leaving.
 *
 * A job of one layer may take 20 us, and waking a thread takes 2 to 60 us (most if a virtual CPU has halted).  A worker
 * that has left therefore spins for 50 us, because the job of the next layer may arrive in this time, and sleeps
 * afterwards.  It does not spin on the CPU of the caller, where it would delay the caller.
 *
 * The scheduler wakes a worker on the caller's CPU when the other CPUs are busy.  On virtual machines it does so even
 * when they are idle: KVM reports a halted CPU as preempted, and Linux does not wake a thread on such a CPU.  A worker
 * that finds itself on the caller's CPU therefore moves to another CPU, and is woken there from then on.  If it had to
 * wait on that CPU, the CPU is busy.  The next jobs then wake no worker unless they take long, because two context
 * switches cost 8 us and gain nothing. */
#define _GNU_SOURCE
#include "pagepool/threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "os/os.h"
#include "relax.h"

#define OPEN ((uint64_t)1 << 31)
#define INSIDE(gate) ((gate) & (OPEN - 1))
#define NUMBER(gate) ((gate) >> 32)

enum { SPIN_NS = 50000, PAUSES_PER_LOOK = 64, PAUSES_AT_END = 256, STACK_BYTES = 1 << 20, LINE = 64 };
enum { ALONE_NS = 100000, JOBS_ALONE = 16 }; /* if crowded: delay of waking workers; one in 16 jobs has none */
enum { LATE_NS = 1000000 };                  /* a worker that is this late was waiting for its CPU */

typedef struct job {
    void (*body)(void *context, int64_t begin, int64_t end);
    void *context;
    int64_t num_units;
    int num_threads;
    _Atomic int64_t next;
    _Atomic int num_inside; /* threads of a team of `fork_join` that have begun */
} job;

/* The data that spinning workers read, the data that sleeping workers wait for, and the data that all threads write
 * while they work are in separate cache lines. */
static struct {
    pthread_mutex_t caller;  /* held by the thread that owns the current job */
    int num_workers;         /* started so far; only the holder of `caller` changes it */
    _Alignas(LINE) _Atomic uint64_t gate;
    _Atomic int caller_cpu;  /* CPU of the caller of the last job */
    _Atomic int64_t rung_at; /* when workers were last woken */
    _Atomic int crowded;     /* the last woken worker was late, or cannot leave the caller's CPU */
    unsigned num_alone;      /* jobs started while crowded; guarded by `caller` */
    _Alignas(LINE) _Atomic uint32_t bell; /* changed at each job; sleeping workers wait for it */
    _Atomic int num_sleeping;
    _Alignas(LINE) job job;
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local pp_fork_join own_fork_join; /* of the calling thread; NULL: `pool` */
static _Thread_local unsigned own_team_size;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Takes the next range: at most 1 / `share` of the remaining units, but at least one.  Returns 0 if no unit remains. */
static int take(job *job, int64_t share, int64_t *begin, int64_t *end) {
    *begin = atomic_load_explicit(&job->next, memory_order_relaxed);
    do {
        const int64_t left = job->num_units - *begin, part = left / share;
        if (left <= 0) return 0;
        *end = *begin + (part > 1 ? part : 1);
    } while (!atomic_compare_exchange_weak_explicit(&job->next, begin, *end, memory_order_relaxed,
                                                    memory_order_relaxed));
    return 1;
}

/* Takes ranges until no unit is left.  Ranges are large at first and single units at the end, so that all threads
 * finish at about the same time. */
static void work(job *job) {
    int64_t begin, end;
    while (take(job, 4 * (int64_t)job->num_threads, &begin, &end)) job->body(job->context, begin, end);
}

/* Takes single units for a limited time.  Returns 1 if units are left. */
static int work_alone(job *job) {
    const int64_t until = now_ns() + ALONE_NS;
    int64_t begin, end;
    while (take(job, job->num_units, &begin, &end)) {
        job->body(job->context, begin, end);
        if (now_ns() >= until) return 1;
    }
    return 0;
}

/* Waits until the gate has another job number than `seen`, and returns the gate.  Spins at first, then sleeps. */
static uint64_t await_job(uint64_t seen) {
    int64_t until = now_ns() + SPIN_NS;
    uint64_t gate;
    do
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            gate = atomic_load_explicit(&pool.gate, memory_order_acquire);
            if (NUMBER(gate) != seen) return gate;
            pp_relax();
        }
    while (pp_os_current_cpu() != atomic_load_explicit(&pool.caller_cpu, memory_order_relaxed) && now_ns() < until);
    /* No wake-up is lost: the caller changes gate and bell and then checks for sleepers.  A worker first counts itself
     * as a sleeper and then checks bell and gate. */
    atomic_fetch_add(&pool.num_sleeping, 1);
    for (;;) {
        const uint32_t bell = atomic_load(&pool.bell);
        gate = atomic_load(&pool.gate);
        if (NUMBER(gate) != seen) break;
        pp_os_wait(&pool.bell, bell);
    }
    atomic_fetch_sub(&pool.num_sleeping, 1);
    const int cpu = atomic_load_explicit(&pool.caller_cpu, memory_order_relaxed);
    const int late = now_ns() - atomic_load_explicit(&pool.rung_at, memory_order_relaxed) > LATE_NS;
    const int crowded = late || (pp_os_current_cpu() == cpu && !pp_os_leave_cpu(cpu));
    atomic_store_explicit(&pool.crowded, crowded, memory_order_relaxed);
    return atomic_load_explicit(&pool.gate, memory_order_acquire);
}

static void *worker(void *unused) {
    (void)unused;
    uint64_t gate = 0;
    for (;;) {
        gate = await_job(NUMBER(gate));
        /* Entering an open gate pins the job: pool.job is not written again before this worker has left. */
        for (;;) {
            if (!(gate & OPEN)) break;
            if (atomic_compare_exchange_weak_explicit(&pool.gate, &gate, gate + 1, memory_order_acquire,
                                                      memory_order_acquire)) {
                if (INSIDE(gate) < (uint64_t)pool.job.num_threads - 1) work(&pool.job);
                atomic_fetch_sub_explicit(&pool.gate, 1, memory_order_release);
                break;
            }
        }
    }
    return NULL;
}

/* After a fork only the calling thread exists: the child starts without workers and without a job. */
static void forget_workers(void) {
    pthread_mutex_init(&pool.caller, NULL);
    pool.num_workers = 0;
    atomic_store(&pool.num_sleeping, 0);
    atomic_store(&pool.crowded, 0);
    atomic_store(&pool.gate, 0);
    own_fork_join = NULL;
}

static void register_fork(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void watch_forks(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork);
}

void pp_use_fork_join(pp_fork_join fork_join, int team_size) {
    watch_forks();
    own_fork_join = fork_join;
    own_team_size = (unsigned)team_size;
}

static void work_in_team(void *shared) {
    job *job = shared;
    if (atomic_fetch_add_explicit(&job->num_inside, 1, memory_order_relaxed) < job->num_threads) work(job);
}

/* Starts workers until there are `wanted`, or as many as the system allows.  They block all signals. */
static void start_workers(int wanted) {
    pthread_attr_t attributes;
    sigset_t all, before;
    watch_forks();
    if (pool.num_workers >= wanted || pthread_attr_init(&attributes)) return;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (pool.num_workers < wanted && !pthread_create(&thread, &attributes, worker, NULL)) pool.num_workers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

void pp_parallel_for(int num_threads, int64_t num_units, void (*body)(void *context, int64_t begin, int64_t end),
                     void *context) {
    if (num_threads > PP_MAX_THREADS) num_threads = PP_MAX_THREADS;
    if (num_threads > num_units) num_threads = (int)num_units;
    if (own_fork_join && num_threads > 1) {
        job shared = {body, context, num_units, num_threads, 0, 0};
        own_fork_join(work_in_team, &shared, own_team_size, 0);
        return;
    }
    if (num_threads < 2 || pthread_mutex_trylock(&pool.caller)) {
        if (num_units > 0) body(context, 0, num_units);
        return;
    }
    start_workers(num_threads - 1);
    pool.job.body = body;
    pool.job.context = context;
    pool.job.num_units = num_units;
    pool.job.num_threads = num_threads;
    atomic_store_explicit(&pool.job.next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.caller_cpu, pp_os_current_cpu(), memory_order_relaxed);
    uint64_t number = NUMBER(atomic_load_explicit(&pool.gate, memory_order_relaxed)) + 1;
    atomic_store(&pool.gate, (number & 0xffffffffu) << 32 | OPEN);
    atomic_fetch_add(&pool.bell, 1);
    const int sleeping = atomic_load(&pool.num_sleeping), missing = num_threads - 1 - (pool.num_workers - sleeping);
    if (missing > 0) {
        const int alone = atomic_load_explicit(&pool.crowded, memory_order_relaxed) && pool.num_alone++ % JOBS_ALONE;
        if (!alone || work_alone(&pool.job)) {
            atomic_store_explicit(&pool.rung_at, now_ns(), memory_order_relaxed);
            pp_os_wake(&pool.bell, missing);
        }
    }
    work(&pool.job);
    atomic_fetch_and_explicit(&pool.gate, ~OPEN, memory_order_relaxed);
    for (int pauses = 0; INSIDE(atomic_load_explicit(&pool.gate, memory_order_acquire)); pauses++)
        if (pauses < PAUSES_AT_END)
            pp_relax();
        else
            pp_os_yield(); /* the worker may be waiting for this CPU */
    pthread_mutex_unlock(&pool.caller);
}

/* The value of PAGEPOOL_NUM_THREADS: 0 if it is unset or empty, -1 if it is not a valid number of threads. */
static int asked_num_threads(void) {
    const char *text = getenv("PAGEPOOL_NUM_THREADS");
    if (!text || !*text) return 0;
    char *end;
    const long asked = strtol(text, &end, 10);
    return !*end && asked >= 1 && asked <= PP_MAX_THREADS ? (int)asked : -1;
}

int pp_num_threads_forced_unusable(void) { return asked_num_threads() < 0; }

int pp_default_num_threads(void) {
    const int asked = asked_num_threads();
    if (asked > 0) return asked;
    const int cpus = pp_os_num_cpus();
    return cpus < PP_MAX_THREADS ? cpus : PP_MAX_THREADS;
}

void pp_threads_quiesce(void) {
    pthread_mutex_lock(&pool.caller);
    while (atomic_load(&pool.num_sleeping) < pool.num_workers) pp_os_yield();
    pthread_mutex_unlock(&pool.caller);
}
