/* check_decode.h: checks the arguments of decode before it plans anything, and the arguments of merge. */
#ifndef PP_CHECK_DECODE_H
#define PP_CHECK_DECODE_H

#include "pagepool/attention.h"

/* Checks sizes, and that query_start_loc begins with 0.  Lengths, counts and ids are checked later, while they are
 * copied. */
pp_status pp_check_decode(const pp_decode_args *args);

/* Checks that the results overlap neither each other nor any input. num_queries is the total. */
pp_status pp_check_apart(const pp_decode_args *args, int64_t num_queries, const void *workspace, size_t bytes);

/* Checks sizes and missing arrays, and that the results overlap neither each other nor any input. */
pp_status pp_check_merge(const pp_merge_args *args);

#endif
