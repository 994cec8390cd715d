/* pagepool/threads.h: a small persistent pool of worker threads, and the CPUs that this process may use.
 *
 * Workers start on first use.  A worker without work spins for at most 50 us and then sleeps.  The pool survives fork:
 * the child starts its own workers on first use.  Workers run only the ranges of pp_parallel_for. */
#ifndef PAGEPOOL_THREADS_H
#define PAGEPOOL_THREADS_H

#include <stdint.h>

#include "pagepool/version.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PP_MAX_THREADS 256

/* Runs body(context, begin, end) over disjoint ranges that cover [0, num_units), on the calling thread and up to
 * num_threads - 1 workers.  Returns when all ranges are done.  Ranges are assigned as threads become free.  If another
 * caller uses the workers, or none could be started, the calling thread runs all ranges.  num_threads is clamped to
 * 1 .. PP_MAX_THREADS. */
PP_API void pp_parallel_for(int num_threads, int64_t num_units, void (*body)(void *context, int64_t begin, int64_t end),
                            void *context);

/* Runs task(argument) in num_threads threads, the calling thread included, and returns when all calls have returned.
 * GOMP_parallel of GNU's libgomp is such a function. */
typedef void (*pp_fork_join)(void (*task)(void *argument), void *argument, unsigned num_threads, unsigned flags);

/* From now on, pp_parallel_for in the calling thread runs ranges by fork_join in place of the workers.  NULL: by the
 * workers again.  It asks for team_size threads each time, because libgomp ends and starts threads when the size
 * changes, and uses num_threads of them.  The child of a fork begins with NULL.
 *
 * For a thread that also runs loops of OpenMP: OpenMP's threads spin between two loops and compete with the workers. */
PP_API void pp_use_fork_join(pp_fork_join fork_join, int team_size);

/* The value of the environment variable PAGEPOOL_NUM_THREADS, read at each call; without it, the number of CPUs in the
 * calling thread's affinity mask.  A value that is not a number from 1 to PP_MAX_THREADS is ignored, and
 * pp_num_threads_forced_unusable() returns 1. */
PP_API int pp_default_num_threads(void);
PP_API int pp_num_threads_forced_unusable(void);

/* Waits until every worker sleeps, for measurements that need idle cores. */
PP_API void pp_threads_quiesce(void);

#ifdef __cplusplus
}
#endif
#endif
