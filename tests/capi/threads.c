/* threads.c: pp_parallel_for runs every unit exactly once: with workers that spin, sleep or are starting, with fewer
 * CPUs than threads, from several concurrent callers, from within itself, in the child of a fork, and on the threads
 * of another library.
 *
 * Argument: rounds (default 200). */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "pagepool/threads.h"

enum { MOST_UNITS = 100, CALLERS = 4 };

typedef struct job {
    int64_t num_units;
    int ns_per_unit, nested;
    atomic_int runs[MOST_UNITS];
} job;

static int rounds = 200;

static void wait_ns(int64_t ns) {
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - begin.tv_sec) * (int64_t)1000000000 + now.tv_nsec - begin.tv_nsec < ns);
}

static void check_job(int num_threads, int64_t num_units, int ns_per_unit, int nested);

static void body(void *context, int64_t begin, int64_t end) {
    job *job = context;
    CHECK(0 <= begin && begin < end && end <= job->num_units);
    for (int64_t unit = begin; unit < end; unit++) {
        atomic_fetch_add(&job->runs[unit], 1);
        if (job->ns_per_unit) wait_ns(job->ns_per_unit);
    }
    if (job->nested) check_job(3, 5, 0, 0);
}

static void check_job(int num_threads, int64_t num_units, int ns_per_unit, int nested) {
    job job = {.num_units = num_units, .ns_per_unit = ns_per_unit, .nested = nested};
    pp_parallel_for(num_threads, num_units, body, &job);
    for (int64_t unit = 0; unit < MOST_UNITS; unit++) CHECK(atomic_load(&job.runs[unit]) == (unit < num_units));
}

static void check_all_kinds(void) {
    static const int64_t counts[] = {0, 1, 2, 3, 7, MOST_UNITS};
    static const int threads[] = {-1, 0, 1, 2, 3, 9};
    for (int round = 0; round < rounds; round++) {
        const int kind = round % 36;
        check_job(threads[kind / 6], counts[kind % 6], round % 5 == 0 ? 2000 : 0, round % 7 == 0);
        if (round % 3 == 1) wait_ns(30000);                                     /* they spin */
        if (round % 11 == 2) nanosleep(&(struct timespec){0, 200000}, NULL);    /* they sleep */
    }
}

static void *caller(void *unused) {
    check_all_kinds();
    return unused;
}

static void check_fork(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        check_all_kinds();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* PAGEPOOL_NUM_THREADS is read at each call.  An invalid value is ignored and reported. */
static void check_environment(void) {
    const char *before = getenv("PAGEPOOL_NUM_THREADS");
    char *kept = before ? strdup(before) : NULL;
    CHECK(unsetenv("PAGEPOOL_NUM_THREADS") == 0 && !pp_num_threads_forced_unusable());
    const int cpus = pp_default_num_threads();
    static const char *const numbers[] = {"1", "7", "256"}, *const nonsense[] = {"0", "-1", "257", "two", "2 ", "2.5",
                                                                               "99999999999999999999"};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        CHECK(setenv("PAGEPOOL_NUM_THREADS", numbers[i], 1) == 0);
        CHECK(!pp_num_threads_forced_unusable() && pp_default_num_threads() == atoi(numbers[i]));
    }
    for (size_t i = 0; i < sizeof nonsense / sizeof *nonsense; i++) {
        CHECK(setenv("PAGEPOOL_NUM_THREADS", nonsense[i], 1) == 0);
        CHECK(pp_num_threads_forced_unusable() && pp_default_num_threads() == cpus);
    }
    CHECK(setenv("PAGEPOOL_NUM_THREADS", "", 1) == 0);
    CHECK(!pp_num_threads_forced_unusable() && pp_default_num_threads() == cpus);
    CHECK((kept ? setenv("PAGEPOOL_NUM_THREADS", kept, 1) : unsetenv("PAGEPOOL_NUM_THREADS")) == 0);
    free(kept);
}

/* More threads than CPUs: workers share the caller's CPU. */
static void check_one_cpu(void) {
    cpu_set_t before, one;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before)) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(getenv("PAGEPOOL_NUM_THREADS") || pp_default_num_threads() == 1);
    check_all_kinds();
    check_fork(); /* all workers of the child inherit the one CPU */
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
}

/* Workers move away from the caller's CPU and may return to it: each thread may use all CPUs of the process. */
static void check_masks(void) {
    cpu_set_t mask, own;
    CHECK(sched_getaffinity(0, sizeof mask, &mask) == 0);
    check_all_kinds();
    pp_threads_quiesce();
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    int found = 0;
    for (struct dirent *entry; (entry = readdir(tasks));) {
        const int task = atoi(entry->d_name);
        if (!task) continue;
        CHECK(sched_getaffinity(task, sizeof own, &own) == 0);
        CHECK(CPU_EQUAL(&own, &mask));
        found++;
    }
    closedir(tasks);
    CHECK(found > 1);
}

/* Forks and joins as libgomp does: a team has TEAM threads, and the calling thread is the first of them. */
enum { TEAM = 5 };

static _Thread_local int num_teams;

typedef struct {
    void (*task)(void *);
    void *argument;
} call;

static void *run_call(void *of_team) {
    const call *call = of_team;
    call->task(call->argument);
    return NULL;
}

static void run_team(void (*task)(void *), void *argument, unsigned num_threads, unsigned flags) {
    CHECK(num_threads == TEAM && flags == 0);
    num_teams++;
    call call = {task, argument};
    pthread_t threads[TEAM - 1];
    for (int i = 0; i < TEAM - 1; i++) CHECK(pthread_create(&threads[i], NULL, run_call, &call) == 0);
    task(argument);
    for (int i = 0; i < TEAM - 1; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void *without_team(void *unused) {
    check_job(4, 50, 0, 0);
    CHECK(num_teams == 0);
    return unused;
}

static atomic_int inside, most_inside;

static void count_inside(void *unused, int64_t begin, int64_t end) {
    (void)unused;
    const int now = atomic_fetch_add(&inside, 1) + 1;
    int most = atomic_load(&most_inside);
    while (most < now && !atomic_compare_exchange_weak(&most_inside, &most, now)) {}
    wait_ns(20000 * (end - begin));
    atomic_fetch_sub(&inside, 1);
}

static void check_team(void) {
    pp_use_fork_join(run_team, TEAM);
    for (int num_threads = 2; num_threads < 8; num_threads++) /* also more threads than the team has */
        for (int nested = 0; nested < 2; nested++) check_job(num_threads, 7, 2000, nested);
    /* A team for each of the 12 jobs, and one for each nested job that began in a range of the calling thread. */
    CHECK(num_teams >= 12);
    const int teams = num_teams;
    check_job(1, 7, 0, 0);
    check_job(4, 1, 0, 0);
    check_job(4, 0, 0, 0);
    CHECK(num_teams == teams); /* one thread or one unit needs no team */
    for (int num_threads = 2; num_threads <= TEAM; num_threads++) {
        atomic_store(&most_inside, 0);
        pp_parallel_for(num_threads, 200, count_inside, NULL);
        CHECK(atomic_load(&most_inside) <= num_threads);
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, without_team, NULL) == 0 && pthread_join(thread, NULL) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        num_teams = 0;
        without_team(NULL);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    pp_use_fork_join(NULL, 0);
    num_teams = 0;
    without_team(NULL);
}

int main(int argc, char **argv) {
    if (argc > 1) rounds = atoi(argv[1]);
    check_environment();
    check_masks();
    check_one_cpu();
    pthread_t threads[CALLERS];
    for (int i = 0; i < CALLERS; i++) CHECK(pthread_create(&threads[i], NULL, caller, NULL) == 0);
    for (int i = 0; i < CALLERS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    check_fork();
    pp_threads_quiesce();
    check_all_kinds();
    check_team();
    printf("ok %d rounds\n", rounds);
    return 0;
}
