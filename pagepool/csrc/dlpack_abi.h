/* dlpack_abi.h: the structs that DLPack 1 fixes for exchanging tensors, and the few codes that pools use. */
#ifndef PP_DLPACK_ABI_H
#define PP_DLPACK_ABI_H

#include <stdint.h>

enum { PP_DL_CPU = 1 };                                                     /* device types */
enum { PP_DL_INT = 0, PP_DL_UINT = 1, PP_DL_FLOAT = 2, PP_DL_BFLOAT = 4 };  /* type codes */
enum { PP_DL_IS_READ_ONLY = 1, PP_DL_IS_COPIED = 2 };                       /* flags */

typedef struct pp_dl_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t type_code;
    uint8_t type_bits;
    uint16_t type_lanes;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: C-contiguous */
    uint64_t byte_offset;
} pp_dl_tensor;

/* In a capsule named "dltensor". */
typedef struct pp_dl_managed {
    pp_dl_tensor tensor;
    void *context;
    void (*deleter)(struct pp_dl_managed *self);
} pp_dl_managed;

/* In a capsule named "dltensor_versioned". */
typedef struct pp_dl_managed_versioned {
    uint32_t major;
    uint32_t minor;
    void *context;
    void (*deleter)(struct pp_dl_managed_versioned *self);
    uint64_t flags;
    pp_dl_tensor tensor;
} pp_dl_managed_versioned;

/* What a capsule named "dlpack_exchange_api" holds.  A type has it as its attribute __dlpack_c_exchange_api__ (DLPack
 * 1.2). */
typedef struct pp_dl_exchange_api {
    uint32_t major;
    uint32_t minor;
    void *older_api;
    void (*unused[3])(void); /* they make tensors and hand them over */
    /* Fills in the tensor of a Python object, which goes on owning its memory, shape and strides.  Returns 0, or -1
     * with an exception set.  May be NULL. */
    int (*show)(void *object, pp_dl_tensor *tensor);
    void (*stream)(void);
} pp_dl_exchange_api;

#endif
