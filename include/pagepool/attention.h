/* pagepool/attention.h: attention over paged K and V, decode and prefill, for C callers.
 *
 * Each query token attends over the K and V that the pool stores for its sequence:
 *
 *     out[i, h] = sum_t softmax_t(sm_scale * q[i, h] . K[s, t, h / G]) * V[s, t, h / G]
 *     G = num_qo_heads / num_kv_heads,   s = the sequence of query token i
 *
 * Positions.  The n query tokens of a sequence are its last tokens: query token i has position seq_len - n + i.  With
 * n > seq_len the first ones have negative positions; without a mask they attend to nothing.
 *
 * Causal attention is the default: a query token attends to the tokens up to its own position.  Its result has the same
 * bits as a single query token of a sequence that ends at this position.
 *
 * A custom mask serves trees of speculated tokens.  Bit i * width + j (little-endian within each byte) tells whether
 * query token i attends to token seq_len - width + j; bits for negative positions are ignored.  Every query token
 * attends to all tokens before the last `width`.  width = n gives a tree over the speculated tokens, width = seq_len a
 * full mask.  A window and ALiBi count from the query token's position.
 *
 * A query token that attends to no token gives zeros and an lse of -inf, regardless of its sink.
 *
 * A plan divides the work into independent units.  Any thread may run any range of units, in any order.  The result is
 * complete when each unit has run exactly once.  Its bits do not depend on the threads, nor on their rounding mode or
 * flush-to-zero: units run with IEEE 754 defaults and restore the thread's modes afterwards.
 *
 *     pp_decode_args args = {.pool = &pool, .sm_scale = 1.0f / sqrtf(head_dim), .num_threads = 2, ...};
 *     size_t bytes;                                             // size of the workspace that the plan needs
 *     if (pp_decode_workspace(&args, &bytes) != PP_OK) ...
 *     void *workspace = aligned_alloc(64, bytes);
 *     pp_decode_plan plan;
 *     if (pp_decode_plan_init(&plan, &args, workspace, bytes) != PP_OK) ...
 *     // thread A:  pp_decode_run(&plan, 0, plan.num_units / 2);
 *     // thread B:  pp_decode_run(&plan, plan.num_units / 2, plan.num_units);
 *     // both have ended:  free(workspace);
 *
 * Sequences with many query tokens (prompts or chunks of prompts) are divided into blocks of query tokens.  A block is
 * computed in tiles of many rows (a row is one query head of one query token) and written without partial results.  Its
 * scratch does not grow with the number of tokens.  The bits equal those of decode, token by token.
 *
 * Cascade attention: if several sequences of a call begin with the same block ids (a system prompt, parallel samples, a
 * tree of samples), their common chunks of PP_CHUNK tokens are read once for all their query tokens.  The plan finds
 * them in the block tables.  Cascade changes no bit.
 *
 * Threads.  A thread that runs units must start, or be woken through a lock, after pp_decode_plan_init.  A thread that
 * has waited for all of them sees the results.  Any number of plans of one pool may run at the same time, and
 * pp_kv_append may write slots that no running plan reads.  pp_decode() does all of the above with the threads of
 * pagepool/threads.h.
 *
 * Set unused fields of pp_decode_args to 0, with an initializer or memset.  0 means "none" for all fields except the
 * counts and sm_scale.  sm_scale has no default: 0 would give all tokens the same weight.
 *
 * Quantised K or V: the kernel rounds queries, and the weights of 32 tokens times the tokens' scales, to integers of up
 * to 32,512 times a scale.  All products and sums over elements are integers.  The RMS error is below 1e-4 of the
 * result's RMS.  If a token with a non-finite scale has a weight, the head's result is NaN.
 *
 * Special values follow IEEE 754.  A NaN in q or K makes the head NaN.  A NaN in V makes its own dim NaN.  A score of
 * +inf makes the head NaN.  Scores are in base 2, so a q that is not finite after multiplication by sm_scale log2(e)
 * can make the head NaN.  A token with a score of -inf has weight 0.  If all scores are -inf, the head is NaN and its
 * lse -inf; with a sink the head is zeros and the lse is the sink.  A sink of -inf is no sink, a sink of +inf makes the
 * head NaN.
 *
 * Values are summed in f32 with weights of up to 2^8, then divided by the sum of the weights.  |V| times the number of
 * tokens with similar weights must stay below 2^120 (1.3e36); otherwise the result may be infinite. */
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

#define PP_CHUNK 512 /* tokens per chunk: a sequence may be split at multiples of it, in absolute positions */
#define PP_TILE 32   /* tokens per softmax tile: the maximum score is updated once per tile */

/* The arithmetic of decode and prefill.
 *
 * PP_EXACT: f32 products and sums of the stored values.  A head's error is below 1e-5 of its largest output if scores
 * stay below about 20.  Scores are f32, so the error grows with them.
 *
 * PP_BF16X2 and PP_ROUNDED_BF16 require bf16 or f16 pages; a number in f16 is the sum of two bf16 numbers.  Their
 * products are those of AMX's TDPBF16PS.  A CPU without AMX computes the same bits by vectors, no faster than PP_EXACT.
 * All other arithmetic is f32.  Products and their sums treat subnormals as zeros.
 *
 * PP_BF16X2: a softmax weight is the sum of two bf16 numbers.  A query element is one bf16 number (bf16), or the sum of
 * two (f16) or three (f32).  The error is below 1e-5 of a head's largest output on normally distributed numbers.  An
 * infinity in K, V or a query may make a result NaN.
 *
 * PP_ROUNDED_BF16: queries and softmax weights are rounded to bf16.  bf16 has 8 binary digits, so rounding changes a
 * number by less than 2^-8 of it.  The error of a score is at most
 *
 *     E = 2^-8 |sm_scale| max_t sum_d |q[d] K[t][d]|
 *
 * and the error of a result at most (exp(2 E) (1 + 2^-7) - 1) sum_t weight[t] |V[t]|, of the lse E + 2^-8, plus f32
 * rounding.  On random numbers the error is a fiftieth of the bound or less.
 *
 * Each has the same bits on every instruction set with fma.  "baseline" (pagepool/cpu.h) has no fma and rounds
 * products before it adds them: its bits are deterministic but different. */
typedef enum pp_arithmetic { PP_EXACT = 0, PP_ROUNDED_BF16 = 1, PP_BF16X2 = 2 } pp_arithmetic;

typedef struct pp_decode_args {
    const pp_kv_pool *pool;
    int32_t layer;
    int32_t num_seqs;
    int32_t num_qo_heads;         /* a multiple of the pool's num_kv_heads */
    const void *q;                /* (num_queries, num_qo_heads, head_dim); the last axis is contiguous */
    int64_t q_stride_seq;         /* from one query token to the next, in elements */
    int64_t q_stride_head;
    const int32_t *query_start_loc; /* NULL: one query token per sequence; or (num_seqs + 1,), starts at 0, ascending:
                                     sequence s has the query tokens [query_start_loc[s], query_start_loc[s + 1]) */
    const uint8_t *custom_mask;   /* NULL: causal; otherwise the mask bits, see above */
    const int64_t *mask_indptr;   /* (num_seqs,): byte offset of the sequence's mask bits; negative: causal */
    const int32_t *mask_widths;   /* (num_seqs,): `width` of the sequence's mask, counted from its last token */
    const int32_t *block_tables;  /* (num_seqs, block_tables_width), rows block_tables_stride apart */
    int64_t block_tables_stride;  /* in elements */
    int64_t block_tables_width;
    const int32_t *seq_lens;      /* (num_seqs,): tokens with K and V in the pages */
    float sm_scale;               /* factor of scores: 1 / sqrt(head_dim) in most models; from -2e38 to 2e38 */
    int64_t window;               /* 0: every token; otherwise the last `window` tokens up to the query token's own.
                                     Blocks and ids before all windows of a sequence are not read.  Blocks that only a
                                     mask hides are read */
    float logits_soft_cap;        /* 0: none; or 1e-30 to 1e30: a score becomes cap * tanh(score / cap) */
    const float *alibi_slopes;    /* NULL, or (num_qo_heads,): slope * (t - position) is added after the cap */
    const float *sinks;           /* NULL, or (num_qo_heads,): a score that takes weight and has no value */
    int32_t num_threads;          /* threads that share the units: sets the size of units and changes no bit.  The
                                     workspace may have scratch for num_threads concurrent ranges only: a further
                                     range waits until one of them ends */
    void *out;                    /* (num_queries, num_qo_heads, v_head_dim), C-contiguous */
    float *lse;                   /* NULL, or (num_queries, num_qo_heads): log of the sum of exp(scores), with sinks.
                                     out and lse must not overlap each other or any input */
    int32_t arithmetic;           /* pp_arithmetic */
    int32_t q_dtype, out_dtype;   /* pp_dtype of q, widened exactly, and of out, rounded to nearest even */
    int32_t no_cascade;           /* 1: shared chunks are read once per sequence; no bit differs */
} pp_decode_args;

typedef struct pp_decode_plan {
    pp_decode_args args;
    int64_t num_units;
    /* private */
    int32_t slices, block_queries, num_slots, num_shared;
    int64_t row_stride, row_elements, slot_bytes;
    float *q, *partial;
    unsigned char *slots;
    int64_t *unit_begin, *ids_begin, *packed_begin, *record_begin;
    int32_t *remaining, *query_begin, *seq_lens, *ids, *slot_taken, *order, *shared_chunks, *common,
        *heads_left;
    struct pp_shared_run *shared;
} pp_decode_plan;

/* Stores in `bytes` the workspace size of a plan for `args`: positive and a multiple of 64.  The size depends on the
 * layout, sizes, dtypes, arithmetic, seq_lens, query_start_loc, first block ids, window, num_threads, the instruction
 * set, and on the presence of a mask and slopes.  The only other array it reads is mask_widths.  Returns
 * PP_INVALID_ARGUMENT like pp_decode_plan_init, for errors visible in these inputs. */
PP_API pp_status pp_decode_workspace(const pp_decode_args *args, size_t *bytes);

/* Checks all arguments and plans.  On failure only the workspace may have been written.
 *
 * PP_INVALID_ARGUMENT:
 *   - a size out of range, num_qo_heads not a multiple of num_kv_heads, sm_scale or logits_soft_cap out of range
 *   - an arithmetic that does not support the pages' dtypes
 *   - a seq_len below 0 or beyond the table's width
 *   - a query_start_loc that does not start at 0 or decreases
 *   - a missing array, a pool without memory
 *   - a workspace that is too small or not 64-byte aligned
 *   - results or a workspace that overlap each other or any input, for any strides
 * PP_INVALID_BLOCK: a block id out of range, unless the block is before all windows of its sequence.
 *
 * The workspace, q, the pool, the mask with its two arrays, sinks and the results must live until the last unit has
 * run.  block_tables, seq_lens, query_start_loc and slopes are copied.  A unit uses up to 20 KB of stack. */
PP_API pp_status pp_decode_plan_init(pp_decode_plan *plan, const pp_decode_args *args, void *workspace, size_t bytes);

/* Runs units [begin, end).  Each unit must run exactly once. */
PP_API void pp_decode_run(pp_decode_plan *plan, int64_t begin, int64_t end);

/* Merges partial results of the same queries over disjoint tokens, in order.  The result is attention over all tokens.
 * For each of `num_rows` rows:
 *
 *     out = sum_i v[i] exp(s[i] - m) / sum_i exp(s[i] - m),   lse = m + log(sum_i exp(s[i] - m)),   m = max_i s[i]
 *
 *   v        part i of row r at v + r * v_stride_row + i * v_stride_part, head_dim contiguous elements
 *   s        lse of part i of row r at s + r * s_stride_row + i * s_stride_part; -inf: a part without tokens, its v is
 *            ignored; inf or NaN: the row becomes NaN
 *   out      (num_rows, head_dim), C-contiguous; must not overlap v or s
 *   lse      NULL, or (num_rows,)
 *
 * A row without tokens in any part (or num_parts 0) becomes zeros and an lse of -inf.  The bits depend on the row
 * alone.  Returns PP_INVALID_ARGUMENT and writes nothing for a negative size, a head_dim above 2^24, a missing array,
 * or results that overlap each other or an input. */
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

/* Plans and runs on up to `num_threads` threads, with its own workspace.  Work of a few microseconds uses fewer
 * threads.  PP_NO_MEMORY if the workspace cannot be allocated.  The calling thread keeps up to 8 MB of it for the next
 * call; it is freed when the thread ends. */
PP_API pp_status pp_decode(const pp_decode_args *args, int num_threads);

/* The same for the new tokens of prompts or of chunks of prompts.  query_start_loc is required (PP_INVALID_ARGUMENT).
 * Sequences with one new token are allowed. */
PP_API pp_status pp_prefill(const pp_decode_args *args, int num_threads);

#ifdef __cplusplus
}
#endif
#endif
