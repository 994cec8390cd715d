/* measure.h: the amount of work of a decode call, how it is cut for the threads, and the memory that the plan needs. */
#ifndef PP_MEASURE_H
#define PP_MEASURE_H

#include "extent.h"

enum { PP_WORKSPACE_ALIGN = 64 };

typedef struct pp_measures {
    int64_t num_chunks, num_blocks, num_queries; /* totals; chunks: of sequences that are cut into chunks */
    int64_t num_packed, num_prefilled;           /* query tokens of sequences that are cut into chunks; into blocks */
    int64_t num_records;                         /* elements of all records */
    double products;                             /* cost in multiply-adds: of arithmetic or of loading, the larger */
    int64_t row_stride, row_elements;            /* elements per row of a record: its sums; all its parts */
    int32_t most_queries;                        /* maximum over the sequences */
    int32_t slices;
    int32_t block_queries, num_slots;            /* query tokens per block; number of scratch slots */
    int32_t may_share;                           /* two sequences may have the same first block */
    /* Sizes in bytes of the parts of the workspace. counters: `remaining`. begins: each of unit_begin, ids_begin,
     * packed_begin and record_begin. starts: query_begin. widened: 8 widened queries. flags: one for each slot. slot:
     * one slot; slots: all. shared: runs that share a chunk. left: heads_left. bytes: the whole workspace. */
    size_t counters, begins, starts, lengths, ids, slopes, queries, widened, flags, slot, slots, shared, left, bytes;
} pp_measures;

/* Checks the sizes of `args`, reads seq_lens, query_start_loc and the first block ids, and sets the totals up to and
 * including may_share.  Returns PP_INVALID_ARGUMENT in the cases listed at pp_decode_workspace. */
pp_status pp_measure(const pp_decode_args *args, pp_measures *all);

/* Sets all other members: slices for args->num_threads, blocks of query tokens, and sizes. */
pp_status pp_cut(const pp_decode_args *args, pp_measures *all);

/* Adds a sequence to the totals.  Its ids, queries and records begin where the totals were before. */
pp_status pp_add_sequence(const pp_decode_args *args, int32_t seq_len, int64_t queries, pp_measures *all);

#endif
