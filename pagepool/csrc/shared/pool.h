/* shared/pool.h: a pool of blocks in a file that several processes map.
 *
 *   file    shape      magic, version, layout, fingerprint     written before any process attaches, then only read
 *           limit      number of blocks that may be allocated
 *           slots      one per process
 *           words      one per block: {generation:32 | holders:32}
 *           index      which block has the keys and values of which tokens: see index.h
 *           pages      at a multiple of 2 MiB
 *
 * Bit s of holders is set while the process in slot s has references to the block.  The number of references
 * is private: it is in the BlockAllocator of that process.  The words are the only record of which blocks are free:
 *
 *   block b is free                    <=>  holders(b) == 0
 *   bit s of holders(b)                 =   count_s(b) > 0, for a live process s outside of a call
 *   bit s of holders(b)                 =   0, for a slot s that is free
 *   generation(b) rises by 1 with each change of holders(b) from 0, and never else
 *   block b has memory                 if   b < limit or holders(b) != 0
 *
 * A process locks one byte of the file, that of its slot, until it ends.  A slot in use whose byte is not locked
 * belongs to a dead process.  Another process takes the lock, clears the bit of the slot in all words (the sweep), and
 * frees the slot.  If it dies during the sweep, the next process does the sweep again: every step is idempotent.
 *
 * The limit is changed by the process that has locked the byte LIMIT_LOCK.  It rises in steps of at most 64 MiB, and
 * other processes can lock it between two steps.  Memory above the limit is returned only under this lock, and
 * committed before the limit rises.  So a process that dies in a step leaves memory that the next change returns.
 *
 * No function takes the GIL.  A pp_shared belongs to one BlockAllocator.  pp_shared_take, pp_shared_drop and
 * pp_shared_reap require the lock of the allocator, and call the system only to look for dead processes.  Other
 * functions must be called without that lock.  Locks are taken in the order `limits`, index, allocator. */
#ifndef PP_SHARED_POOL_H
#define PP_SHARED_POOL_H

#include <stddef.h>
#include <stdint.h>

#include "pagepool/layout.h"
#include "pagepool/lock.h"
#include "pagepool/status.h"

#define PP_SHARED_MAGIC "pagepool"
#define PP_SHARED_VERSION 2          /* of the file and of the page layout */
#define PP_SHARED_PROCESSES 30
#define PP_SHARED_FINGERPRINT 3584   /* most bytes of a fingerprint */
#define PP_SHARED_BUDGET 104         /* bytes for the name of a memory budget, with the final 0 */

#define PP_SHARED_PATIENCE 2000000000 /* ns until a call fails because another process keeps a lock */

/* Bytes by which the limit changes at once: allocated in 20 to 200 ms, returned in 5 ms.  Tests define fewer. */
#ifndef PP_SHARED_STEP
#define PP_SHARED_STEP ((int64_t)64 << 20)
#endif

/* A program that tests recovery defines PP_STEP to kill the process between two stores to shared memory. */
#ifndef PP_STEP
#define PP_STEP() ((void)0)
#endif

/* What the pages mean.  Copied when a process attaches, so that numbers cannot change after they were checked. */
typedef struct pp_shared_shape {
    char magic[8];
    uint32_t byte_order; /* 0x01020304 */
    uint32_t version;
    pp_kv_layout layout;
    int64_t num_blocks;        /* the most that the file has room for */
    uint8_t channel_scale[16]; /* digest of k_channel_scale; zeros without it */
    int32_t fingerprint_bytes;
    char fingerprint[PP_SHARED_FINGERPRINT];
    char budget[PP_SHARED_BUDGET]; /* the memory budget that the file belongs to, or "" */
} pp_shared_shape;

typedef struct pp_shared_slot {
    uint64_t state; /* 0: free */
    uint64_t epoch; /* rises when the slot is taken and when it is freed */
    uint64_t table; /* of processes, in which pid is a process: see pp_os_process_table */
    uint64_t start; /* see pp_os_process_start */
    int64_t pid;
    uint64_t unused[3];
} pp_shared_slot;

/* The first page is never written once the file has its name.  The rest is read with atomic loads; every number from it
 * is checked against the bounds after the load, because any process of the user can write it. */
typedef struct pp_shared_header {
    union {
        pp_shared_shape shape;
        unsigned char first_page[4096];
    };
    int64_t limit;
    uint64_t seed; /* the seed of the index's hashes.  It is secret, so that no client can construct collisions. */
    uint64_t limit_owner; /* bit of the process that changes the limit; stale if its lock is free */
    uint64_t unused[5];
    /* The index.  The counters only rise. */
    uint64_t index_lock; /* the bit of the process that writes, or 0 */
    uint64_t dirty;      /* set while buckets and chains may be wrong */
    uint64_t tick;       /* counts look-ups and insertions: the clock of the eviction order */
    uint64_t inserted;
    uint64_t evicted;
    uint64_t forgotten;
    uint64_t epoch; /* rises by 1 with each call that forgets blocks */
    uint64_t unused_too[1];
    pp_shared_slot slots[PP_SHARED_PROCESSES];
} pp_shared_header;

/* Node b of the index belongs to block b: see index.h.  64 bytes. */
typedef struct pp_index_node {
    uint64_t hash;
    uint64_t root[2];
    uint64_t stamp;      /* tick of the last use */
    int32_t parent;      /* block of the tokens before, -1 for the first block */
    uint32_t generation; /* of the parent */
    int32_t depth;
    int32_t next;        /* block + 1 of the next node with the same bucket, 0 at the end */
    uint64_t unused[2];
} pp_index_node;

typedef struct pp_index_victim {
    uint64_t stamp;
    int32_t block;
    int32_t depth;
} pp_index_victim;

/* One process's view of a pool. */
typedef struct pp_shared {
    unsigned char *base; /* NULL: closed */
    size_t bytes;
    pp_shared_header *header;
    uint64_t *words;
    pp_index_node *nodes;
    int32_t *tokens;  /* block_size of each block */
    int32_t *buckets; /* block + 1 of the first node, or 0 */
    unsigned char *pages;
    pp_shared_slot *slot; /* of this process */
    uint64_t epoch;       /* of the slot when it was taken.  Equal to slot->epoch until the process gives it up. */
    uint64_t bit;
    uint64_t seed;
    uint64_t bucket_mask;
    int64_t num_blocks;
    int64_t block_bytes;
    int64_t block_size;
    int fd;
    int lock_fd;
    /* Private: blocks that this process freed last, as hints where to look for a free one.  num_hints <= num_blocks. */
    int32_t *hints;
    int64_t num_hints;
    int64_t cursor; /* where the search for a free block goes on */
    int64_t held;   /* blocks to which this process has references */
    int64_t peak;   /* most that `held` ever was */
    int64_t pending, pending_end;   /* blocks whose memory pp_shared_return_pending looks at; none if equal */
    int64_t returned, returned_end; /* blocks with the bit of this process only while their memory is returned */
    pp_lock *lock;   /* of the allocator */
    pp_lock limits;  /* the thread of this process that changes the limit or returns memory */
    pp_lock writers; /* threads of this process that write the index */
    pp_index_victim *victims; /* blocks that were idle when the list was made, the oldest last; guarded by `writers` */
    int64_t num_victims;
    uint64_t stuck;       /* bit of the process that kept the lock of the index too long, until it is acquired again */
    int64_t blocker;      /* process that the last call waited for in vain, 0: unknown */
    struct pp_shared *next, *previous; /* all views of this process, for fork */
} pp_shared;

/* Bytes of the file; 0 if no file can have that many. */
size_t pp_shared_bytes(int64_t num_blocks, const pp_kv_layout *layout);

/* The most memory of a file in which no process holds a block at or above `limit`, in whole huge pages. */
int64_t pp_shared_cost(int64_t num_blocks, const pp_kv_layout *layout, int64_t limit);

/* Functions that return int return 0 or an errno. */

/* Makes a pool in an empty file, with memory for the first `limit` blocks.  EEXIST: the file has a pool.  ENOSPC: the
 * file system has too little memory.  ENOMEM: no file can have that many bytes.  ETIMEDOUT: another process is making
 * the pool, and the file has not grown for PP_SHARED_PATIENCE. */
int pp_shared_create(int fd, const pp_shared_shape *shape, int64_t limit, uint64_t seed);

/* Reads the shape of a pool.  EBADMSG: the file is not a pool of this version, or its sizes disagree. */
int pp_shared_read(int fd, pp_shared_shape *shape);

/* Reads the name of the memory budget of a file, and how many bytes the file takes of it: pp_shared_cost, and the
 * memory above the limit.  The name is "" if the file is not a pool. */
int pp_shared_read_cost(int fd, char *budget, int64_t *bytes);

/* Attaches: maps the file, takes a slot and sweeps dead processes.  The shape must be one that pp_shared_read returned.
 * On success `view` owns fd.  EUSERS: all slots are in use. */
int pp_shared_open(pp_shared *view, int fd, const pp_shared_shape *shape);

/* Drops all bits of this process and its slot: the view is stale from now on.  A thread that changes the limit ends its
 * step first.  pp_shared_close also closes the file;
 * the pages become private zeros, so that late readers and writers touch no block of another process.  pp_shared_free
 * also unmaps them. */
void pp_shared_leave(pp_shared *view);
void pp_shared_close(pp_shared *view);
void pp_shared_free(pp_shared *view);

/* True when the view is closed: by pp_shared_close, in a child after fork, or because other processes took this one for
 * dead. */
static inline int pp_shared_is_stale(const pp_shared *view) {
    const uint64_t epoch = __atomic_load_n(&view->epoch, __ATOMIC_RELAXED);
    return __atomic_load_n(&view->slot->epoch, __ATOMIC_ACQUIRE) != epoch;
}

/* Takes n free blocks, all or none.  PP_EXHAUSTED if there are fewer, after a sweep of dead processes, or if stale. */
pp_status pp_shared_take(pp_shared *view, int32_t n, int32_t *blocks);

/* Whether anything but this process holds the block. */
static inline int pp_shared_is_held_elsewhere(const pp_shared *view, int32_t block) {
    return ((uint32_t)__atomic_load_n(&view->words[block], __ATOMIC_ACQUIRE) & ~(uint32_t)view->bit) != 0;
}

/* Clears this process's bit of each block.  Its private count must be 0.  A block may be given twice.  The memory of
 * blocks at or above the limit is pending then. */
void pp_shared_drop(pp_shared *view, const int32_t *blocks, int64_t n);

/* Returns the memory of pending blocks that are free.  If the limit is being changed, they stay pending. */
void pp_shared_return_pending(pp_shared *view);

/* Whether blocks are pending. */
static inline int pp_shared_has_pending(const pp_shared *view) {
    return __atomic_load_n(&view->pending_end, __ATOMIC_RELAXED) != 0;
}

/* Sweeps every dead process; returns how many there were.  All blocks are pending if there was one. */
int pp_shared_reap(pp_shared *view);

/* Blocks that can be allocated now, and blocks with any holder.  O(num_blocks): about 30 us for 100,000. */
int64_t pp_shared_count_free(const pp_shared *view);
int64_t pp_shared_count_in_use(const pp_shared *view);

/* The number of blocks that may be allocated, from 0 to num_blocks. */
int64_t pp_shared_limit(const pp_shared *view);

/* Locks the limit against other processes and threads.  Returns 0, ESTALE, or ETIMEDOUT after `patience` ns;
 * `blocker` of the view has the process then. */
int pp_shared_lock_limit(pp_shared *view, int64_t patience);
void pp_shared_unlock_limit(pp_shared *view);

/* Raises the limit for all processes, in steps: each allocates 64 MiB at most and waits for `patience` ns at most.
 * If one fails, `reached` is where the limit stays; else `limit`, or more if another process has raised it.  ENOSPC. */
int pp_shared_raise_limit(pp_shared *view, int64_t limit, int64_t patience, int64_t *reached);

/* Returns to the system the memory of the free blocks from `begin` to `end` that are at or above the limit, in runs
 * of 64 MiB at most.  Does nothing if the limit cannot be locked within `patience` ns.  Returns 0 or an errno. */
int pp_shared_return_memory(pp_shared *view, int64_t begin, int64_t end, int64_t patience);

/* Bytes of memory that the file has, or -1 with errno. */
int64_t pp_shared_allocated(int fd);

/* The process that has the slot with a bit; 0 if `owner` is not the bit of a slot. */
int64_t pp_shared_process_of(const pp_shared *view, uint64_t owner);

/* Number of processes that are attached. */
int pp_shared_processes(const pp_shared *view);

/* A pool as a process sees it that is not attached. */
typedef struct pp_shared_census {
    pp_shared_header header; /* a copy */
    int64_t limit;
    int64_t in_use;      /* blocks with any holder */
    int64_t above_limit; /* of these, blocks at or above the limit */
    int64_t cached;      /* blocks that the index holds */
    int64_t idle;        /* blocks that only the index holds */
    int64_t held[PP_SHARED_PROCESSES]; /* blocks that each process holds */
    int is_live[PP_SHARED_PROCESSES];  /* 0: the slot is free, or its process has ended */
} pp_shared_census;

/* Reads the file of a pool.  Takes no slot and changes nothing.  Processes may use the pool meanwhile: the numbers can
 * be of different moments.  EBADMSG: see pp_shared_read. */
int pp_shared_take_census(int fd, pp_shared_census *census);

/* The first equation that does not hold between words and this process's counts, or NULL; `block` gets the block. */
const char *pp_shared_audit(const pp_shared *view, const int32_t *counts, int32_t *block);

#endif
