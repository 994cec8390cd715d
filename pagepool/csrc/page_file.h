/* page_file.h: pages read from a file into the pools of an allocator, with their sums (page_sum.h). */
#ifndef PP_PAGE_FILE_H
#define PP_PAGE_FILE_H

#include <stdint.h>

#include "pagepool/lock.h"
#include "regions.h"

typedef struct pp_page_loads {
    const pp_regions *regions;
    pp_lock *lock;
    int file;
    int64_t num_bytes;        /* of a page */
    const int64_t *offsets;   /* of each page in the file */
    const int32_t *blocks;    /* where each page goes: the caller holds the only reference */
    const unsigned char *key; /* PP_SUM_KEY_BYTES */
    unsigned char *sums;      /* of each page, PP_SUM_BYTES for each chunk */
    int32_t *errors;          /* for each page 0, or the errno of a failed read; EIO if the file is too short */
} pp_page_loads;

/* Reads n pages on up to num_threads threads and writes sums and errors.  The pages of a block with an error, or with
 * sums of another page, have any content afterwards.  The caller must not hold the lock. */
void pp_load_pages(const pp_page_loads *loads, int64_t n, int num_threads);

/* Reads a page of num_bytes from an offset of a file into `page` and writes its sums.  Returns 0, or the errno of a
 * failed read; EIO if the file is too short. */
int pp_read_page(int file, unsigned char *page, int64_t num_bytes, int64_t offset, const unsigned char *key,
                 unsigned char *sums);

/* Makes bytes of a file zeros, as a hole where the file system can have one.  Returns 0 or an errno. */
int pp_punch(int file, int64_t offset, int64_t num_bytes);

#endif
