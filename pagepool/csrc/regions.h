/* regions.h: the page memories that follow an allocator's ids.
 *
 * Pools attach their pages to the allocator whose ids name them; when a sequence un-shares a block, the page is copied
 * in every attached pool.  The allocator's lock guards the list: copying reads it as a reader, attaching and detaching
 * change it as a writer, so that a pool's memory cannot go while a page of it is copied. */
#ifndef PP_REGIONS_H
#define PP_REGIONS_H

#include "pagepool/layout.h"
#include "pagepool/lock.h"

typedef struct pp_regions {
    const pp_kv_pool **pools; /* all have the same layout.block_size, or 0: flat pools */
    int32_t count, room; /* count <= room */
} pp_regions;

/* Adds `pool`, which must stay where it is until it is detached.  PP_INVALID_ARGUMENT when an attached pool has another
 * block size, PP_NO_MEMORY; then nothing has changed. */
pp_status pp_regions_attach(pp_regions *regions, pp_lock *lock, const pp_kv_pool *pool);

/* Removes `pool`, if it is there, after the copies under way. */
void pp_regions_detach(pp_regions *regions, pp_lock *lock, const pp_kv_pool *pool);

/* Copies the page of `src` onto that of `dst`, all layers, in every attached pool.  The caller holds references to
 * both and not the lock. */
void pp_regions_copy_block(const pp_regions *regions, pp_lock *lock, int32_t dst, int32_t src);

/* Bytes of a block's pages in all attached pools together. */
int64_t pp_regions_block_bytes(const pp_regions *regions, pp_lock *lock);

/* Copies the pages of `block` from every attached pool to `bytes`, one behind the other, or from there to the pools.
 * The caller holds a reference to the block and not the lock.  PP_INVALID_ARGUMENT, and nothing is copied, when the
 * pages do not have `num_bytes` bytes: a pool was attached or detached. */
pp_status pp_regions_read_block(const pp_regions *regions, pp_lock *lock, int32_t block, unsigned char *bytes,
                                int64_t num_bytes);
pp_status pp_regions_write_block(const pp_regions *regions, pp_lock *lock, int32_t block, const unsigned char *bytes,
                                 int64_t num_bytes);

/* Fills the pages of those `blocks` that have no reference with bits that are NaN in every float dtype, in every
 * attached pool.  The caller holds the lock. */
void pp_regions_fill_freed(const pp_regions *regions, const int32_t *ref_counts, const int32_t *blocks, ptrdiff_t n);

/* Tokens of a block in the attached pools; 0 without a pool that has a layout. */
int32_t pp_regions_block_size(const pp_regions *regions, pp_lock *lock);

#endif
