/* kills.c: a process is killed at each store to the memory that it shares; the survivors must lose no block and find
 * only right pages.
 *
 *   kills stores              at each store of the workload
 *   kills recovery STRIDE     at each STRIDE-th store, and the process that recovers at each store of its own
 *   kills instructions STRIDE after each STRIDE-th machine instruction of the workload
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static long steps_left; /* 0: no limit */

static void step(void) {
    if (steps_left > 0 && --steps_left == 0) kill(getpid(), SIGKILL);
}

#define PP_STEP() step()
#define PP_SHARED_STEP 28672 /* bytes of 7 blocks: half of the pool is three steps */
#include POOL_SOURCE /* csrc/shared/pool.c, or a copy with a fault */
#undef LOAD
#undef STORE
#include INDEX_SOURCE

enum { BLOCKS = 40, HELD = 3, SIZE = 64, CACHED = 6, PATH = 12 };
static const int64_t WAIT = PP_SHARED_PATIENCE;
static int32_t held[HELD], prompt[PATH * SIZE];
static int64_t allocated; /* bytes of a file in which all blocks have memory */

#define CHECK(condition)                                              \
    do {                                                              \
        if (!(condition)) {                                           \
            printf("kill %ld: line %d: %s\n", at, __LINE__, #condition); \
            exit(1);                                                  \
        }                                                             \
    } while (0)

static int make_file(void) {
    pp_shared_shape shape = {.num_blocks = BLOCKS};
    const long at = 0;
    CHECK(pp_kv_layout_init(&shape.layout, 1, 1, 8, 64, PP_F32) == PP_OK);
    const int fd = memfd_create("pool", MFD_CLOEXEC);
    CHECK(pp_shared_create(fd, &shape, BLOCKS, 7) == 0);
    return fd;
}

static pp_shared *attach(int fd) {
    pp_shared_shape shape;
    pp_shared *view = malloc(sizeof *view);
    if (pp_shared_read(fd, &shape) || pp_shared_open(view, dup(fd), &shape)) _exit(9);
    return view;
}

static unsigned char *page(pp_shared *view, int32_t block) { return view->pages + block * view->block_bytes; }

/* The page of a cached block has its tokens. */
static void fill(pp_shared *view, int32_t block, const int32_t *tokens) {
    memcpy(page(view, block), tokens, SIZE * sizeof *tokens);
}

static int is_right(pp_shared *view, int32_t block, const int32_t *tokens) {
    return !memcmp(page(view, block), tokens, SIZE * sizeof *tokens);
}

static pp_index_path path_of(const int32_t *tokens, int64_t n) {
    return (pp_index_path){.root = {3, 4}, .tokens = tokens, .n = n};
}

/* Finds a prompt of which the first blocks are cached, computes and caches the rest, evicts and forgets. */
static void use_index(pp_shared *view) {
    int32_t tokens[8 * SIZE], blocks[8], counts[BLOCKS] = {0};
    int64_t failed;
    memcpy(tokens, prompt, 4 * SIZE * sizeof *tokens);
    for (int i = 4 * SIZE; i < 8 * SIZE; i++) tokens[i] = 5000 + i;
    const pp_index_path path = path_of(tokens, 8);
    const int64_t found = pp_index_match(view, &path, counts, blocks);
    if (pp_shared_take(view, (int32_t)(8 - found), blocks + found) != PP_OK) _exit(6);
    for (int64_t i = 0; i < 8; i++) {
        if (i >= found) fill(view, blocks[i], tokens + i * SIZE);
        if (!is_right(view, blocks[i], tokens + i * SIZE)) _exit(5);
        counts[blocks[i]] = 1;
    }
    pp_index_insert(view, &path, blocks, counts, pp_index_epoch(view), &failed);
    pp_index_forget(view, blocks + 6, 1);
    pp_index_insert(view, &path, blocks, counts, pp_index_epoch(view), &failed); /* block 7 gets a new parent */
    pp_shared_drop(view, blocks, 8);
    if (pp_index_evict(view, 2) != 2) _exit(4);
    pp_index_forget(view, blocks, 1);
}

static void workload(int fd) {
    pp_shared *view = attach(fd);
    int32_t blocks[8], more[BLOCKS];
    view->cursor = BLOCKS / 2 - 4; /* half of its blocks are above the limit that it sets */
    for (int i = 0; i < 8; i++)
        if (pp_shared_take(view, 1, &blocks[i]) == PP_OK) memset(page(view, blocks[i]), 1, (size_t)view->block_bytes);
    pp_shared_drop(view, blocks + 2, 3);
    if (pp_shared_take(view, 5, more) == PP_OK) pp_shared_drop(view, more, 5);
    if (pp_shared_take(view, BLOCKS, more) == PP_OK) _exit(8); /* there are fewer free blocks */
    pp_shared_drop(view, blocks, 1);
    use_index(view);
    pp_index_set_limit(view, BLOCKS / 2, WAIT); /* blocks above it are free, cached, and in use by both processes */
    pp_shared_drop(view, blocks + 7, 1);
    pp_shared_return_pending(view);
    pp_index_set_limit(view, BLOCKS, WAIT);
    int32_t counts[BLOCKS] = {0}, block;
    for (int i = 0; i < 8; i++) counts[blocks[i]] = i == 1 || i == 5 || i == 6;
    if (pp_shared_audit(view, counts, &block)) _exit(7);
    pp_shared_free(view);
}

static void recover(int fd) {
    pp_shared *view = attach(fd);
    int32_t counts[BLOCKS] = {0}, block;
    if (pp_shared_audit(view, counts, &block)) _exit(7);
    pp_index_forget(view, &block, 0); /* takes the lock, and with it the index as the dead process left it */
    pp_shared_free(view);
}

static pp_shared *survivor(int *fd) {
    *fd = make_file();
    pp_shared *view = attach(*fd);
    const long at = 0;
    int32_t all[BLOCKS];
    allocated = pp_shared_allocated(*fd);
    CHECK(pp_shared_take(view, BLOCKS, all) == PP_OK);
    for (int i = 0; i < HELD; i++) held[i] = i * (BLOCKS / 2 - 1); /* also above the lower limit of the workload */
    for (int i = 0; i < BLOCKS; i++)
        if (i != held[0] && i != held[1] && i != held[2]) pp_shared_drop(view, &i, 1);
    for (int i = 0; i < HELD; i++) memset(page(view, held[i]), 0xA0 + i, (size_t)view->block_bytes);
    int32_t cached[CACHED], counts[BLOCKS] = {0};
    int64_t failed;
    for (int i = 0; i < PATH * SIZE; i++) prompt[i] = 7 * i + 3;
    CHECK(pp_shared_take(view, CACHED, cached) == PP_OK);
    for (int i = 0; i < CACHED; i++) {
        fill(view, cached[i], prompt + i * SIZE);
        counts[cached[i]] = 1;
    }
    const pp_index_path path = path_of(prompt, CACHED);
    CHECK(pp_index_insert(view, &path, cached, counts, pp_index_epoch(view), &failed) == CACHED);
    pp_shared_drop(view, cached, CACHED);
    return view;
}

static void verify(pp_shared *view, long at) {
    int32_t counts[BLOCKS] = {0}, block, taken[BLOCKS];
    for (int i = 0; i < HELD; i++) counts[held[i]] = 1;
    CHECK(pp_shared_allocated(view->fd) >= allocated - (BLOCKS - pp_shared_limit(view)) * view->block_bytes);
    const pp_index_path path = path_of(prompt, CACHED);
    const int64_t found = pp_index_match(view, &path, counts, taken);
    for (int64_t i = 0; i < found; i++) {
        CHECK(is_right(view, taken[i], prompt + i * SIZE));
        counts[taken[i]] = 0;
    }
    pp_shared_drop(view, taken, found);
    for (int i = 0; i < HELD; i++) counts[held[i]] = 1;
    /* Before the dead process is swept: nothing that the survivor holds has changed, and it can go on. */
    CHECK(pp_shared_take(view, 1, taken) == PP_OK);
    CHECK(!counts[taken[0]]);
    pp_shared_drop(view, taken, 1);
    pp_shared_reap(view);
    CHECK(pp_shared_processes(view) == 1);
    CHECK(pp_index_set_limit(view, BLOCKS / 2, WAIT) == 0);
    for (int32_t b = BLOCKS / 2; b < BLOCKS; b++) CHECK(!((uint32_t)view->words[b] & ~view->bit));
    CHECK(pp_shared_allocated(view->fd) == allocated - (BLOCKS / 2 - 1) * view->block_bytes);
    CHECK(pp_index_set_limit(view, BLOCKS, WAIT) == 0);
    CHECK(pp_shared_allocated(view->fd) == allocated);
    CHECK(pp_shared_audit(view, counts, &block) == NULL);
    CHECK(pp_index_audit(view) == NULL);
    const int64_t cached = pp_index_count(view, 0);
    CHECK(pp_index_count(view, 1) == cached);
    CHECK(pp_shared_count_in_use(view) == HELD + cached);
    for (int32_t b = 0; b < BLOCKS; b++)
        if (view->words[b] & PP_INDEX_BIT) CHECK(is_right(view, b, tokens_of(view, b)));
    CHECK(pp_index_evict(view, BLOCKS) == cached);
    CHECK(view->header->dirty == 0 && view->header->index_lock == 0);
    CHECK(pp_shared_count_in_use(view) == HELD);
    CHECK(pp_shared_take(view, BLOCKS - HELD, taken) == PP_OK);
    for (int i = 0; i < BLOCKS - HELD; i++) {
        CHECK(!counts[taken[i]]);
        counts[taken[i]] = 1;
        memset(page(view, taken[i]), 2, (size_t)view->block_bytes);
    }
    for (int i = 0; i < HELD; i++) {
        CHECK(page(view, held[i])[0] == 0xA0 + i);
        CHECK(page(view, held[i])[view->block_bytes - 1] == 0xA0 + i);
    }
    CHECK(pp_shared_take(view, 1, &block) == PP_EXHAUSTED);
}

static void drop(pp_shared *view, int fd) {
    pp_shared_free(view);
    free(view);
    close(fd);
}

/* Runs `body` in a child that is killed at step n; returns whether it was killed. */
static int run_child(void (*body)(int), int fd, long n, long at) {
    int status;
    const pid_t child = fork();
    if (!child) {
        steps_left = n;
        body(fd);
        _exit(0);
    }
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status);
}

static long kill_at_stores(void) {
    for (long n = 1;; n++) {
        int fd;
        pp_shared *view = survivor(&fd);
        const int killed = run_child(workload, fd, n, n);
        verify(view, n);
        drop(view, fd);
        if (!killed) return n - 1;
    }
}

static long kill_recovery(long stride) {
    long pairs = 0;
    for (long n = 1;; n += stride) {
        int was_killed = 0, again = 1;
        for (long m = 1; again; m++, pairs++) {
            int fd;
            pp_shared *view = survivor(&fd);
            was_killed = run_child(workload, fd, n, n);
            again = run_child(recover, fd, m, n * 10000 + m);
            verify(view, n * 10000 + m);
            drop(view, fd);
        }
        if (!was_killed) return pairs;
    }
}

static long kill_at_instructions(long stride) {
    long kills = 0;
    for (long n = 1;; n += stride) {
        int fd, status, ended = 0;
        pp_shared *view = survivor(&fd);
        const pid_t child = fork();
        if (!child) {
            ptrace(PTRACE_TRACEME, 0, 0, 0);
            raise(SIGSTOP);
            workload(fd);
            _exit(0);
        }
        waitpid(child, &status, 0);
        for (long i = 0; i < n && !ended; i++) {
            ptrace(PTRACE_SINGLESTEP, child, 0, 0);
            waitpid(child, &status, 0);
            ended = WIFEXITED(status);
        }
        if (!ended) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            kills++;
        }
        verify(view, n);
        drop(view, fd);
        if (ended) return kills;
    }
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "stores";
    const long stride = argc > 2 ? atol(argv[2]) : 1;
    const long count = !strcmp(mode, "stores")     ? kill_at_stores()
                       : !strcmp(mode, "recovery") ? kill_recovery(stride)
                                                   : kill_at_instructions(stride);
    printf("%ld kills\n", count);
    return 0;
}
