/* regions.c: see regions.h. */
#include "regions.h"

#include <stdlib.h>
#include <string.h>

static int32_t block_size_of(const pp_regions *regions) {
    int32_t size = 0;
    for (int32_t i = 0; i < regions->count && !size; i++) size = regions->pools[i]->layout.block_size;
    return size;
}

pp_status pp_regions_attach(pp_regions *regions, pp_lock *lock, const pp_kv_pool *pool) {
    pp_status status = PP_OK;
    pp_write_begin(lock);
    const int32_t size = block_size_of(regions);
    if (size && pool->layout.block_size && pool->layout.block_size != size) {
        status = PP_INVALID_ARGUMENT;
    } else if (regions->count == regions->room) {
        int32_t room = regions->room ? regions->room * 2 : 4;
        const pp_kv_pool **pools = realloc(regions->pools, (size_t)room * sizeof *pools);
        if (pools) {
            regions->pools = pools;
            regions->room = room;
        } else {
            status = PP_NO_MEMORY;
        }
    }
    if (status == PP_OK) regions->pools[regions->count++] = pool;
    pp_write_end(lock);
    return status;
}

void pp_regions_detach(pp_regions *regions, pp_lock *lock, const pp_kv_pool *pool) {
    pp_write_begin(lock);
    for (int32_t i = 0; i < regions->count; i++)
        if (regions->pools[i] == pool) {
            regions->pools[i] = regions->pools[--regions->count];
            break;
        }
    pp_write_end(lock);
}

void pp_regions_copy_block(const pp_regions *regions, pp_lock *lock, int32_t dst, int32_t src) {
    pp_read_begin(lock);
    /* No copy can fail, because every attached pool has a page for every id of the allocator. */
    for (int32_t i = 0; i < regions->count; i++) pp_kv_copy_block(regions->pools[i], dst, src);
    pp_read_end(lock);
}

static int64_t block_bytes_of(const pp_regions *regions) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < regions->count; i++) bytes += regions->pools[i]->layout.block_bytes;
    return bytes;
}

int64_t pp_regions_block_bytes(const pp_regions *regions, pp_lock *lock) {
    pp_read_begin(lock);
    const int64_t bytes = block_bytes_of(regions);
    pp_read_end(lock);
    return bytes;
}

pp_status pp_regions_read_block(const pp_regions *regions, pp_lock *lock, int32_t block, unsigned char *bytes,
                                int64_t num_bytes) {
    pp_read_begin(lock);
    const pp_status status = block_bytes_of(regions) == num_bytes ? PP_OK : PP_INVALID_ARGUMENT;
    for (int32_t i = 0; i < regions->count && status == PP_OK; i++) {
        const int64_t size = regions->pools[i]->layout.block_bytes;
        memcpy(bytes, regions->pools[i]->base + block * size, (size_t)size);
        bytes += size;
    }
    pp_read_end(lock);
    return status;
}

pp_status pp_regions_write_block(const pp_regions *regions, pp_lock *lock, int32_t block, const unsigned char *bytes,
                                 int64_t num_bytes) {
    return pp_regions_write_part(regions, lock, block, 0, bytes, num_bytes, num_bytes);
}

pp_status pp_regions_write_part(const pp_regions *regions, pp_lock *lock, int32_t block, int64_t at,
                                const unsigned char *bytes, int64_t size, int64_t num_bytes) {
    pp_read_begin(lock);
    const pp_status status = block_bytes_of(regions) == num_bytes ? PP_OK : PP_INVALID_ARGUMENT;
    for (int32_t i = 0; i < regions->count && size && status == PP_OK; i++) {
        const int64_t page = regions->pools[i]->layout.block_bytes;
        if (at < page) {
            const int64_t count = page - at < size ? page - at : size;
            memcpy(regions->pools[i]->base + block * page + at, bytes, (size_t)count);
            bytes += count;
            size -= count;
            at += count;
        }
        at -= page;
    }
    pp_read_end(lock);
    return status;
}

unsigned char *pp_regions_part(const pp_regions *regions, int32_t block, int64_t at, int64_t size, int64_t num_bytes) {
    if (block_bytes_of(regions) != num_bytes) return NULL;
    for (int32_t i = 0; i < regions->count; i++) {
        const int64_t page = regions->pools[i]->layout.block_bytes;
        if (at < page) return at + size <= page ? regions->pools[i]->base + block * page + at : NULL;
        at -= page;
    }
    return NULL;
}

void pp_regions_fill_freed(const pp_regions *regions, const int32_t *ref_counts, const int32_t *blocks, ptrdiff_t n) {
    for (int32_t i = 0; i < regions->count; i++) {
        const int64_t bytes = regions->pools[i]->layout.block_bytes;
        for (ptrdiff_t b = 0; b < n; b++)
            if (ref_counts[blocks[b]] == 0) memset(regions->pools[i]->base + blocks[b] * bytes, 0xFF, (size_t)bytes);
    }
}

int32_t pp_regions_block_size(const pp_regions *regions, pp_lock *lock) {
    pp_read_begin(lock);
    const int32_t size = block_size_of(regions);
    pp_read_end(lock);
    return size;
}
