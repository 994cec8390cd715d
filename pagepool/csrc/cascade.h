/* cascade.h: chunks that several sequences have in common.
 *
 * Sequences share their first chunks if the block ids are equal.  Each whole chunk that a run of sequences shares is a
 * unit for each kv head.  These units come before all others.  They write the same records as units of single
 * sequences.  `order` is sorted by block ids, so that sequences that share chunks are neighbours:
 *
 *   shared[i]           sequences order[first, first + count) share `chunk`
 *   shared_chunks[s]    number of chunks that s shares;   common[i] = chunks that order[i] and order[i + 1] share
 *   heads_left[i * slices + slice] = kv heads of the slice that are not done.  The thread that does the last one counts
 *                       the chunk in `remaining` of each sequence */
#ifndef PP_CASCADE_H
#define PP_CASCADE_H

#include "extent.h"

/* Finds the runs of sequences that share chunks.  Sets the fields order, common, shared_chunks, shared, num_shared and
 * heads_left of the plan.  The tables of the plan must have been copied before. */
void pp_find_shared(pp_decode_plan *plan);

/* Runs a unit of a chunk that sequences share. */
void pp_run_shared(pp_decode_plan *plan, int64_t unit, unsigned char *scratch);

#endif
