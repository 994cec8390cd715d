/* shared/index.h: the prefix index of a shared pool: which block holds the keys and values of which tokens.
 *
 * Block b has node b.  Bit 30 of the word of b says that node b is valid; the bit also holds the block.
 *
 *   truth     bit 30, and of a node: root, parent, generation of the parent, tokens, hash, depth
 *   derived   buckets, and `next` of a node.  `dirty` is set while they may be wrong.
 *
 * A node is found if the root, the parent with its generation and all tokens are equal.  So when a parent is evicted
 * and its block used again, the nodes behind it are not found any more.  They are evicted in their turn.
 *
 * Readers take no lock.  A reader finds a node by its hash, adds its bit to the word by a compare-and-swap that
 * requires bit 30 and the generation that it has seen, and then compares the node: it is not written while bit 30 is
 * set, and the page is not written while two bits are set.  Steps are bounded and ids checked, so a reader that meets a
 * writer can miss a block, but never return a wrong one.  The word is written with release after the node and the page,
 * and read with acquire before them.
 *
 * Writers hold the lock word, which has the number of their slot.  The sweep of a dead process frees its lock.  `dirty`
 * is still set then, and the next writer builds buckets from the nodes.
 *
 *   bit 30 of word b             <=>  node b is in the chain of its hash, once      lock free, not dirty
 *   node b is not written             while bit 30 of word b is set, except `stamp` and `next`
 *   bit 30 of word b              =   0 for b >= limit, lock free and no call of pp_index_set_limit under way
 */
#ifndef PP_SHARED_INDEX_H
#define PP_SHARED_INDEX_H

#include "pool.h"

#define PP_INDEX_BIT ((uint32_t)1 << PP_SHARED_PROCESSES)

/* A path: n blocks of tokens behind a root, the 128-bit digest of salt and extra keys. */
typedef struct pp_index_path {
    uint64_t root[2];
    const int32_t *tokens;
    int64_t n;
} pp_index_path;

/* Finds the longest cached beginning of the path.  With `counts`, the private reference counts, takes a reference to
 * each block and requires the lock of the allocator; with NULL it takes none.  Returns the number of blocks. */
int64_t pp_index_match(pp_shared *view, const pp_index_path *path, int32_t *counts, int32_t *blocks);

/* Finds the cached block behind the first n blocks of the path, which the caller holds, that shares the most leading
 * tokens with `tokens`; the lowest block wins a tie.  Takes a reference to it, with the lock of the allocator.  Returns
 * the number of these tokens, below block_size, or 0.  Reads the node of every cached block: up to 1 ms for 100,000. */
int64_t pp_index_match_part(pp_shared *view, const pp_index_path *path, const int32_t *blocks, int64_t n,
                            const int32_t *tokens, int64_t num_tokens, int32_t *counts, int32_t *block);

/* The functions below wait for the lock of the index, and must be called without the lock of the allocator.  They do
 * nothing if the view is stale.  If another process keeps the lock, because it is stopped, pp_index_insert and
 * pp_index_evict give up after 0.1 s, and after 1 ms while the same process keeps it.  The others give up after 2 s;
 * `blocker` of the view has the process then. */

/* Caches blocks of the calling process for the path; returns how many are new.  If the index has another block for the
 * same tokens, that one stays.  Stops at a new block at or above the limit.  Does nothing if blocks were forgotten
 * since `epoch`.  Returns -1 if blocks[failed] is out of range, free, or cached for another path. */
int64_t pp_index_insert(pp_shared *view, const pp_index_path *path, const int32_t *blocks, const int32_t *counts,
                        uint64_t epoch, int64_t *failed);

/* Rises during each call of pp_index_forget.  Read it before the first look-up or computation of a block. */
static inline uint64_t pp_index_epoch(const pp_shared *view) {
    return __atomic_load_n(&view->header->epoch, __ATOMIC_ACQUIRE);
}

/* A cached block with its names, as this process derived them from the tokens in the index: see names.h.  They are
 * valid while the block has this generation and its node this hash. */
typedef struct pp_index_named {
    uint64_t hash;
    uint32_t generation;
    uint32_t state; /* PP_INDEX_KNOWN, PP_INDEX_LISTED */
    uint64_t name[2];
    uint64_t parent[2]; /* the name of the prefix before the block */
} pp_index_named;

enum {
    PP_INDEX_KNOWN = 1, /* the names are derived */
    PP_INDEX_LISTED = 2 /* pp_index_added has returned the block, and pp_index_removed has not */
};

/* The names of all blocks under one secret.  Private to the process. */
typedef struct pp_index_names {
    uint64_t secret[2];
    pp_index_named *of; /* one of each block */
    int32_t *path;      /* room for num_blocks */
    uint8_t *offered;   /* of each block: set to 0 when another prefix is known to have the block; or NULL */
    pp_lock lock;       /* guards the fields above; taken after the lock of the index */
} pp_index_names;

/* Evicts blocks that only the index holds, until n of them are below the limit.  Those that were found or cached the
 * longest time ago go first.  Returns the number of evicted blocks below the limit. */
int64_t pp_index_evict(pp_shared *view, int64_t n);

/* Evicts like pp_index_evict, up to n blocks.  This process gets a reference to each, so that it can copy the pages
 * before it frees the blocks.  The names of those that can be found are known afterwards.  Returns their number, with
 * blocks above the limit. */
int64_t pp_index_evict_held(pp_shared *view, int64_t n, pp_index_names *names, int32_t *counts, int32_t *blocks);

/* Takes a reference to each of up to n cached blocks, from block *next on, that are not offered and that can be found.
 * Their names are known afterwards.  Returns their number; *next is num_blocks at the end. */
int64_t pp_index_hold(pp_shared *view, int64_t n, pp_index_names *names, int32_t *counts, int32_t *blocks,
                      int32_t *next);

/* Derives the names of blocks that have the tokens of the path.  Takes no lock of the index.  If the index has another
 * prefix in one of the blocks, the names of that block do not count as known. */
void pp_index_know(const pp_shared *view, pp_index_names *names, const pp_index_path *path, const int32_t *blocks,
                   int64_t n);

/* Whether the names of block b are those of what it was last cached for. */
int pp_index_is_known(const pp_shared *view, const pp_index_names *names, int32_t b);

static inline const int32_t *pp_index_tokens(const pp_shared *view, int32_t b) {
    return view->tokens + (int64_t)b * view->block_size;
}

/* The names of block b if it is cached and can be found, else NULL.  The caller has called pp_index_begin. */
const pp_index_named *pp_index_name(const pp_shared *view, pp_index_names *names, int32_t b);

/* List the blocks that look-ups no longer find, or find for another prefix, since the last two calls, and the blocks
 * that they find now.  Call first pp_index_removed, then pp_index_added, between pp_index_begin and pp_index_end.  `of`
 * has the names of the removed blocks until pp_index_added.  Parents are added first.  Both return how many. */
int64_t pp_index_removed(const pp_shared *view, pp_index_names *names, int32_t *blocks);
int64_t pp_index_added(const pp_shared *view, pp_index_names *names, int32_t *blocks);

/* The block before block b, or -1.  Requires the index. */
static inline int32_t pp_index_parent(const pp_shared *view, int32_t b) { return view->nodes[b].parent; }

/* Evicts block b if only the index holds it, and gives this process a reference to it.  Requires the index. */
int pp_index_take(pp_shared *view, int32_t b, int32_t *counts);

/* Keeps all writers out from begin to end.  Begin returns 0 if the view is stale, or if another process keeps the lock
 * for 0.1 s. */
int pp_index_begin(pp_shared *view);
void pp_index_end(pp_shared *view);

/* Forgets blocks, in use or not; `blocks` NULL: all of them.  Returns how many were cached, or -1 if another process
 * keeps the lock; call it again then, because some may be forgotten.  Blocks that sequences computed from them are void
 * too, so later calls of pp_index_insert with an older epoch do nothing. */
int64_t pp_index_forget(pp_shared *view, const int32_t *blocks, int64_t n);

/* Sets the limit for all processes.  A higher one allocates the memory first, in steps: see pp_shared_raise_limit.
 * If there is too little (ENOSPC), the limit returns to where it was.  A lower one evicts all cached blocks at or
 * above it, and returns the memory of all blocks there that no process holds.  The memory of the others is returned
 * when the last process drops them.  Several processes may call it at the same time; the one that ends last decides.
 * ETIMEDOUT: another process has kept a lock for `patience` ns; `blocker` of the view has it.  If a call was killed
 * or has timed out, a second one does the rest. */
int pp_index_set_limit(pp_shared *view, int64_t limit, int64_t patience);

/* The highest limit above which blocks that no process holds have `bytes` bytes.  If they have fewer, the lowest one of
 * these blocks, or the limit if there is none. */
int64_t pp_index_limit_without(const pp_shared *view, int64_t bytes);

/* The first equation that does not hold, or NULL. */
const char *pp_index_audit(pp_shared *view);

/* Number of cached blocks; with `only_idle`, only of those below the limit that no process holds. */
int64_t pp_index_count(const pp_shared *view, int only_idle);

#endif
