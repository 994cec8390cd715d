/* pool.c: see pool.h. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../os/os.h"
#include "pagepool/lock.h"

#define LOAD(place) __atomic_load_n(place, __ATOMIC_ACQUIRE)
#define STORE(place, value) __atomic_store_n(place, value, __ATOMIC_RELEASE)
#define BYTE_ORDER_MARK 0x01020304u

enum { FREE, LIVE };                             /* pp_shared_slot.state */
enum { LIMIT_LOCK = PP_SHARED_PROCESSES };       /* byte of the lock for changes of the limit */
enum { POLL = 1000000, PAUSE = 2000000 };        /* ns between two attempts to lock it, and between two steps */
static const uint64_t LEFT = UINT64_MAX;         /* epoch of a view that has given up its slot */

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static size_t words_offset(void) { return round_up(sizeof(pp_shared_header), 4096); }

/* Where the parts of a file begin. */
typedef struct parts {
    size_t words, nodes, tokens, buckets, pages;
    size_t num_buckets; /* a power of two, at least twice as many as blocks */
} parts;

static parts parts_of(int64_t num_blocks, int64_t block_size) {
    const size_t n = (size_t)num_blocks;
    parts found = {.words = words_offset(), .num_buckets = 64};
    while (found.num_buckets < 2 * n) found.num_buckets *= 2;
    found.nodes = round_up(found.words + n * sizeof(uint64_t), 4096);
    found.tokens = round_up(found.nodes + n * sizeof(pp_index_node), 4096);
    found.buckets = round_up(found.tokens + n * (size_t)block_size * sizeof(int32_t), 4096);
    found.pages = round_up(found.buckets + found.num_buckets * sizeof(int32_t), PP_OS_HUGE_PAGE);
    return found;
}

size_t pp_shared_bytes(int64_t num_blocks, const pp_kv_layout *layout) {
    const int64_t most = (int64_t)1 << 46, bytes = layout->block_bytes;
    if (num_blocks < 0 || num_blocks > INT32_MAX || bytes < 1 || bytes > most) return 0;
    if (layout->block_size < 1 || layout->block_size > PP_MAX_BLOCK_SIZE) return 0;
    if (num_blocks && bytes > most / num_blocks) return 0;
    return round_up(parts_of(num_blocks, layout->block_size).pages + (size_t)(num_blocks * bytes), PP_OS_HUGE_PAGE);
}

int64_t pp_shared_cost(int64_t num_blocks, const pp_kv_layout *layout, int64_t limit) {
    const size_t bytes = parts_of(num_blocks, layout->block_size).pages + (size_t)(limit * layout->block_bytes);
    return (int64_t)round_up(bytes, PP_OS_HUGE_PAGE);
}

static int has_pool(int fd) {
    char first = 0;
    return pread(fd, &first, 1, 0) == 1 && first;
}

/* The magic is written last: if a file has no magic, its creator has died, and the file is made again. */
static int fill_file(int fd, const pp_shared_shape *shape, int64_t limit, uint64_t seed) {
    pp_shared_header header = {0};
    const size_t bytes = pp_shared_bytes(shape->num_blocks, &shape->layout);
    if (has_pool(fd)) return EEXIST;
    if (ftruncate(fd, (off_t)bytes)) return errno;
    const parts found = parts_of(shape->num_blocks, shape->layout.block_size);
    const int64_t used = (int64_t)found.pages + limit * shape->layout.block_bytes;
    const int error = pp_os_commit_file(fd, 0, used);
    if (error) return error;
    header.shape = *shape;
    memset(header.shape.magic, 0, sizeof header.shape.magic);
    header.shape.byte_order = BYTE_ORDER_MARK;
    header.shape.version = PP_SHARED_VERSION;
    header.limit = limit;
    header.seed = seed;
    if (pwrite(fd, &header, sizeof header, 0) != (ssize_t)sizeof header) return EIO;
    return pwrite(fd, PP_SHARED_MAGIC, sizeof header.shape.magic, 0) == sizeof header.shape.magic ? 0 : EIO;
}

/* Waits while another process makes the pool: as long as the memory of the file grows. */
static int lock_creation(int fd, int lock_fd) {
    int64_t before = -1, until = 0;
    while (!pp_os_lock_byte(lock_fd, LIMIT_LOCK)) {
        if (has_pool(fd)) return EEXIST; /* the limit of a finished pool is locked */
        const int64_t now = pp_os_clock(), bytes = pp_shared_allocated(fd);
        if (bytes != before) until = now + PP_SHARED_PATIENCE;
        if (now >= until) return ETIMEDOUT;
        before = bytes;
        pp_os_sleep(POLL);
    }
    return 0;
}

int pp_shared_create(int fd, const pp_shared_shape *shape, int64_t limit, uint64_t seed) {
    if (!pp_shared_bytes(shape->num_blocks, &shape->layout)) return ENOMEM;
    if (limit < 0 || limit > shape->num_blocks) return EINVAL;
    if (has_pool(fd)) return EEXIST; /* needs no lock, which a process that grows the pool may have */
    const int lock_fd = pp_os_reopen(fd);
    if (lock_fd < 0) return errno;
    int error = lock_creation(fd, lock_fd);
    if (!error) error = fill_file(fd, shape, limit, seed);
    close(lock_fd);
    return error;
}

int pp_shared_read(int fd, pp_shared_shape *shape) {
    struct stat status;
    if (fstat(fd, &status)) return errno;
    const ssize_t size = pread(fd, shape, sizeof *shape, 0);
    if (size < 0) return errno;
    if (size != (ssize_t)sizeof *shape || memcmp(shape->magic, PP_SHARED_MAGIC, sizeof shape->magic)) return EBADMSG;
    if (shape->byte_order != BYTE_ORDER_MARK || shape->version != PP_SHARED_VERSION) return EBADMSG;
    if (shape->fingerprint_bytes < 0 || shape->fingerprint_bytes > PP_SHARED_FINGERPRINT) return EBADMSG;
    if (!memchr(shape->budget, 0, sizeof shape->budget)) return EBADMSG;
    const size_t bytes = pp_shared_bytes(shape->num_blocks, &shape->layout);
    return bytes && (size_t)status.st_size == bytes ? 0 : EBADMSG;
}

int pp_shared_read_cost(int fd, char *budget, int64_t *bytes) {
    pp_shared_shape shape;
    struct stat status;
    int64_t limit = 0;
    const int error = pp_shared_read(fd, &shape);
    if (error && error != EBADMSG) return error;
    if (fstat(fd, &status)) return errno;
    *bytes = (int64_t)status.st_blocks * 512;
    memcpy(budget, error ? "" : shape.budget, error ? 1 : sizeof shape.budget);
    if (error || pread(fd, &limit, sizeof limit, offsetof(pp_shared_header, limit)) != (ssize_t)sizeof limit) return 0;
    if (limit < 0 || limit > shape.num_blocks) return 0;
    const size_t pages = parts_of(shape.num_blocks, shape.layout.block_size).pages;
    const int64_t above = *bytes - (int64_t)round_up(pages + (size_t)(limit * shape.layout.block_bytes), 4096);
    *bytes = pp_shared_cost(shape.num_blocks, &shape.layout, limit) + (above > 0 ? above : 0);
    return 0;
}

/* Views of this process, for fork.  The lock of the list is taken before any other lock. */
static pp_shared views = {.next = &views, .previous = &views};
static pp_lock views_lock;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int handlers_failed;

static void before_fork(void) { pp_lock_acquire(&views_lock); }

static void after_fork_in_parent(void) { pp_lock_release(&views_lock); }

/* The child has copies of the descriptors.  The lock of the slot is the parent's: it must go when the parent ends. */
static void after_fork_in_child(void) {
    for (pp_shared *view = views.next; view != &views; view = view->next)
        if (view->base && view->fd >= 0) {
            close(view->lock_fd);
            close(view->fd);
            view->fd = view->lock_fd = -1;
            pp_os_hide_file(view->base, view->bytes);
        }
    pp_lock_release(&views_lock);
}

static void install_handlers(void) {
    handlers_failed = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void list_view(pp_shared *view) {
    pp_lock_acquire(&views_lock);
    view->next = &views;
    view->previous = views.previous;
    view->previous->next = views.previous = view;
    pp_lock_release(&views_lock);
}

static void delist_view(pp_shared *view) {
    pp_lock_acquire(&views_lock);
    view->previous->next = view->next;
    view->next->previous = view->previous;
    pp_lock_release(&views_lock);
}

static void drop_everywhere(pp_shared *view, uint64_t bit) {
    for (int64_t b = 0; b < view->num_blocks; b++)
        if (LOAD(&view->words[b]) & bit) {
            __atomic_fetch_and(&view->words[b], ~bit, __ATOMIC_ACQ_REL);
            PP_STEP();
        }
}

/* Whether the process of a slot lives although the byte of the slot is not locked.  Some programs close descriptors
 * that they did not open, and the lock with them. */
static int has_lost_its_lock(const pp_shared_slot *slot) {
    if (slot->table != pp_os_process_table()) return 0; /* the pid says nothing here: the lock decides */
    const uint64_t start = pp_os_process_start(slot->pid);
    return start && start == slot->start;
}

/* Requires the lock on the byte of the slot. */
static void sweep(pp_shared *view, int i) {
    pp_shared_slot *slot = &view->header->slots[i];
    drop_everywhere(view, (uint64_t)1 << i);
    /* `dirty` stays set if the process died while it wrote the index. */
    uint64_t writer = (uint64_t)1 << i;
    __atomic_compare_exchange_n(&view->header->index_lock, &writer, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    PP_STEP();
    STORE(&slot->epoch, slot->epoch + 1);
    PP_STEP();
    STORE(&slot->state, FREE);
    PP_STEP();
}

static void punch_free_blocks(pp_shared *view, int64_t begin, int64_t end);

static int take_slot(pp_shared *view) {
    for (int i = 0; i < PP_SHARED_PROCESSES; i++) {
        pp_shared_slot *slot = &view->header->slots[i];
        if (!pp_os_lock_byte(view->lock_fd, i)) continue;
        if (LOAD(&slot->state) != FREE && has_lost_its_lock(slot)) {
            pp_os_unlock_byte(view->lock_fd, i);
            continue;
        }
        PP_STEP();
        if (LOAD(&slot->state) != FREE) sweep(view, i);
        slot->table = pp_os_process_table();
        PP_STEP();
        slot->pid = getpid();
        PP_STEP();
        slot->start = pp_os_process_start(slot->pid);
        PP_STEP();
        view->slot = slot;
        view->bit = (uint64_t)1 << i;
        view->epoch = slot->epoch + 1;
        view->epoch += !view->epoch; /* never 0, which is what a child sees after fork */
        STORE(&slot->epoch, view->epoch);
        PP_STEP();
        STORE(&slot->state, LIVE);
        PP_STEP();
        /* Not the whole pool away from each other, but far enough that two processes do not race for each block. */
        view->cursor = view->num_blocks * i / PP_SHARED_PROCESSES;
        return 0;
    }
    return EUSERS;
}

int pp_shared_open(pp_shared *view, int fd, const pp_shared_shape *shape) {
    *view = (pp_shared){.fd = fd,
                        .num_blocks = shape->num_blocks,
                        .block_bytes = shape->layout.block_bytes,
                        .block_size = shape->layout.block_size};
    if (pthread_once(&once, install_handlers) || handlers_failed) return ENOMEM;
    view->bytes = pp_shared_bytes(view->num_blocks, &shape->layout);
    const parts found = parts_of(view->num_blocks, view->block_size);
    view->hints = malloc(((size_t)view->num_blocks + 1) * sizeof *view->hints);
    if (!view->hints) return ENOMEM;
    view->lock_fd = pp_os_reopen(fd);
    int error = view->lock_fd < 0 ? errno : pp_os_map_file(fd, view->bytes, &view->base);
    if (!error) {
        view->header = (pp_shared_header *)view->base;
        view->words = (uint64_t *)(view->base + found.words);
        view->nodes = (pp_index_node *)(view->base + found.nodes);
        view->tokens = (int32_t *)(view->base + found.tokens);
        view->buckets = (int32_t *)(view->base + found.buckets);
        view->pages = view->base + found.pages;
        view->bucket_mask = found.num_buckets - 1;
        view->seed = LOAD(&view->header->seed);
        /* The view is listed before it takes a slot: if another thread forks now, the child closes its copy. */
        list_view(view);
        error = take_slot(view);
        if (error) {
            delist_view(view);
            pp_os_release(view->base, view->bytes);
        }
    }
    if (error) {
        if (view->lock_fd >= 0) close(view->lock_fd);
        free(view->hints);
        *view = (pp_shared){0};
        return error;
    }
    pp_shared_reap(view);
    view->pending_end = view->num_blocks; /* take_slot may have swept a dead process */
    pp_shared_return_pending(view);
    return 0;
}

void pp_shared_leave(pp_shared *view) {
    pp_lock_acquire(&view->limits);
    if (view->lock) pp_lock_acquire(view->lock);
    const uint64_t epoch = view->epoch;
    const int was_stale = pp_shared_is_stale(view);
    __atomic_store_n(&view->epoch, LEFT, __ATOMIC_RELAXED); /* no thread of this process takes a block from now on */
    if (view->lock) pp_lock_release(view->lock);
    if (!was_stale) {
        drop_everywhere(view, view->bit);
        if (pp_os_lock_byte(view->lock_fd, LIMIT_LOCK)) {
            punch_free_blocks(view, pp_shared_limit(view), view->num_blocks);
            pp_os_unlock_byte(view->lock_fd, LIMIT_LOCK);
        }
        STORE(&view->slot->epoch, epoch + 1);
        PP_STEP();
        STORE(&view->slot->state, FREE);
        PP_STEP();
        view->held = view->num_hints = 0;
    }
    pp_lock_release(&view->limits);
}

void pp_shared_close(pp_shared *view) {
    if (!view->base || view->fd < 0) return;
    pp_shared_leave(view);
    pp_lock_acquire(&views_lock);
    pp_lock_acquire(&view->limits);
    pp_os_hide_file(view->base, view->bytes);
    close(view->lock_fd);
    close(view->fd);
    view->fd = view->lock_fd = -1;
    pp_lock_release(&view->limits);
    pp_lock_release(&views_lock);
}

void pp_shared_free(pp_shared *view) {
    if (!view->base) return;
    pp_shared_close(view);
    delist_view(view);
    pp_os_release(view->base, view->bytes);
    free(view->hints);
    free(view->victims);
    *view = (pp_shared){0};
}

int64_t pp_shared_process_of(const pp_shared *view, uint64_t owner) {
    const int is_bit = owner && !(owner & (owner - 1)) && owner >> PP_SHARED_PROCESSES == 0;
    return is_bit ? view->header->slots[__builtin_ctzll(owner)].pid : 0;
}

static int64_t clamp_limit(int64_t limit, int64_t num_blocks) {
    return limit < 0 ? 0 : limit > num_blocks ? num_blocks : limit;
}

int64_t pp_shared_limit(const pp_shared *view) { return clamp_limit(LOAD(&view->header->limit), view->num_blocks); }

/* Sets the bit of this process if the block is free. */
static int claim(pp_shared *view, int64_t b) {
    uint64_t word = LOAD(&view->words[b]);
    if ((uint32_t)word) return 0;
    PP_STEP();
    const uint64_t mine = ((word >> 32) + 1) << 32 | view->bit;
    if (!__atomic_compare_exchange_n(&view->words[b], &word, mine, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return 0;
    /* A process that copies the page without a reference sees the new generation if it sees a byte of the new owner. */
    __atomic_thread_fence(__ATOMIC_RELEASE);
    PP_STEP();
    return 1;
}

static void drop_one(pp_shared *view, int32_t b) {
    PP_STEP();
    const uint64_t word = __atomic_fetch_and(&view->words[b], ~view->bit, __ATOMIC_ACQ_REL);
    PP_STEP();
    view->held -= (word & view->bit) != 0;
    if ((uint32_t)word == view->bit && view->num_hints < view->num_blocks) view->hints[view->num_hints++] = b;
}

/* The first free block from the cursor on, claimed; -1 if none is free. */
static int64_t search(pp_shared *view, int64_t limit) {
    int64_t b = view->cursor < limit ? view->cursor : 0;
    for (int64_t i = 0; i < limit; i++) {
        if (claim(view, b)) {
            view->cursor = b + 1;
            return b;
        }
        b = b + 1 == limit ? 0 : b + 1;
    }
    return -1;
}

static int64_t take_one(pp_shared *view) {
    for (;;) {
        const int64_t limit = pp_shared_limit(view);
        int64_t b = -1;
        while (view->num_hints && b < 0) {
            const int32_t hint = view->hints[--view->num_hints];
            if (hint < limit && claim(view, hint)) b = hint;
        }
        if (b < 0) b = search(view, limit);
        if (b < 0) return -1;
        view->held++;
        if (b < pp_shared_limit(view)) return b;
        const int32_t above = (int32_t)b; /* the limit has fallen, so the block may have no memory */
        drop_one(view, above);
    }
}

pp_status pp_shared_take(pp_shared *view, int32_t n, int32_t *blocks) {
    if (pp_shared_is_stale(view)) return PP_EXHAUSTED;
    int has_reaped = 0;
    for (int32_t i = 0; i < n;) {
        const int64_t b = take_one(view);
        if (b >= 0) {
            blocks[i++] = (int32_t)b;
        } else if (has_reaped || !pp_shared_reap(view)) {
            while (i > 0) drop_one(view, blocks[--i]);
            return PP_EXHAUSTED;
        } else {
            has_reaped = 1;
        }
    }
    if (view->held > view->peak) view->peak = view->held;
    return PP_OK;
}

/* Requires the lock of the allocator. */
static void add_pending(pp_shared *view, int64_t begin, int64_t end) {
    if (!view->pending_end || begin < view->pending) view->pending = begin;
    if (end > view->pending_end) __atomic_store_n(&view->pending_end, end, __ATOMIC_RELAXED);
}

void pp_shared_drop(pp_shared *view, const int32_t *blocks, int64_t n) {
    int32_t highest = -1;
    if (pp_shared_is_stale(view)) return;
    for (int64_t i = 0; i < n; i++) {
        drop_one(view, blocks[i]);
        if (blocks[i] > highest) highest = blocks[i];
    }
    const int64_t limit = pp_shared_limit(view);
    if (highest < limit) return;
    int32_t lowest = highest;
    for (int64_t i = 0; i < n; i++)
        if (blocks[i] >= limit && blocks[i] < lowest) lowest = blocks[i];
    add_pending(view, lowest, (int64_t)highest + 1);
}

void pp_shared_return_pending(pp_shared *view) {
    if (!pp_shared_has_pending(view)) return;
    if (view->lock) pp_lock_acquire(view->lock);
    const int64_t begin = view->pending, end = view->pending_end;
    __atomic_store_n(&view->pending_end, 0, __ATOMIC_RELAXED);
    if (view->lock) pp_lock_release(view->lock);
    if (end && pp_shared_return_memory(view, begin, end, 0)) {
        if (view->lock) pp_lock_acquire(view->lock);
        add_pending(view, begin, end);
        if (view->lock) pp_lock_release(view->lock);
    }
}

int pp_shared_reap(pp_shared *view) {
    int found = 0;
    if (pp_shared_is_stale(view)) return 0;
    for (int i = 0; i < PP_SHARED_PROCESSES; i++) {
        pp_shared_slot *slot = &view->header->slots[i];
        if (slot == view->slot || LOAD(&slot->state) == FREE || !pp_os_lock_byte(view->lock_fd, i)) continue;
        if (LOAD(&slot->state) != FREE && !has_lost_its_lock(slot)) {
            sweep(view, i);
            found++;
        }
        pp_os_unlock_byte(view->lock_fd, i);
    }
    if (found) add_pending(view, 0, view->num_blocks);
    return found;
}

int64_t pp_shared_count_free(const pp_shared *view) {
    const int64_t limit = pp_shared_limit(view);
    int64_t count = 0;
    for (int64_t b = 0; b < limit; b++) count += (uint32_t)__atomic_load_n(&view->words[b], __ATOMIC_RELAXED) == 0;
    return count;
}

int64_t pp_shared_count_in_use(const pp_shared *view) {
    int64_t count = 0;
    for (int64_t b = 0; b < view->num_blocks; b++)
        count += (uint32_t)__atomic_load_n(&view->words[b], __ATOMIC_RELAXED) != 0;
    return count;
}

int pp_shared_lock_limit(pp_shared *view, int64_t patience) {
    int64_t until = 0;
    for (;;) {
        /* In a child after fork, a thread that exists only in the parent may hold `limits`. */
        if (pp_shared_is_stale(view)) return ESTALE;
        if (pp_lock_try(&view->limits)) {
            if (pp_os_lock_byte(view->lock_fd, LIMIT_LOCK)) break;
            pp_lock_release(&view->limits); /* other threads may end the view meanwhile */
        }
        const int64_t now = pp_os_clock();
        if (!until) until = now + patience;
        if (now >= until) {
            __atomic_store_n(&view->blocker, pp_shared_process_of(view, LOAD(&view->header->limit_owner)),
                             __ATOMIC_RELAXED);
            return ETIMEDOUT;
        }
        pp_os_sleep(POLL);
    }
    STORE(&view->header->limit_owner, view->bit);
    PP_STEP();
    return 0;
}

void pp_shared_unlock_limit(pp_shared *view) {
    STORE(&view->header->limit_owner, 0);
    PP_STEP();
    pp_os_unlock_byte(view->lock_fd, LIMIT_LOCK);
    pp_lock_release(&view->limits);
}

int pp_shared_raise_limit(pp_shared *view, int64_t limit, int64_t patience, int64_t *reached) {
    const int64_t offset = (int64_t)(view->pages - view->base), size = view->block_bytes;
    const int64_t most = size < PP_SHARED_STEP ? PP_SHARED_STEP / size : 1;
    for (;;) {
        int error = pp_shared_lock_limit(view, patience);
        if (error) return error;
        const int64_t before = pp_shared_limit(view), next = limit - before < most ? limit : before + most;
        if (next > before) error = pp_os_commit_file(view->fd, offset + before * size, (next - before) * size);
        PP_STEP();
        if (!error && next > before) STORE(&view->header->limit, next);
        PP_STEP();
        *reached = pp_shared_limit(view);
        pp_shared_unlock_limit(view);
        if (error || *reached >= limit) return error;
        pp_os_sleep(PAUSE); /* processes that wait look once in each POLL */
    }
}

/* Claims the free blocks from `begin` on, returns their memory, and frees them again.  A process that still sees the
 * old limit may claim one of them afterwards; it then sees the new limit and gives the block back.  Requires the lock
 * of the limit. */
static void punch_free_blocks(pp_shared *view, int64_t begin, int64_t end) {
    const int64_t offset = (int64_t)(view->pages - view->base), page = 4096, size = view->block_bytes;
    const int64_t most = size < PP_SHARED_STEP ? PP_SHARED_STEP / size : 1;
    for (int64_t b = begin; b < end;) {
        const int64_t first = b;
        if ((uint32_t)LOAD(&view->words[b])) {
            b++;
            continue;
        }
        if (view->lock) pp_lock_acquire(view->lock);
        while (b < end && b - first < most && claim(view, b)) b++;
        view->returned = first;
        view->returned_end = b;
        if (view->lock) pp_lock_release(view->lock);
        const int64_t from = (offset + first * size + page - 1) / page * page;
        const int64_t last = b == view->num_blocks ? page - 1 : 0; /* no block follows in its page */
        const int64_t to = (offset + b * size + last) / page * page;
        if (to > from) pp_os_punch_file(view->fd, from, to - from);
        if (view->lock) pp_lock_acquire(view->lock);
        for (int64_t i = first; i < b; i++) {
            __atomic_fetch_and(&view->words[i], ~view->bit, __ATOMIC_ACQ_REL);
            PP_STEP();
        }
        view->returned = view->returned_end = 0;
        if (view->lock) pp_lock_release(view->lock);
    }
}

int pp_shared_return_memory(pp_shared *view, int64_t begin, int64_t end, int64_t patience) {
    if (pp_shared_is_stale(view)) return ESTALE;
    if (end <= pp_shared_limit(view)) return 0;
    const int error = pp_shared_lock_limit(view, patience);
    if (error) return error;
    /* The lock keeps the limit from rising.  Otherwise a block that just got memory could lose it here. */
    const int64_t limit = pp_shared_limit(view);
    punch_free_blocks(view, begin > limit ? begin : limit, end);
    pp_shared_unlock_limit(view);
    return 0;
}

int64_t pp_shared_allocated(int fd) {
    struct stat status;
    return fstat(fd, &status) ? -1 : (int64_t)status.st_blocks * 512;
}

static void count_holders(pp_shared_census *census, uint32_t holders) {
    const uint32_t index = (uint32_t)1 << PP_SHARED_PROCESSES;
    census->in_use += holders != 0;
    census->cached += (holders & index) != 0;
    census->idle += holders == index;
    for (uint32_t left = holders & (index - 1); left; left &= left - 1) census->held[__builtin_ctz(left)]++;
}

int pp_shared_take_census(int fd, pp_shared_census *census) {
    const size_t first = offsetof(pp_shared_header, limit), size = sizeof census->header - first;
    uint64_t words[1024];
    *census = (pp_shared_census){0};
    const int error = pp_shared_read(fd, &census->header.shape);
    if (error) return error;
    const int64_t n = census->header.shape.num_blocks;
    if (pread(fd, (char *)&census->header + first, size, (off_t)first) != (ssize_t)size) return EBADMSG;
    census->limit = clamp_limit(census->header.limit, n);
    for (int64_t b = 0; b < n;) {
        const size_t wanted = n - b < 1024 ? (size_t)(n - b) * sizeof *words : sizeof words;
        const ssize_t got = pread(fd, words, wanted, (off_t)(words_offset() + (size_t)b * sizeof *words));
        if (got < (ssize_t)sizeof *words) return EBADMSG; /* another process has truncated the file */
        for (size_t i = 0; i < (size_t)got / sizeof *words; i++, b++) {
            count_holders(census, (uint32_t)words[i]);
            census->above_limit += b >= census->limit && (uint32_t)words[i];
        }
    }
    for (int i = 0; i < PP_SHARED_PROCESSES; i++) {
        const pp_shared_slot *slot = &census->header.slots[i];
        census->is_live[i] = slot->state != FREE && (pp_os_is_byte_locked(fd, i) || has_lost_its_lock(slot));
    }
    return 0;
}

int pp_shared_processes(const pp_shared *view) {
    int count = 0;
    for (int i = 0; i < PP_SHARED_PROCESSES; i++) count += LOAD(&view->header->slots[i].state) != FREE;
    return count;
}

const char *pp_shared_audit(const pp_shared *view, const int32_t *counts, int32_t *block) {
    uint64_t known = (uint64_t)3 << PP_SHARED_PROCESSES; /* bits of the cache and of blocks in quarantine */
    for (int i = 0; i < PP_SHARED_PROCESSES; i++)
        if (LOAD(&view->header->slots[i].state) != FREE) known |= (uint64_t)1 << i;
    for (int64_t b = 0; b < view->num_blocks; b++) {
        const uint64_t word = LOAD(&view->words[b]);
        *block = (int32_t)b;
        const int is_returned = view->returned <= b && b < view->returned_end;
        if (((word & view->bit) != 0) != (counts[b] > 0 || is_returned))
            return "bit of this process in holders == ref_count > 0";
        if ((uint32_t)word & ~(uint32_t)known) return "holders are processes that are attached";
    }
    return NULL;
}
