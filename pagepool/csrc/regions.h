/* regions.h: the page memories that an allocator's block ids refer to.
 *
 * A pool attaches its pages to the allocator of its block ids.  When a sequence un-shares a block, the page is copied
 * in every attached pool.  The allocator's lock guards the list: copying holds it as a reader, attaching and detaching
 * hold it as a writer.  The memory of a pool therefore cannot be freed while one of its pages is copied. */
#ifndef PP_REGIONS_H
#define PP_REGIONS_H

#include "pagepool/layout.h"
#include "pagepool/lock.h"

typedef struct pp_regions {
    const pp_kv_pool **pools; /* all have the same layout.block_size, or 0: flat pools */
    int32_t count, room; /* count <= room */
} pp_regions;

/* Adds `pool`, which must not move until it is detached.  Returns PP_INVALID_ARGUMENT if an attached pool has another
 * block size, or PP_NO_MEMORY; nothing has changed then. */
pp_status pp_regions_attach(pp_regions *regions, pp_lock *lock, const pp_kv_pool *pool);

/* Removes `pool` if it is attached, after running copies have finished. */
void pp_regions_detach(pp_regions *regions, pp_lock *lock, const pp_kv_pool *pool);

/* Copies page `src` to page `dst`, for all layers, in every attached pool.  The caller must hold references to both
 * pages and must not hold the lock. */
void pp_regions_copy_block(const pp_regions *regions, pp_lock *lock, int32_t dst, int32_t src);

/* Bytes of a block's pages in all attached pools together. */
int64_t pp_regions_block_bytes(const pp_regions *regions, pp_lock *lock);

/* Copies the pages of `block` from every attached pool to `bytes`, one after another, or from `bytes` to the pools.
 * The caller must hold a reference to the block and must not hold the lock.  Returns PP_INVALID_ARGUMENT, and copies
 * nothing, if the size of the pages is not `num_bytes`, because a pool was attached or detached. */
pp_status pp_regions_read_block(const pp_regions *regions, pp_lock *lock, int32_t block, unsigned char *bytes,
                                int64_t num_bytes);
pp_status pp_regions_write_block(const pp_regions *regions, pp_lock *lock, int32_t block, const unsigned char *bytes,
                                 int64_t num_bytes);

/* Copies `size` bytes to the pages of `block`, from byte `at` of all pools together on: at + size <= num_bytes.
 * Otherwise as pp_regions_write_block. */
pp_status pp_regions_write_part(const pp_regions *regions, pp_lock *lock, int32_t block, int64_t at,
                                const unsigned char *bytes, int64_t size, int64_t num_bytes);

/* The address of `size` bytes of the pages of `block`, from byte `at` of all pools together on.  NULL if they lie in
 * two pools, or if the pages do not have `num_bytes` together.  The caller must have begun to read. */
unsigned char *pp_regions_part(const pp_regions *regions, int32_t block, int64_t at, int64_t size, int64_t num_bytes);

/* Fills the pages of all `blocks` with reference count 0 with bits that are NaN in every float dtype, in every attached
 * pool.  The caller must hold the lock. */
void pp_regions_fill_freed(const pp_regions *regions, const int32_t *ref_counts, const int32_t *blocks, ptrdiff_t n);

/* Tokens of a block in the attached pools; 0 if no attached pool has a layout. */
int32_t pp_regions_block_size(const pp_regions *regions, pp_lock *lock);

#endif
