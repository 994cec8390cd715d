/* race.c: processes or threads use one shared pool at the same time, and yield the CPU between stores at random.
 *
 *   race processes SECONDS SEED   workers are killed at random
 *   race threads SECONDS SEED     each thread has a view of its own: for ThreadSanitizer
 *
 * The content of a page follows from its tokens, so a page that was served for other tokens is seen.  Before a worker
 * writes the tokens, it writes a stamp of its own, yields, and reads the stamp back. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static __thread uint64_t random_state = 1;
static __thread uint32_t calm = 40; /* steps per yield, on average */
static __thread long steps_left; /* until the process kills itself; 0: no limit */

static uint32_t below(uint32_t n) { /* 0 to n - 1 */
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static void step(void) {
    if (below(calm) == 0) sched_yield();
    if (steps_left > 0 && --steps_left == 0) kill(getpid(), SIGKILL);
}

#define PP_STEP() step()
#define PP_SHARED_STEP 8192 /* bytes of 8 blocks: the limit changes in up to three steps */
#include "../../pagepool/csrc/os/os.h"

/* Threads share one mapping: ThreadSanitizer compares addresses. */
static unsigned char *common;

static int map_file(int fd, size_t bytes, unsigned char **base) {
    if (common) return *base = common, 0;
    return pp_os_map_file(fd, bytes, base);
}

static void hide_file(void *base, size_t bytes) {
    if (!common) pp_os_hide_file(base, bytes);
}

static void release(void *base, size_t bytes) {
    if (!common) pp_os_release(base, bytes);
}

#define pp_os_map_file map_file
#define pp_os_hide_file hide_file
#define pp_os_release release
#ifndef POOL_SOURCE
#define POOL_SOURCE "shared/pool.c"
#define INDEX_SOURCE "shared/index.c"
#endif
#include POOL_SOURCE /* of csrc, or of a copy with a fault */
#undef LOAD
#undef STORE
#include INDEX_SOURCE

enum { BLOCKS = 80, WORKERS = 4, SIZE = 16, PATH = 12, COMMON = 8 };

/* Counts of a worker, in memory that outlives it. */
typedef struct tally {
    uint64_t checked, found, wrong; /* pages */
    uint64_t unused[5];
} tally;
static tally *tallies;
static int is_over; /* threads stop */

static void add(uint64_t *place, uint64_t n) { __atomic_fetch_add(place, n, __ATOMIC_RELAXED); }

/* Counts a failure, and prints the first ones. */
static void expect(int condition, const char *what, tally *seen) {
    if (condition) return;
    if (__atomic_fetch_add(&seen->wrong, 1, __ATOMIC_RELAXED) < 3) printf("not right: %s\n", what);
}

static int32_t *page(pp_shared *view, int32_t block) { return (int32_t *)(view->pages + block * view->block_bytes); }

static void fill(pp_shared *view, int32_t block, const int32_t *tokens) {
    for (int64_t i = 0; i < view->block_bytes / 4; i++) page(view, block)[i] = tokens[i % SIZE];
}

static void check(pp_shared *view, int32_t block, const int32_t *tokens, tally *seen, const char *what) {
    int64_t equal = 0;
    for (int64_t i = 0; i < view->block_bytes / 4; i++) equal += page(view, block)[i] == tokens[i % SIZE];
    add(&seen->checked, 1);
    expect(equal == view->block_bytes / 4, what, seen);
}

/* 12 blocks of tokens: the first 8 are one of 6 beginnings. */
static void make_prompt(int32_t *tokens) {
    const int32_t beginning = (int32_t)below(6), tail = (int32_t)below(10);
    for (int32_t i = 0; i < COMMON * SIZE; i++) tokens[i] = beginning * 1000 + i;
    for (int32_t i = COMMON * SIZE; i < PATH * SIZE; i++) tokens[i] = beginning * 7777 + tail * 131 + i;
}

/* The names of a worker. */
static __thread pp_index_named named[BLOCKS];
static __thread int32_t room[BLOCKS];
static __thread uint8_t offered[BLOCKS];
static __thread pp_index_names names = {.secret = {5, 6}};

static void give_back(pp_shared *view, int32_t block, int32_t *counts) {
    if (--counts[block] == 0) pp_shared_drop(view, &block, 1);
}

/* Evicts as a cache with a store does: it holds the blocks while it copies their pages. */
static void evict_held(pp_shared *view, int32_t *counts, tally *seen) {
    int32_t blocks[16];
    names.of = named;
    names.path = room;
    names.offered = offered;
    const int64_t n = pp_index_evict_held(view, 1 + below(16), &names, counts, blocks);
    for (int64_t i = 0; i < n; i++) {
        check(view, blocks[i], pp_index_tokens(view, blocks[i]), seen, "a page that was evicted");
        give_back(view, blocks[i], counts);
    }
}

/* Lists what the workers have cached, and holds some of it. */
static void follow(pp_shared *view, int32_t *counts, tally *seen) {
    int32_t blocks[BLOCKS], next = 0;
    names.of = named;
    names.path = room;
    names.offered = offered;
    if (pp_index_begin(view)) {
        pp_index_removed(view, &names, blocks);
        const int64_t n = pp_index_added(view, &names, blocks);
        for (int64_t i = 0; i < n; i++)
            expect(pp_index_is_known(view, &names, blocks[i]), "a block that was added", seen);
        pp_index_end(view);
    }
    const int64_t n = pp_index_hold(view, 8, &names, counts, blocks, &next);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t word = __atomic_load_n(&view->words[blocks[i]], __ATOMIC_ACQUIRE);
        expect((word & view->bit) != 0, "a hold", seen);
        give_back(view, blocks[i], counts);
    }
}

/* Takes a block and shows that no other worker has it. */
static int take(pp_shared *view, int32_t *block, int32_t *counts, tally *seen) {
    int32_t stamp[SIZE];
    if (below(8) == 0 || pp_shared_take(view, 1, block) != PP_OK) {
        if (below(2))
            pp_index_evict(view, 1 + below(16));
        else
            evict_held(view, counts, seen);
        if (pp_shared_take(view, 1, block) != PP_OK) return 0;
    }
    for (int i = 0; i < SIZE; i++) stamp[i] = (int32_t)(below(1 << 30) | 1u << 30);
    fill(view, *block, stamp);
    PP_STEP();
    check(view, *block, stamp, seen, "a page that was just taken");
    return 1;
}

/* Writes other tokens into the last block of a path if no other process can read it.  Its generation stays the same. */
static void write_again(pp_shared *view, const pp_index_path *path, int32_t *blocks, int32_t *counts, tally *seen) {
    int32_t tokens[PATH * SIZE], *last = &tokens[(path->n - 1) * SIZE];
    const int32_t block = blocks[path->n - 1];
    const pp_index_path changed = {.root = {3, 4}, .tokens = tokens, .n = path->n};
    int64_t failed;
    pp_index_forget(view, &block, 1);
    if (pp_shared_is_held_elsewhere(view, block)) return;
    memcpy(tokens, path->tokens, (size_t)path->n * SIZE * sizeof *tokens);
    for (int i = 0; i < SIZE; i++) last[i] += 1 << 20;
    fill(view, block, last);
    pp_index_insert(view, &changed, blocks, counts, pp_index_epoch(view), &failed);
    check(view, block, last, seen, "a page that was written again");
}

static void serve(pp_shared *view, int32_t *counts, tally *seen) {
    int32_t tokens[PATH * SIZE], blocks[PATH];
    int64_t failed;
    make_prompt(tokens);
    pp_index_path path = {.root = {3, 4}, .tokens = tokens, .n = PATH};
    const uint64_t epoch = pp_index_epoch(view);
    const int64_t found = pp_index_match(view, &path, counts, blocks);
    for (int64_t i = 0; i < found; i++) check(view, blocks[i], tokens + i * SIZE, seen, "a page that was found");
    add(&seen->found, (uint64_t)found);
    if (found < PATH && below(4) == 0) {
        int32_t part;
        const int32_t *rest = tokens + found * SIZE;
        const int64_t same = pp_index_match_part(view, &path, blocks, found, rest, 1 + below(SIZE), counts, &part);
        if (same) {
            expect(!memcmp(page(view, part), rest, (size_t)same * sizeof *rest), "a page that matches in part", seen);
            give_back(view, part, counts);
        }
    }
    if (below(40) == 0) follow(view, counts, seen);
    int64_t n = found;
    for (; n < PATH && take(view, &blocks[n], counts, seen); n++) {
        fill(view, blocks[n], tokens + n * SIZE);
        counts[blocks[n]] = 1;
    }
    path.n = n;
    pp_index_insert(view, &path, blocks, counts, epoch, &failed);
    for (int64_t i = 0; i < n; i++) check(view, blocks[i], tokens + i * SIZE, seen, "a page that is held");
    if (n && below(10) == 0) pp_index_forget(view, blocks + below((uint32_t)n), 1);
    if (below(300) == 0) pp_index_set_limit(view, BLOCKS - below(24), PP_SHARED_PATIENCE);
    if (n > found && below(4) == 0) write_again(view, &path, blocks, counts, seen);
    for (int64_t i = 0; i < n; i++) {
        counts[blocks[i]] = 0;
        pp_shared_drop(view, &blocks[i], 1);
    }
    pp_shared_return_pending(view);
}

static pp_shared *attach(int fd) {
    pp_shared_shape shape;
    pp_shared *view = malloc(sizeof *view);
    if (!view || pp_shared_read(fd, &shape) || pp_shared_open(view, dup(fd), &shape)) exit(9);
    return view;
}

static void detach(pp_shared *view) {
    pp_shared_free(view);
    free(view);
}

/* Serves prompts until it is killed, kills itself, or has served enough. */
static void work(int fd, uint64_t seed, tally *seen) {
    int32_t counts[BLOCKS] = {0};
    random_state = seed;
    calm = 5u << 3 * below(3);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    steps_left = below(2) ? 50 + below(30000) : 0;
    pp_shared *view = attach(fd);
    for (uint32_t rounds = below(4) ? UINT32_MAX : below(100); rounds > 0; rounds--) serve(view, counts, seen);
    steps_left = 0;
    detach(view);
}

static int is_right_end(int status) {
    return WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Returns how many processes were killed. */
static long run_processes(int fd, pp_shared *view, double seconds, tally *seen) {
    int32_t counts[BLOCKS] = {0};
    pid_t children[WORKERS] = {0}, ended;
    long kills = 0;
    int status;
    for (const double until = now() + seconds; now() < until;) {
        for (int i = 0; i < WORKERS; i++) {
            const uint64_t seed = (uint64_t)below(1 << 30) << 8;
            if (children[i]) continue;
            fflush(stdout);
            if ((children[i] = fork())) continue;
            work(fd, seed, &tallies[1 + i]);
            fflush(stdout);
            _exit(0);
        }
        serve(view, counts, seen);
        if (below(50) == 0) kill(children[below(WORKERS)], SIGKILL);
        while ((ended = waitpid(-1, &status, WNOHANG)) > 0) {
            kills += WIFSIGNALED(status);
            seen->wrong += !is_right_end(status);
            for (int i = 0; i < WORKERS; i++)
                if (children[i] == ended) children[i] = 0;
        }
        if (below(100) == 0) pp_shared_reap(view);
        if (below(100) == 0) expect(pp_index_audit(view) == NULL, "the audit of the index", seen);
    }
    for (int i = 0; i < WORKERS; i++) {
        if (!children[i]) continue;
        kill(children[i], SIGKILL);
        waitpid(children[i], &status, 0);
        kills++;
    }
    pp_shared_reap(view);
    return kills;
}

typedef struct thread {
    pthread_t id;
    int fd;
    uint64_t seed;
    tally *seen;
} thread;

static void *run_thread(void *argument) {
    thread *self = argument;
    int32_t counts[BLOCKS] = {0};
    random_state = self->seed;
    calm = 5u << 3 * below(3);
    while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
        pp_shared *view = attach(self->fd);
        for (uint32_t rounds = below(2000); rounds > 0; rounds--) serve(view, counts, self->seen);
        detach(view);
    }
    return NULL;
}

static void run_threads(int fd, pp_shared *view, double seconds) {
    thread threads[WORKERS];
    common = view->base;
    for (int i = 0; i < WORKERS; i++) {
        threads[i] = (thread){.fd = fd, .seed = (uint64_t)below(1 << 30) << 8, .seen = &tallies[1 + i]};
        if (pthread_create(&threads[i].id, NULL, run_thread, &threads[i])) exit(9);
    }
    usleep((useconds_t)(seconds * 1e6));
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < WORKERS; i++) pthread_join(threads[i].id, NULL);
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    pp_shared_shape shape = {.num_blocks = BLOCKS};
    const int fd = memfd_create("race", MFD_CLOEXEC), with_threads = !strcmp(argv[1], "threads");
    const size_t bytes = (1 + WORKERS) * sizeof *tallies;
    int32_t counts[BLOCKS] = {0}, block;
    long kills = 0;
    random_state = strtoull(argv[3], NULL, 10) << 8;
    tallies = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tallies == MAP_FAILED || pp_kv_layout_init(&shape.layout, 1, 1, 8, SIZE, PP_F32) != PP_OK) return 9;
    if (pp_shared_create(fd, &shape, BLOCKS, 7)) return 9;
    pp_shared *view = attach(fd);
    const int64_t allocated = pp_shared_allocated(fd);
    if (with_threads)
        run_threads(fd, view, atof(argv[2]));
    else
        kills = run_processes(fd, view, atof(argv[2]), &tallies[0]);
    tally *seen = &tallies[0];
    expect(pp_index_set_limit(view, BLOCKS / 2, PP_SHARED_PATIENCE) == 0, "a lower limit", seen);
    expect(pp_shared_allocated(fd) == allocated - BLOCKS / 2 * view->block_bytes, "its memory is returned", seen);
    expect(pp_index_set_limit(view, BLOCKS, PP_SHARED_PATIENCE) == 0, "the full limit", seen);
    expect(pp_shared_allocated(fd) == allocated, "all blocks have memory again", seen);
    expect(pp_shared_processes(view) == 1, "one process is left", seen);
    expect(pp_shared_audit(view, counts, &block) == NULL, "the audit of the words", seen);
    expect(pp_index_audit(view) == NULL, "the audit of the index", seen);
    pp_index_evict(view, BLOCKS);
    const int64_t lost = pp_shared_count_in_use(view);
    for (int i = 1; i <= WORKERS; i++) {
        seen->checked += tallies[i].checked;
        seen->found += tallies[i].found;
        seen->wrong += tallies[i].wrong;
    }
    printf("{\"kills\": %ld, \"checked\": %lu, \"found\": %lu, \"wrong\": %lu, \"lost\": %ld}\n", kills, seen->checked,
           seen->found, seen->wrong, (long)lost);
    return seen->wrong || lost;
}
