/* pagepool/attention.h: decode attention over pages, for callers of C.
 *
 * One query token per sequence attends over the K and V that the pool holds for it:
 *
 *     out[s, h] = sum_t softmax_t(sm_scale * q[s, h] . K[s, t, h / G]) * V[s, t, h / G]
 *     G = num_qo_heads / num_kv_heads
 *
 * A plan cuts the work into units that do not depend on each other; any thread may run any range of them, in any
 * order.  The result is complete when each unit was run exactly once, and its bits do not depend on who ran what:
 *
 *     size_t bytes;
 *     pp_decode_workspace(&args, &bytes);                       // how much scratch the plan wants
 *     pp_decode_plan plan;
 *     pp_status status = pp_decode_plan_init(&plan, &args, workspace, bytes);
 *     // thread A:  pp_decode_run(&plan, 0, plan.num_units / 2);
 *     // thread B:  pp_decode_run(&plan, plan.num_units / 2, plan.num_units);
 *
 * pp_decode() does all of that with the threads of pagepool/threads.h. */
#ifndef PAGEPOOL_ATTENTION_H
#define PAGEPOOL_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "pagepool/layout.h"
#include "pagepool/status.h"
#include "pagepool/version.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PP_CHUNK 512 /* tokens of a chunk: where a sequence may be split, in absolute positions */
#define PP_TILE 32   /* tokens between two updates of the running maximum */

typedef struct pp_decode_args {
    const pp_kv_pool *pool;
    int32_t layer;
    int32_t num_seqs;
    int32_t num_qo_heads;         /* a multiple of the pool's num_kv_heads */
    const float *q;               /* (num_seqs, num_qo_heads, head_dim); the last axis is contiguous */
    int64_t q_stride_seq;         /* in elements */
    int64_t q_stride_head;
    const int32_t *block_tables;  /* (num_seqs, block_tables_width), rows block_tables_stride apart */
    int64_t block_tables_stride;  /* in elements */
    int64_t block_tables_width;
    const int32_t *seq_lens;      /* (num_seqs,): tokens whose K and V are in the pages */
    float sm_scale;
    int64_t window;               /* 0: every token; else the last `window` ones: no other page, nor its id, is read */
    float logits_soft_cap;        /* 0: none; else a score becomes cap * tanh(score / cap) */
    const float *alibi_slopes;    /* NULL, or (num_qo_heads,): slope * (t - (seq_len - 1)) is added, after the cap */
    const float *sinks;           /* NULL, or (num_qo_heads,): a score that takes weight and has no value */
    int32_t num_threads;          /* who share the units: decides how finely they are cut, never a bit */
    float *out;                   /* (num_seqs, num_qo_heads, v_head_dim), C-contiguous; must not overlap q */
    float *lse;                   /* NULL, or (num_seqs, num_qo_heads): log of the sum of exp(scores), sinks included */
} pp_decode_args;

typedef struct pp_decode_plan {
    pp_decode_args args;
    int64_t num_units;
    /* private */
    int32_t head_parts;
    int64_t record, row_stride;
    float *q, *partial;
    int64_t *unit_begin, *row_begin;
    int32_t *remaining, *seq_lens, *ids;
} pp_decode_plan;

/* The bytes of scratch that a plan for `args` needs: 0 < bytes, a multiple of 64.  Reads only the sizes and seq_lens.
 * PP_INVALID_ARGUMENT for a size below 0 or a num_qo_heads that num_kv_heads does not divide. */
PP_API pp_status pp_decode_workspace(const pp_decode_args *args, size_t *bytes);

/* Checks everything (PP_INVALID_ARGUMENT: a size, a seq_len below 0 or past the table's width; PP_INVALID_BLOCK: an id
 * within a sequence's length that is out of range) and plans.  `workspace` is 64-byte aligned and must live until the
 * last unit is done; so must the pool, out and lse.  q, block_tables and seq_lens are copied. */
PP_API pp_status pp_decode_plan_init(pp_decode_plan *plan, const pp_decode_args *args, void *workspace, size_t bytes);

/* Runs units [begin, end).  Each unit exactly once in all. */
PP_API void pp_decode_run(pp_decode_plan *plan, int64_t begin, int64_t end);

/* Merges partial results of the same queries over disjoint tokens, in order, so that attention over all of them comes
 * out: for each of `num_rows` rows
 *
 *     out = sum_i v[i] exp(s[i] - m) / sum_i exp(s[i] - m),   lse = m + log(sum_i exp(s[i] - m)),   m = max_i s[i]
 *
 *   v        part i of row r at v + r * v_stride_row + i * v_stride_part, head_dim contiguous elements
 *   s        its log of the sum of exp(scores) at s + r * s_stride_row + i * s_stride_part; -inf: a part without
 *            tokens, whose v does not count
 *   out      (num_rows, head_dim), C-contiguous; must not overlap v or s
 *   lse      NULL, or (num_rows,)
 *
 * A row whose parts are all without tokens (or num_parts 0) becomes zeros and -inf.  The bits depend on the row alone.
 * PP_INVALID_ARGUMENT for a size below 0 or a head_dim above 2^24. */
typedef struct pp_merge_args {
    int64_t num_rows, num_parts, head_dim;
    const float *v;
    int64_t v_stride_row, v_stride_part;
    const float *s;
    int64_t s_stride_row, s_stride_part;
    float *out;
    float *lse;
} pp_merge_args;

PP_API pp_status pp_merge_states(const pp_merge_args *args);

/* Plans and runs on `num_threads` threads with scratch of its own.  PP_NO_MEMORY when there is none. */
PP_API pp_status pp_decode(const pp_decode_args *args, int num_threads);

#ifdef __cplusplus
}
#endif
#endif
