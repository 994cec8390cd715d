/* unit.h: describes the work of a unit, and counts finished chunks. */
#ifndef PP_UNIT_H
#define PP_UNIT_H

#include "extent.h"

/* The queries of a sequence in the caller's memory. */
pp_queries pp_queries_from(const pp_decode_plan *plan, int32_t s, float *widened);

/* Fills in the work of a slice of a chunk of sequence s.  `place` counts from the first visible chunk. */
void pp_fill_chunk(const pp_decode_plan *plan, int32_t s, int64_t place, int32_t slice, pp_chunk *work);

/* Counts a chunk of a slice of sequence s as done.  Merges the chunks of the slice if it was the last one. */
void pp_count_chunk(pp_decode_plan *plan, int32_t s, int32_t slice);

#endif
