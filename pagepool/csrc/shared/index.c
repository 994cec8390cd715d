/* index.c: see index.h. */
#include "index.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "../block_hash.h"
#include "../names.h"
#include "../os/os.h"
#include "../relax.h"

#define LOAD(place) __atomic_load_n(place, __ATOMIC_ACQUIRE)
#define STORE(place, value) __atomic_store_n(place, value, __ATOMIC_RELEASE)
#define READ(place) __atomic_load_n(place, __ATOMIC_RELAXED)
#define WRITE(place, value) __atomic_store_n(place, value, __ATOMIC_RELAXED)
#define CAS(place, expected, value) \
    __atomic_compare_exchange_n(place, expected, value, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)

enum {
    AHEAD = 32,        /* blocks of which a reader prefetches the nodes */
    MOST_STEPS = 512,  /* of a reader along one chain */
    SPINS = 64,        /* before a waiting writer yields */
    YIELDS = 256,      /* before it sleeps between two attempts */
    NAP = 100000,      /* ns: a process that waits for a stopped one uses 1 to 2 % of a core */
    NAPS = 64,         /* between two searches for a dead writer */
    MOST_VICTIMS = 8192,
    MOST_AT_ONCE = 512 /* evictions or releases while the lock is held: about 0.1 ms */
};

/* How long writers wait for the lock of the index, in ns.  Caching and eviction may be refused without harm, so they do
 * not wait long for a process that is stopped.  Calls that wait again for the same process hardly wait. */
static const int64_t SHORT_WAIT = 100000000, LONG_WAIT = PP_SHARED_PATIENCE, REPEATED_WAIT = 1000000;

/* What identifies a node, except for its tokens. */
typedef struct key {
    uint64_t hash, root[2];
    int32_t parent; /* -1: the root */
    uint32_t generation; /* of the parent */
    int32_t depth;
} key;

static key first_key(const pp_shared *view, const pp_index_path *path) {
    return (key){.hash = pp_hash_fold(path->root[0] ^ view->seed, path->root[1] ^ 0x9e3779b97f4a7c15u),
                 .root = {path->root[0], path->root[1]}, .parent = -1};
}

static key next_key(const key *before, int32_t block, uint64_t word) {
    key next = *before;
    next.parent = block;
    next.generation = (uint32_t)(word >> 32);
    next.depth++;
    return next;
}

static int32_t *tokens_of(const pp_shared *view, int32_t b) { return view->tokens + (int64_t)b * view->block_size; }

static int32_t *bucket_of(const pp_shared *view, uint64_t hash) { return &view->buckets[hash & view->bucket_mask]; }

/* Readers compare tokens that a writer may write at the same time.  ThreadSanitizer needs atomics there.  They take
 * 8 ns more for a block, because compilers join no atomic accesses. */
#ifdef __SANITIZE_THREAD__
static int has_tokens(const pp_shared *view, int32_t b, const int32_t *tokens) {
    int64_t equal = 0;
    for (int64_t i = 0; i < view->block_size; i++) equal += READ(&tokens_of(view, b)[i]) == tokens[i];
    return equal == view->block_size;
}

static void write_tokens(pp_shared *view, int32_t b, const int32_t *tokens) {
    for (int64_t i = 0; i < view->block_size; i++) WRITE(&tokens_of(view, b)[i], tokens[i]);
}
#else
static int has_tokens(const pp_shared *view, int32_t b, const int32_t *tokens) {
    return !memcmp(tokens_of(view, b), tokens, (size_t)view->block_size * sizeof *tokens);
}

static void write_tokens(pp_shared *view, int32_t b, const int32_t *tokens) {
    memcpy(tokens_of(view, b), tokens, (size_t)view->block_size * sizeof *tokens);
}
#endif

static int is_behind(const pp_index_node *node, const key *wanted) {
    return READ(&node->parent) == wanted->parent && READ(&node->generation) == wanted->generation;
}

/* Returns 1 if the node of block b is the wanted one.  The caller must have read the word of b first, with acquire. */
static int is_node(const pp_shared *view, int32_t b, const key *wanted, const int32_t *tokens) {
    const pp_index_node *node = &view->nodes[b];
    return READ(&node->hash) == wanted->hash && is_behind(node, wanted) && READ(&node->root[0]) == wanted->root[0] &&
           READ(&node->root[1]) == wanted->root[1] && has_tokens(view, b, tokens);
}

/* The block with the hash behind the parent, or -1; `word` is its word.  The caller compares the node. */
static int32_t find(const pp_shared *view, const key *wanted, uint64_t *word) {
    int32_t at = LOAD(bucket_of(view, wanted->hash));
    for (int steps = 0; steps < MOST_STEPS && at > 0 && at <= view->num_blocks; steps++) {
        const int32_t b = at - 1;
        if (LOAD(&view->nodes[b].hash) == wanted->hash) {
            *word = LOAD(&view->words[b]);
            if (*word & PP_INDEX_BIT && is_behind(&view->nodes[b], wanted)) return b;
        }
        at = LOAD(&view->nodes[b].next);
    }
    return -1;
}

/* Adds the bit of this process while the index holds the block with the generation in `word`. */
static int adopt(pp_shared *view, int32_t b, uint64_t word) {
    const uint32_t generation = (uint32_t)(word >> 32);
    do {
        if ((uint32_t)(word >> 32) != generation || !(word & PP_INDEX_BIT)) return 0;
        PP_STEP();
    } while (!CAS(&view->words[b], &word, word | view->bit));
    PP_STEP();
    view->held += !(word & view->bit);
    if (view->held > view->peak) view->peak = view->held;
    return 1;
}

/* Computes the hashes of the next n blocks, and prefetches what a look-up of them reads.  It saves 4 us in a hit of
 * 1,000 blocks that lie anywhere in a pool of 100,000. */
static void prefetch(const pp_shared *view, uint64_t hash, const int32_t *tokens, int64_t n, uint64_t *hashes) {
    for (int64_t i = 0; i < n; i++) {
        hashes[i] = hash = pp_hash_block(hash, tokens + i * view->block_size, view->block_size);
        __builtin_prefetch(bucket_of(view, hash));
    }
    for (int64_t i = 0; i < n; i++) {
        const int32_t b = LOAD(bucket_of(view, hashes[i])) - 1;
        if (b < 0 || b >= view->num_blocks) return;
        __builtin_prefetch(&view->nodes[b]);
        __builtin_prefetch(&view->words[b], 1);
        __builtin_prefetch(tokens_of(view, b));
    }
}

int64_t pp_index_match(pp_shared *view, const pp_index_path *path, int32_t *counts, int32_t *blocks) {
    if (pp_shared_is_stale(view)) return 0;
    const uint64_t now = counts ? __atomic_add_fetch(&view->header->tick, 1, __ATOMIC_RELAXED) : 0;
    key wanted = first_key(view, path);
    uint64_t hashes[AHEAD];
    for (int64_t i = 0; i < path->n; i++) {
        const int32_t *tokens = path->tokens + i * view->block_size;
        const int64_t left = path->n - i;
        uint64_t word;
        if (i % AHEAD == 0) prefetch(view, wanted.hash, tokens, left < AHEAD ? left : AHEAD, hashes);
        wanted.hash = hashes[i % AHEAD];
        const int32_t b = find(view, &wanted, &word);
        if (b < 0 || (counts && (counts[b] == INT32_MAX || !adopt(view, b, word)))) return i;
        if (!is_node(view, b, &wanted, tokens)) {
            if (counts && !counts[b]) pp_shared_drop(view, &b, 1);
            return i;
        }
        if (counts) {
            __atomic_store_n(&counts[b], counts[b] + 1, __ATOMIC_RELEASE);
            WRITE(&view->nodes[b].stamp, now);
        }
        if (blocks) blocks[i] = b;
        wanted = next_key(&wanted, b, word);
    }
    return path->n;
}

static void lock_allocator(pp_shared *view) {
    if (view->lock) pp_lock_acquire(view->lock);
}

static void unlock_allocator(pp_shared *view) {
    if (view->lock) pp_lock_release(view->lock);
}

/* How many of the first tokens block b has, if it is behind the wanted parent and root. */
static int64_t count_equal(const pp_shared *view, int32_t b, const key *wanted, const int32_t *tokens, int64_t n) {
    const pp_index_node *node = &view->nodes[b];
    const int32_t *its = tokens_of(view, b);
    int64_t count = 0;
    if (!is_behind(node, wanted) || READ(&node->root[0]) != wanted->root[0] || READ(&node->root[1]) != wanted->root[1])
        return 0;
    while (count < n && READ(&its[count]) == tokens[count]) count++;
    return count;
}

int64_t pp_index_match_part(pp_shared *view, const pp_index_path *path, const int32_t *blocks, int64_t n,
                            const int32_t *tokens, int64_t num_tokens, int32_t *counts, int32_t *block) {
    if (pp_shared_is_stale(view)) return 0;
    key wanted = first_key(view, path);
    for (int64_t i = 0; i < n; i++) {
        wanted.hash = pp_hash_block(wanted.hash, path->tokens + i * view->block_size, view->block_size);
        wanted = next_key(&wanted, blocks[i], LOAD(&view->words[blocks[i]]));
    }
    if (num_tokens >= view->block_size) num_tokens = view->block_size - 1;
    int64_t most = 0;
    *block = -1;
    for (int32_t b = 0; b < view->num_blocks; b++) {
        if (!(LOAD(&view->words[b]) & PP_INDEX_BIT)) continue;
        const int64_t count = count_equal(view, b, &wanted, tokens, num_tokens);
        if (count <= most) continue;
        most = count;
        *block = b;
    }
    const int32_t b = *block;
    if (b < 0) return 0;
    int32_t its[PP_MAX_BLOCK_SIZE]; /* a copy: another process that holds the block may cache it again */
    lock_allocator(view);
    int has_it = counts[b] < INT32_MAX && adopt(view, b, LOAD(&view->words[b]));
    for (int64_t i = 0; has_it && i < view->block_size; i++) its[i] = READ(&tokens_of(view, b)[i]);
    if (has_it && (memcmp(its, tokens, (size_t)most * sizeof *its) ||
                   pp_hash_block(wanted.hash, its, view->block_size) != READ(&view->nodes[b].hash))) {
        if (!counts[b]) pp_shared_drop(view, &b, 1);
        has_it = 0;
    }
    if (has_it) __atomic_store_n(&counts[b], counts[b] + 1, __ATOMIC_RELEASE);
    unlock_allocator(view);
    return has_it ? most : 0;
}

static void link_node(pp_shared *view, int32_t b) {
    int32_t *bucket = bucket_of(view, view->nodes[b].hash);
    STORE(&view->nodes[b].next, *bucket);
    PP_STEP();
    STORE(bucket, b + 1);
    PP_STEP();
}

static void unlink_node(pp_shared *view, int32_t b) {
    int32_t *link = bucket_of(view, view->nodes[b].hash);
    for (int64_t steps = 0; steps <= view->num_blocks && *link > 0 && *link <= view->num_blocks; steps++) {
        if (*link == b + 1) {
            STORE(link, view->nodes[b].next);
            PP_STEP();
            return;
        }
        link = &view->nodes[*link - 1].next;
    }
}

static void rebuild(pp_shared *view) {
    for (uint64_t i = 0; i <= view->bucket_mask; i++) STORE(&view->buckets[i], 0);
    PP_STEP();
    for (int32_t b = 0; b < view->num_blocks; b++)
        if (LOAD(&view->words[b]) & PP_INDEX_BIT) link_node(view, b);
}

/* Whether no attached process can have locked the index: then the lock word was damaged. */
static int is_damaged(const pp_shared *view, uint64_t owner) {
    if (owner == view->bit || owner & (owner - 1) || owner >= PP_INDEX_BIT) return 1;
    return LOAD(&view->header->slots[__builtin_ctzll(owner)].state) == 0;
}

/* The lock is held by another process or by another thread of this one.  Returns 0 when the time is over. */
static int wait_for_index(pp_shared *view, uint64_t owner, int64_t tries, int64_t patience, int64_t *until) {
    if (tries < SPINS) {
        pp_relax();
    } else if (tries < YIELDS) {
        pp_os_yield();
    } else {
        const int64_t now = pp_os_clock();
        if (owner && owner == READ(&view->stuck) && patience == SHORT_WAIT) patience = REPEATED_WAIT;
        if (!*until) *until = now + patience;
        if (now >= *until) {
            WRITE(&view->stuck, owner);
            WRITE(&view->blocker, pp_shared_process_of(view, owner));
            return 0;
        }
        pp_os_sleep(NAP);
    }
    return 1;
}

/* Waits until this process has the index.  Returns 0, ESTALE or ETIMEDOUT.  Threads of one process wait in turn. */
static int begin(pp_shared *view, int64_t patience) {
    int64_t until = 0;
    int is_writer = 0, error = 0;
    for (int64_t tries = 1;; tries++) {
        uint64_t owner = 0;
        /* In a child after fork, a thread that exists only in the parent may hold `writers`. */
        if (pp_shared_is_stale(view)) {
            error = ESTALE;
            break;
        }
        if (!is_writer) is_writer = pp_lock_try(&view->writers);
        if (is_writer && CAS(&view->header->index_lock, &owner, view->bit)) break;
        if (!wait_for_index(view, owner, tries, patience, &until)) {
            error = ETIMEDOUT;
            break;
        }
        if (!owner || tries < YIELDS || (tries - YIELDS) % NAPS) continue;
        if (view->lock) pp_lock_acquire(view->lock);
        pp_shared_reap(view);
        if (view->lock) pp_lock_release(view->lock);
        if (is_damaged(view, owner) && CAS(&view->header->index_lock, &owner, view->bit)) {
            STORE(&view->header->dirty, 1);
            break;
        }
    }
    if (error) {
        if (is_writer) pp_lock_release(&view->writers);
        return error;
    }
    WRITE(&view->stuck, 0);
    PP_STEP();
    if (LOAD(&view->header->dirty)) rebuild(view);
    STORE(&view->header->dirty, 1);
    PP_STEP();
    return 0;
}

static void end(pp_shared *view) {
    STORE(&view->header->dirty, 0);
    PP_STEP();
    STORE(&view->header->index_lock, 0);
    PP_STEP();
    pp_lock_release(&view->writers);
}

int pp_index_begin(pp_shared *view) { return !begin(view, SHORT_WAIT); }

void pp_index_end(pp_shared *view) { end(view); }

/* Clears bit 30; with `only_idle` only if no other bit is set.  Returns 0 if it was not cleared. */
static int release_block(pp_shared *view, int32_t b, int only_idle) {
    uint64_t word = LOAD(&view->words[b]);
    do {
        if (!(word & PP_INDEX_BIT) || (only_idle && (uint32_t)word != PP_INDEX_BIT)) return 0;
        PP_STEP();
    } while (!CAS(&view->words[b], &word, word & ~(uint64_t)PP_INDEX_BIT));
    PP_STEP();
    unlink_node(view, b); /* no other writer can use the node before this one releases the lock */
    return 1;
}

/* Returns 1 if block b is cached for another path.  The hash covers the root and all tokens.  A node of the same path
 * that is not found is one whose parent was evicted: it gets a new parent. */
static int is_of_other_path(const pp_shared *view, int32_t b, uint64_t hash, const int32_t *tokens) {
    return LOAD(&view->words[b]) & PP_INDEX_BIT &&
           (READ(&view->nodes[b].hash) != hash || !has_tokens(view, b, tokens));
}

int64_t pp_index_insert(pp_shared *view, const pp_index_path *path, const int32_t *blocks, const int32_t *counts,
                        uint64_t epoch, int64_t *failed) {
    key wanted = first_key(view, path);
    int64_t i = 0, fresh = 0;
    if (begin(view, SHORT_WAIT)) return 0;
    if (pp_index_epoch(view) != epoch) {
        end(view);
        return 0;
    }
    /* If the limit falls now, pp_index_set_limit waits for this call and then evicts the blocks above it. */
    const int64_t limit = pp_shared_limit(view);
    const uint64_t now = __atomic_add_fetch(&view->header->tick, 1, __ATOMIC_RELAXED);
    for (int is_known = 1; i < path->n; i++) {
        const int32_t *tokens = path->tokens + i * view->block_size;
        uint64_t word;
        wanted.hash = pp_hash_block(wanted.hash, tokens, view->block_size);
        const int32_t known = is_known ? find(view, &wanted, &word) : -1;
        if (known >= 0 && is_node(view, known, &wanted, tokens)) {
            WRITE(&view->nodes[known].stamp, now);
            wanted = next_key(&wanted, known, word);
            continue;
        }
        if (is_known) { /* check the rest before anything changes */
            is_known = 0;
            uint64_t hash = wanted.hash;
            for (*failed = i; *failed < path->n; ++*failed) {
                const int32_t b = blocks[*failed], *its = path->tokens + *failed * view->block_size;
                const int is_held = b >= 0 && b < view->num_blocks && __atomic_load_n(&counts[b], __ATOMIC_ACQUIRE) > 0;
                if (*failed > i) hash = pp_hash_block(hash, its, view->block_size);
                if (!is_held || is_of_other_path(view, b, hash, its)) {
                    end(view);
                    return -1;
                }
            }
        }
        const int32_t b = blocks[i];
        pp_index_node *node = &view->nodes[b];
        if (b >= limit) break;
        if (is_of_other_path(view, b, wanted.hash, tokens)) break; /* given twice */
        if (release_block(view, b, 0)) fresh--;
        STORE(&node->hash, wanted.hash);
        PP_STEP();
        WRITE(&node->root[0], wanted.root[0]);
        PP_STEP();
        WRITE(&node->root[1], wanted.root[1]);
        PP_STEP();
        WRITE(&node->parent, wanted.parent);
        PP_STEP();
        WRITE(&node->generation, wanted.generation);
        PP_STEP();
        WRITE(&node->depth, wanted.depth);
        PP_STEP();
        WRITE(&node->stamp, now);
        write_tokens(view, b, tokens);
        PP_STEP();
        word = __atomic_fetch_or(&view->words[b], (uint64_t)PP_INDEX_BIT, __ATOMIC_ACQ_REL);
        PP_STEP();
        link_node(view, b);
        wanted = next_key(&wanted, b, word);
        fresh++;
    }
    if (fresh > 0) __atomic_fetch_add(&view->header->inserted, (uint64_t)fresh, __ATOMIC_RELAXED);
    end(view);
    return fresh;
}

/* Whether a is evicted before b: the one that was used last longer ago, or a child before its parent. */
static int is_older(const pp_index_victim *a, const pp_index_victim *b) {
    return a->stamp != b->stamp ? a->stamp < b->stamp : a->depth > b->depth;
}

static int by_age(const void *left, const void *right) { /* the oldest is last */
    return is_older(left, right) - is_older(right, left);
}

/* Moves the `kept` oldest of n victims to the front, the youngest of these to kept - 1: Hoare's quickselect. */
static void keep_oldest(pp_index_victim *all, int64_t n, int64_t kept) {
    for (int64_t low = 0, high = n - 1; low < high;) {
        const pp_index_victim pivot = all[low + (high - low) / 2];
        int64_t i = low - 1, j = high + 1;
        for (;;) {
            do i++; while (is_older(&all[i], &pivot));
            do j--; while (is_older(&pivot, &all[j]));
            if (i >= j) break;
            const pp_index_victim swapped = all[i];
            all[i] = all[j];
            all[j] = swapped;
        }
        if (kept - 1 <= j)
            high = j;
        else
            low = j + 1;
    }
}

/* Lists at most MOST_VICTIMS idle blocks, the oldest last; `list` has room for twice as many.  It takes 4 ms for
 * 400,000 blocks, so it is done without the lock of the index: each victim is compared again before it is evicted. */
static int64_t list_victims(const pp_shared *view, pp_index_victim *list) {
    int64_t count = 0;
    int is_full = 0;
    for (int32_t b = 0; b < view->num_blocks; b++) {
        if ((uint32_t)LOAD(&view->words[b]) != PP_INDEX_BIT) continue;
        const pp_index_victim victim = {READ(&view->nodes[b].stamp), b, READ(&view->nodes[b].depth)};
        if (is_full && !is_older(&victim, &list[MOST_VICTIMS - 1])) continue;
        list[count++] = victim;
        if (count < 2 * MOST_VICTIMS) continue;
        keep_oldest(list, count, MOST_VICTIMS);
        count = MOST_VICTIMS;
        is_full = 1;
    }
    if (count > MOST_VICTIMS) {
        keep_oldest(list, count, MOST_VICTIMS);
        count = MOST_VICTIMS;
    }
    qsort(list, (size_t)count, sizeof *list, by_age);
    return count;
}

/* Where an evicted block goes: to this process, or with NULL to the free blocks. */
typedef struct evicted {
    pp_index_names *names;
    int32_t *counts, *blocks;
    int64_t count;
} evicted;

/* Moves the hold of the index on an idle block to this process.  Requires the locks of index and allocator. */
static int take_idle(pp_shared *view, int32_t b, int32_t *counts) {
    uint64_t word = LOAD(&view->words[b]);
    do {
        if ((uint32_t)word != PP_INDEX_BIT) return 0;
        PP_STEP();
    } while (!CAS(&view->words[b], &word, (word & ~(uint64_t)PP_INDEX_BIT) | view->bit));
    PP_STEP();
    __atomic_store_n(&counts[b], 1, __ATOMIC_RELEASE);
    if (++view->held > view->peak) view->peak = view->held;
    unlink_node(view, b);
    return 1;
}

static int evict_one(pp_shared *view, int32_t b, evicted *to) {
    if (to) {
        pp_index_name(view, to->names, b);
        lock_allocator(view);
        const int has_it = take_idle(view, b, to->counts);
        unlock_allocator(view);
        if (has_it) to->blocks[to->count++] = b;
        return has_it;
    }
    if (!release_block(view, b, 1)) return 0;
    lock_allocator(view);
    if (view->num_hints < view->num_blocks) view->hints[view->num_hints++] = b;
    unlock_allocator(view);
    return 1;
}

/* Evicts from the list until n blocks are evicted, or the list ends.  Requires the index.  Without `to`, blocks above
 * the limit do not count. */
static int64_t evict_listed(pp_shared *view, int64_t n, evicted *to) {
    const int64_t limit = to ? view->num_blocks : pp_shared_limit(view);
    int64_t done = 0;
    while (done < n && view->num_victims) {
        const pp_index_victim victim = view->victims[--view->num_victims];
        const int is_used = READ(&view->nodes[victim.block].stamp) != victim.stamp; /* since it was listed */
        if (!is_used && evict_one(view, victim.block, to)) done += victim.block < limit;
    }
    __atomic_fetch_add(&view->header->evicted, (uint64_t)done, __ATOMIC_RELAXED);
    return done;
}

static int64_t evict(pp_shared *view, int64_t n, evicted *to) {
    const size_t room = (size_t)(view->num_blocks < 2 * MOST_VICTIMS ? view->num_blocks : 2 * MOST_VICTIMS);
    pp_index_victim *list = NULL;
    int64_t done = 0, count = 0;
    while (done < n && !begin(view, SHORT_WAIT)) {
        if (list) { /* another thread may have installed one meanwhile: its blocks are listed again later */
            free(view->victims);
            view->victims = list;
            view->num_victims = count;
            list = NULL;
        }
        done += evict_listed(view, n - done < MOST_AT_ONCE ? n - done : MOST_AT_ONCE, to);
        const int is_empty = !view->num_victims;
        end(view);
        if (done == n) break;
        if (!is_empty) {
            pp_os_yield(); /* other writers wait */
            continue;
        }
        list = malloc((room + 1) * sizeof *list);
        count = list ? list_victims(view, list) : 0;
        if (!count) break;
    }
    free(list);
    return done;
}

int64_t pp_index_evict(pp_shared *view, int64_t n) { return evict(view, n, NULL); }

int64_t pp_index_evict_held(pp_shared *view, int64_t n, pp_index_names *names, int32_t *counts, int32_t *blocks) {
    evicted to = {.names = names, .counts = counts, .blocks = blocks};
    evict(view, n, &to);
    return to.count;
}

int pp_index_take(pp_shared *view, int32_t b, int32_t *counts) {
    lock_allocator(view);
    const int has_it = take_idle(view, b, counts);
    unlock_allocator(view);
    if (has_it) __atomic_fetch_add(&view->header->evicted, 1, __ATOMIC_RELAXED);
    return has_it;
}

int64_t pp_index_hold(pp_shared *view, int64_t n, pp_index_names *names, int32_t *counts, int32_t *blocks,
                      int32_t *next) {
    int64_t count = 0;
    if (!pp_index_begin(view)) {
        *next = (int32_t)view->num_blocks;
        return 0;
    }
    lock_allocator(view);
    for (; *next < view->num_blocks && count < n; ++*next) {
        const int32_t b = *next;
        if (!pp_index_name(view, names, b) || names->offered[b] || counts[b] == INT32_MAX) continue;
        if (!adopt(view, b, LOAD(&view->words[b]))) continue;
        __atomic_store_n(&counts[b], counts[b] + 1, __ATOMIC_RELEASE);
        blocks[count++] = b;
    }
    unlock_allocator(view);
    pp_index_end(view);
    return count;
}

/* The epoch rises before the first block is forgotten, because the process can be killed in between.  It rises again
 * after the last one, because a look-up in between can find a block that is forgotten later. */
int64_t pp_index_forget(pp_shared *view, const int32_t *blocks, int64_t n) {
    int64_t count = 0, i = 0;
    if (!blocks) n = view->num_blocks;
    do {
        int64_t released = 0;
        if (begin(view, LONG_WAIT)) return -1;
        if (n && !i) STORE(&view->header->epoch, pp_index_epoch(view) + 1);
        PP_STEP();
        for (; i < n && released < MOST_AT_ONCE; i++) {
            const int32_t b = blocks ? blocks[i] : (int32_t)i;
            if (b >= 0 && b < view->num_blocks) released += release_block(view, b, 0);
        }
        __atomic_fetch_add(&view->header->forgotten, (uint64_t)released, __ATOMIC_RELAXED);
        if (n && i == n) STORE(&view->header->epoch, pp_index_epoch(view) + 1);
        PP_STEP();
        end(view);
        count += released;
        if (i < n) pp_os_yield(); /* other writers wait */
    } while (i < n);
    return count;
}

/* Lowers the limit and evicts the cached blocks above it.  Does nothing if the limit is not `now`. */
static int lower_limit(pp_shared *view, int64_t limit, int64_t now, int64_t patience) {
    int64_t b = limit;
    int error = pp_shared_lock_limit(view, patience);
    if (error) return error;
    if (pp_shared_limit(view) == now) do {
        int64_t count = 0;
        error = begin(view, patience);
        if (error) break;
        /* Calls of pp_index_insert that saw the old limit have ended. */
        STORE(&view->header->limit, limit);
        PP_STEP();
        for (; b < view->num_blocks && count < MOST_AT_ONCE; b++) count += release_block(view, (int32_t)b, 0);
        __atomic_fetch_add(&view->header->evicted, (uint64_t)count, __ATOMIC_RELAXED);
        end(view);
        pp_os_yield(); /* other writers wait */
    } while (b < view->num_blocks);
    pp_shared_unlock_limit(view);
    return error;
}

int pp_index_set_limit(pp_shared *view, int64_t limit, int64_t patience) {
    if (limit < 0 || limit > view->num_blocks) return EINVAL;
    const int64_t before = pp_shared_limit(view);
    int64_t reached = before;
    int error;
    if (limit > before) {
        error = pp_shared_raise_limit(view, limit, patience, &reached);
        if (error && error != ETIMEDOUT && reached > before) lower_limit(view, before, reached, patience);
    } else {
        error = lower_limit(view, limit, before, patience);
    }
    if (error == ETIMEDOUT || error == ESTALE) return error;
    /* A step that failed may have allocated some memory, too. */
    const int missed = pp_shared_return_memory(view, 0, view->num_blocks, patience);
    return error ? error : missed;
}

int64_t pp_index_limit_without(const pp_shared *view, int64_t bytes) {
    int64_t limit = pp_shared_limit(view);
    for (int64_t b = limit - 1; b >= 0 && bytes > 0; b--) {
        if ((uint32_t)__atomic_load_n(&view->words[b], __ATOMIC_RELAXED) & ~PP_INDEX_BIT) continue;
        bytes -= view->block_bytes;
        limit = b;
    }
    return limit;
}

int64_t pp_index_count(const pp_shared *view, int only_idle) {
    const int64_t end = only_idle ? pp_shared_limit(view) : view->num_blocks;
    int64_t count = 0;
    for (int64_t b = 0; b < end; b++) {
        const uint32_t holders = (uint32_t)__atomic_load_n(&view->words[b], __ATOMIC_RELAXED);
        count += only_idle ? holders == PP_INDEX_BIT : (holders & PP_INDEX_BIT) != 0;
    }
    return count;
}

const char *pp_index_audit(pp_shared *view) {
    int64_t cached = 0, linked = 0, seen;
    const char *broken = NULL;
    const int missed = begin(view, LONG_WAIT);
    if (missed) return missed == ESTALE ? NULL : "the lock of the index is free within 2 s";
    for (int32_t b = 0; b < view->num_blocks; b++) {
        if (!(LOAD(&view->words[b]) & PP_INDEX_BIT)) continue;
        cached++;
        seen = 0;
        int32_t at = *bucket_of(view, view->nodes[b].hash);
        for (int64_t steps = 0; at > 0 && at <= view->num_blocks && steps <= view->num_blocks; steps++) {
            seen += at == b + 1;
            at = view->nodes[at - 1].next;
        }
        if (seen != 1) broken = "a cached block is once in the chain of its hash";
    }
    for (uint64_t i = 0; i <= view->bucket_mask; i++) {
        int32_t at = view->buckets[i];
        for (; at > 0 && at <= view->num_blocks && linked <= cached; linked++) at = view->nodes[at - 1].next;
    }
    if (linked != cached) broken = "blocks in chains are cached";
    end(view);
    return broken;
}

/* Names. */

enum { REACHED = 4, LOST = 8 }; /* pp_index_named.state, while `added` and `removed` look at all blocks */

static int is_known(const pp_shared *view, const pp_index_names *names, int32_t b, uint64_t word) {
    const pp_index_named *named = &names->of[b];
    return named->state & PP_INDEX_KNOWN && named->generation == (uint32_t)(word >> 32) &&
           named->hash == READ(&view->nodes[b].hash);
}

static void know(const pp_shared *view, pp_index_names *names, int32_t b, uint64_t word, uint64_t hash,
                 const uint64_t *parent, const int32_t *tokens) {
    pp_index_named *named = &names->of[b];
    named->hash = hash;
    named->generation = (uint32_t)(word >> 32);
    named->state = PP_INDEX_KNOWN | (named->state & (REACHED | LOST));
    memcpy(named->parent, parent, sizeof named->parent);
    pp_name_block(parent, tokens, view->block_size, named->name);
    if (names->offered) names->offered[b] = 0;
}

static void name_root(const pp_index_names *names, const uint64_t *root, uint64_t *name) {
    int32_t words[4];
    memcpy(words, root, sizeof words);
    pp_name_block(names->secret, words, 4, name);
}

/* Walks up to a block with known names or to the root, and down again.  The lock of the index keeps the nodes. */
static const pp_index_named *name_of(const pp_shared *view, pp_index_names *names, int32_t b) {
    int64_t depth = 0;
    for (int32_t at = b; at >= 0;) {
        const uint64_t word = LOAD(&view->words[at]);
        const pp_index_node *node = &view->nodes[at];
        if (!(word & PP_INDEX_BIT) || depth == view->num_blocks) return NULL;
        if (is_known(view, names, at, word)) break;
        names->path[depth++] = at;
        at = node->parent;
        if (at >= view->num_blocks || at < -1) return NULL;
        if (at >= 0 && (uint32_t)(LOAD(&view->words[at]) >> 32) != node->generation) return NULL;
    }
    while (depth--) {
        const int32_t at = names->path[depth];
        const pp_index_node *node = &view->nodes[at];
        uint64_t parent[2], before;
        if (node->parent < 0) {
            const pp_index_path path = {.root = {node->root[0], node->root[1]}};
            before = first_key(view, &path).hash;
            name_root(names, node->root, parent);
        } else {
            before = view->nodes[node->parent].hash;
            memcpy(parent, names->of[node->parent].name, sizeof parent);
        }
        if (pp_hash_block(before, tokens_of(view, at), view->block_size) != node->hash) return NULL;
        know(view, names, at, LOAD(&view->words[at]), node->hash, parent, tokens_of(view, at));
    }
    return &names->of[b];
}

int pp_index_is_known(const pp_shared *view, const pp_index_names *names, int32_t b) {
    return is_known(view, names, b, LOAD(&view->words[b]));
}

const pp_index_named *pp_index_name(const pp_shared *view, pp_index_names *names, int32_t b) {
    pp_lock_acquire(&names->lock);
    const pp_index_named *found = name_of(view, names, b);
    pp_lock_release(&names->lock);
    return found;
}

void pp_index_know(const pp_shared *view, pp_index_names *names, const pp_index_path *path, const int32_t *blocks,
                   int64_t n) {
    uint64_t hash = first_key(view, path).hash, parent[2];
    if (pp_shared_is_stale(view)) return;
    pp_lock_acquire(&names->lock);
    name_root(names, path->root, parent);
    for (int64_t i = 0; i < n; i++) {
        const int32_t *tokens = path->tokens + i * view->block_size;
        if (blocks[i] < 0 || blocks[i] >= view->num_blocks) break;
        const uint64_t word = LOAD(&view->words[blocks[i]]);
        const pp_index_named *named = &names->of[blocks[i]];
        hash = pp_hash_block(hash, tokens, view->block_size);
        const int is_same = named->state & PP_INDEX_KNOWN && named->generation == (uint32_t)(word >> 32);
        if (!is_same || named->hash != hash) know(view, names, blocks[i], word, hash, parent, tokens);
        memcpy(parent, named->name, sizeof parent);
    }
    pp_lock_release(&names->lock);
}

/* Whether block `parent` still has the prefix behind which the node was cached.  The generation is not enough: a
 * process that holds a block can forget it and cache it again with other tokens. */
static int is_link(const pp_shared *view, int32_t parent, const pp_index_node *node) {
    const int32_t b = (int32_t)(node - view->nodes);
    return (uint32_t)(LOAD(&view->words[parent]) >> 32) == node->generation &&
           pp_hash_block(view->nodes[parent].hash, tokens_of(view, b), view->block_size) == node->hash;
}

/* Whether a look-up can find block b: every block before it is cached with the prefix behind which its child is.
 * Notes the result for all blocks on the way, so that a call for every block takes O(num_blocks). */
static int is_reached(const pp_shared *view, pp_index_names *names, int32_t b) {
    int64_t depth = 0;
    uint32_t found = REACHED;
    for (int32_t at = b; at >= 0;) {
        const pp_index_node *node = &view->nodes[at];
        const uint32_t known = names->of[at].state & (REACHED | LOST);
        if (known || !(LOAD(&view->words[at]) & PP_INDEX_BIT) || depth == view->num_blocks) {
            found = known ? known : LOST;
            break;
        }
        names->path[depth++] = at;
        at = node->parent;
        if (at < -1 || at >= view->num_blocks) found = LOST;
        if (at >= 0 && found == REACHED && !is_link(view, at, node)) found = LOST;
        if (found == LOST) break;
    }
    while (depth) names->of[names->path[--depth]].state |= found;
    return found == REACHED;
}

int64_t pp_index_removed(const pp_shared *view, pp_index_names *names, int32_t *blocks) {
    int64_t count = 0;
    for (int32_t b = 0; b < view->num_blocks; b++) names->of[b].state &= PP_INDEX_KNOWN | PP_INDEX_LISTED;
    for (int32_t b = 0; b < view->num_blocks; b++) {
        if (!(names->of[b].state & PP_INDEX_LISTED)) continue;
        const uint64_t word = LOAD(&view->words[b]);
        if (word & PP_INDEX_BIT && is_known(view, names, b, word) && is_reached(view, names, b)) continue;
        names->of[b].state &= ~(uint32_t)(PP_INDEX_KNOWN | PP_INDEX_LISTED);
        blocks[count++] = b;
    }
    return count;
}

int64_t pp_index_added(const pp_shared *view, pp_index_names *names, int32_t *blocks) {
    int64_t count = 0;
    for (int32_t b = 0; b < view->num_blocks; b++) {
        if (names->of[b].state & PP_INDEX_LISTED || !is_reached(view, names, b)) continue;
        /* The names of a block can be known when those of a block before it are not: it was removed and came back. */
        int32_t unnamed = b;
        while (unnamed >= 0 && !(names->of[unnamed].state & PP_INDEX_LISTED) && name_of(view, names, unnamed))
            unnamed = view->nodes[unnamed].parent;
        if (unnamed >= 0 && !(names->of[unnamed].state & PP_INDEX_LISTED)) continue;
        const int64_t first = count;
        for (int32_t at = b; at >= 0 && !(names->of[at].state & PP_INDEX_LISTED); at = view->nodes[at].parent) {
            names->of[at].state |= PP_INDEX_LISTED;
            blocks[count++] = at;
        }
        for (int64_t i = first, j = count - 1; i < j; i++, j--) { /* parents first */
            const int32_t block = blocks[i];
            blocks[i] = blocks[j];
            blocks[j] = block;
        }
    }
    return count;
}
