/* pagepool/status.h: the result of calls that can fail.  A call that does not return PP_OK has changed nothing. */
#ifndef PAGEPOOL_STATUS_H
#define PAGEPOOL_STATUS_H

typedef enum pp_status {
    PP_OK = 0,
    PP_EXHAUSTED = 1,     /* fewer blocks, pages or slots are free than requested */
    PP_INVALID_BLOCK = 2, /* a block id is out of range, free, or freed too often */
    PP_INVALID_SLOT = 3,  /* a slot is out of range */
    PP_OVER_MAXIMUM = 4,  /* a maximum would be exceeded: blocks of a sequence, references of a block */
    PP_NO_MEMORY = 5,     /* the operating system has no memory */
    PP_INVALID_ARGUMENT = 6
} pp_status;

#endif
