/* pagepool/allocator_api.h: C interface of BlockAllocator for extension modules in any language, without Cython.
 *
 * The capsule pagepool.memory.allocator._C_API holds a table of functions.  Get it once, with the GIL held:
 *
 *     #define PP_ALLOCATOR_API "pagepool.memory.allocator._C_API"
 *     const pp_allocator_api *api = PyCapsule_Import(PP_ALLOCATOR_API, 0);
 *     pp_allocator *allocator = api->from_object(object);       // NULL: object is not a BlockAllocator
 *
 * All other functions need no GIL, and any number of threads may call them.  An allocator is valid while the caller
 * holds a reference to its Python object.  A call that does not return PP_OK has changed nothing. */
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
    int32_t abi_version; /* PP_ABI_VERSION of the pagepool that filled the table: compare it first */

    /* The allocator of a Python object (a PyObject *); NULL if it is not a BlockAllocator.  Requires the GIL. */
    pp_allocator *(*from_object)(void *object);

    /* Allocates one block.  PP_EXHAUSTED if no block is free. */
    pp_status (*allocate)(pp_allocator *allocator, int32_t *block);

    /* Allocates all n blocks or none.  PP_EXHAUSTED if fewer are free, PP_INVALID_ARGUMENT for negative n. */
    pp_status (*allocate_n)(pp_allocator *allocator, int32_t n, int32_t *blocks);

    /* free_n drops and share_n adds one reference of each of n blocks, all or none.  PP_INVALID_BLOCK for an id that is
     * out of range, free, or listed more often than it has references.  PP_OVER_MAXIMUM if a count would exceed
     * 2^31 - 1.  PP_INVALID_ARGUMENT for negative n. */
    pp_status (*free_n)(pp_allocator *allocator, const int32_t *blocks, int64_t n);
    pp_status (*share_n)(pp_allocator *allocator, const int32_t *blocks, int64_t n);

    /* Number of references: 0 for a free block, -1 for an id out of range. */
    int32_t (*ref_count)(pp_allocator *allocator, int32_t block);

    int32_t (*free_count)(pp_allocator *allocator);
} pp_allocator_api;

#ifdef __cplusplus
}
#endif
#endif
