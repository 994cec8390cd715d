/* pagepool/threads.h: a small persistent pool of worker threads, and the CPUs that this process may use.
 *
 * Workers are made on first need, spin for at most 50 us when they run out of work and then sleep.  The pool survives
 * fork (the child starts its own workers on first need) and never runs anything but the ranges that it is given. */
#ifndef PAGEPOOL_THREADS_H
#define PAGEPOOL_THREADS_H

#include <stdint.h>

#include "pagepool/version.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PP_MAX_THREADS 256

/* Runs body(context, begin, end) over disjoint ranges that cover [0, num_units), on the caller and up to
 * num_threads - 1 workers, and returns when all of it is done.  Ranges are handed out as threads become free.  When
 * another caller has the workers, or none could be started, the calling thread does all of it.  num_threads is cut to
 * 1 .. PP_MAX_THREADS. */
PP_API void pp_parallel_for(int num_threads, int64_t num_units, void (*body)(void *context, int64_t begin, int64_t end),
                            void *context);

/* The number of CPUs in the calling thread's affinity mask, or the environment's PAGEPOOL_NUM_THREADS, which is read at
 * each call; anything but a number from 1 to PP_MAX_THREADS is ignored there, and pp_num_threads_forced_unusable() is 1
 * then. */
PP_API int pp_default_num_threads(void);
PP_API int pp_num_threads_forced_unusable(void);

/* Waits until every worker sleeps: for measurements that want the cores to themselves. */
PP_API void pp_threads_quiesce(void);

#ifdef __cplusplus
}
#endif
#endif
