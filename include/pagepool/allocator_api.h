/* pagepool/allocator_api.h: a BlockAllocator for extension modules in any language, without Cython.
 *
 * The table is in the capsule pagepool.memory.allocator._C_API.  With the GIL held, once:
 *
 *     #define PP_ALLOCATOR_API "pagepool.memory.allocator._C_API"
 *     const pp_allocator_api *api = PyCapsule_Import(PP_ALLOCATOR_API, 0);
 *     pp_allocator *allocator = api->from_object(object);       // NULL: object is no BlockAllocator
 *
 * From then on no function wants the GIL, and any number of threads may call them.  An allocator is valid as long as
 * the caller holds a reference to the object that it came from.  A call that does not return PP_OK has changed
 * nothing. */
#ifndef PAGEPOOL_ALLOCATOR_API_H
#define PAGEPOOL_ALLOCATOR_API_H

#include <stdint.h>

#include "pagepool/status.h"
#include "pagepool/version.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PP_ALLOCATOR_API "pagepool.memory.allocator._C_API"

typedef struct pp_allocator pp_allocator;

typedef struct pp_allocator_api {
    int32_t abi_version; /* PP_ABI_VERSION of the pagepool that filled the table: compare before anything else */

    /* The allocator of a Python object (a PyObject *), NULL when it has none.  The only function that wants the GIL. */
    pp_allocator *(*from_object)(void *object);

    /* One block.  PP_EXHAUSTED when none is free. */
    pp_status (*allocate)(pp_allocator *allocator, int32_t *block);

    /* All n blocks or none.  PP_EXHAUSTED; PP_INVALID_ARGUMENT for n below 0. */
    pp_status (*allocate_n)(pp_allocator *allocator, int32_t n, int32_t *blocks);

    /* Drops, or adds, one reference of each of n blocks, or none.  PP_INVALID_BLOCK for an id that is out of range,
     * free or dropped too often; PP_OVER_MAXIMUM when a count would pass 2^31 - 1; PP_INVALID_ARGUMENT for n below 0.
     */
    pp_status (*free_n)(pp_allocator *allocator, const int32_t *blocks, int64_t n);
    pp_status (*share_n)(pp_allocator *allocator, const int32_t *blocks, int64_t n);

    /* The number of references, 0 for a free block, -1 for an id out of range. */
    int32_t (*ref_count)(pp_allocator *allocator, int32_t block);

    int32_t (*free_count)(pp_allocator *allocator);
} pp_allocator_api;

#ifdef __cplusplus
}
#endif
#endif
