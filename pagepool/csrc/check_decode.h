/* check_decode.h: what decode refuses before it plans anything, and the merging of its results. */
#ifndef PP_CHECK_DECODE_H
#define PP_CHECK_DECODE_H

#include "pagepool/attention.h"

/* Sizes, and that query_start_loc begins with 0.  Lengths, counts and ids are checked as they are copied. */
pp_status pp_check_decode(const pp_decode_args *args);

/* That the results overlap neither each other nor anything that is read; num_queries in all. */
pp_status pp_check_apart(const pp_decode_args *args, int64_t num_queries, const void *workspace, size_t bytes);

/* Sizes, missing arrays, and that the results overlap neither each other nor what is read. */
pp_status pp_check_merge(const pp_merge_args *args);

#endif
