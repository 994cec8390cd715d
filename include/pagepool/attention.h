/* pagepool/attention.h: attention over pages, decode and prefill, for callers of C.
 *
 * One query token per sequence, or several, attends over the K and V that the pool holds for it:
 *
 *     out[i, h] = sum_t softmax_t(sm_scale * q[i, h] . K[s, t, h / G]) * V[s, t, h / G]
 *     G = num_qo_heads / num_kv_heads,   s = the sequence of query token i
 *
 * The query tokens of a sequence are its last ones: of n, the one of index i stands at position seq_len - n + i.  It
 * sees the tokens up to its position (causal), and has then exactly the bits of a lone query token of the sequence that
 * ends there.  Or a mask says what it sees, for trees of speculated tokens: bit i * width + j (little-endian in each
 * byte) is for token seq_len - width + j (none where that is below 0), and the tokens before the last `width` are seen
 * by all.  With width = n that is a tree over the speculated tokens, with width = seq_len a full mask.  A window and
 * ALiBi count from the query token's position.  A query token that sees nothing gives zeros and the lse -inf, whatever
 * its sink; so do, without a mask, the first of more than seq_len query tokens, which stand before the sequence.
 *
 * A plan cuts the work into units that do not depend on each other; any thread may run any range of them, in any
 * order.  The result is complete when each unit was run exactly once, and its bits do not depend on who ran what, nor
 * on how the threads round or flush subnormals (they compute as IEEE 754 has it, and have their modes back afterwards):
 *
 *     pp_decode_args args = {.pool = &pool, .sm_scale = 1.0f / sqrtf(head_dim), .num_threads = 2, ...};
 *     size_t bytes;                                             // of scratch: how much the plan wants
 *     if (pp_decode_workspace(&args, &bytes) != PP_OK) ...
 *     void *workspace = aligned_alloc(64, bytes);
 *     pp_decode_plan plan;
 *     if (pp_decode_plan_init(&plan, &args, workspace, bytes) != PP_OK) ...
 *     // thread A:  pp_decode_run(&plan, 0, plan.num_units / 2);
 *     // thread B:  pp_decode_run(&plan, plan.num_units / 2, plan.num_units);
 *     // both have ended:  free(workspace);
 *
 * Sequences of many query tokens, whole prompts or chunks of them, are cut into blocks of these, whose results are
 * computed in tiles of many rows (a row: a query head of a query token) and written without partial results, in scratch
 * that does not grow with the tokens.  Their bits are those of decode, token by token.
 *
 * Chunks of PP_CHUNK tokens that begin what several sequences of the call see, with the same block ids, are read once
 * for all of their query tokens (cascade attention): a system prompt, the common part of parallel samples, a tree of
 * them.  They are found in the block tables.  No bit depends on it.
 *
 * A thread that runs units must have been started, or woken through a lock, after pp_decode_plan_init; who has waited
 * for all of them sees the results.  Any number of plans of one pool may run at the same time, and so may pp_kv_append
 * into slots whose tokens none of them sees.  pp_decode() does all of the above with the threads of pagepool/threads.h.
 *
 * Set the fields of pp_decode_args that you do not use to 0 (an initializer does, or memset).  0 means "none" for all
 * but the counts and sm_scale, which has no default: 0 would weigh all tokens alike.
 *
 * Where K or V is quantised, the queries, and the weights of 32 tokens times these tokens' scales, are rounded to
 * integers of up to 32,512 times a scale, and all products and sums over elements are of integers: an RMS error below
 * 1e-4 of the result's.  A token whose scale is not finite makes a head that gives it weight NaN.
 *
 * Numbers are what IEEE 754 makes of them: a NaN in q or K makes a head NaN, one in V its own dim.  A score of +inf
 * makes a head NaN, as may a q that is not finite once it is multiplied by sm_scale log2(e), for scores are in base 2;
 * and a token whose score is -inf weighs nothing (where all are, the head is NaN and its lse -inf; with a sink zeros,
 * and the sink).  A sink of -inf is none, one of +inf makes a head NaN.  Values are added up in f32, with weights of up
 * to 2^8, before they are divided by the sum of the weights: |V| times the number of tokens that weigh about the same
 * has to stay below 2^120 (1.3e36), or the result may be infinite. */
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
#define PP_TILE 32   /* tokens between two looks at what scores are shifted by */

/* What decode computes in.
 *
 * PP_EXACT: f32 products and sums of the stored values.  A head's error is below 1e-5 of its largest output, as long as
 * scores stay below 20 or so: they are f32, and errors grow with their size.
 *
 * PP_ROUNDED_BF16, for pages of bf16: queries are rounded to bf16, and so are the softmax's weights, and both are
 * multiplied by the CPU's dot products of pairs of bf16 (AVX512_BF16), which do twice as much as fma.  All else stays
 * f32, subnormals being zeros in the products and their sums.  bf16 has 8 binary digits, so that rounding takes less
 * than 2^-8 of a number.  It puts a score off by at most
 *
 *     E = 2^-8 |sm_scale| max_t sum_d |q[d] K[t][d]|
 *
 * and with it a result by (exp(2 E) (1 + 2^-7) - 1) sum_t weight[t] |V[t]| and the lse by E + 2^-8, beside what f32
 * rounds; on random numbers it is a fiftieth of that or less.  The bits are fixed as those of exact arithmetic are,
 * and the same with and without the instruction; without it they take longer than exact ones.
 *
 * Both have the same bits on every instruction set with fma.  "baseline" (pagepool/cpu.h), which has none, rounds
 * products before they are added: its bits are as fixed, but others. */
typedef enum pp_arithmetic { PP_EXACT = 0, PP_ROUNDED_BF16 = 1 } pp_arithmetic;

typedef struct pp_decode_args {
    const pp_kv_pool *pool;
    int32_t layer;
    int32_t num_seqs;
    int32_t num_qo_heads;         /* a multiple of the pool's num_kv_heads */
    const void *q;                /* (num_queries, num_qo_heads, head_dim); the last axis is contiguous */
    int64_t q_stride_seq;         /* from one query token to the next, in elements */
    int64_t q_stride_head;
    const int32_t *query_start_loc; /* NULL: one query token per sequence; else (num_seqs + 1,), from 0 upwards:
                                     sequence s has the query tokens [query_start_loc[s], query_start_loc[s + 1]) */
    const uint8_t *custom_mask;   /* NULL: causal; else bits, see above */
    const int64_t *mask_indptr;   /* (num_seqs,): the byte at which a sequence's bits begin; below 0: it is causal */
    const int32_t *mask_widths;   /* (num_seqs,): how many of its last tokens a sequence's bits are about */
    const int32_t *block_tables;  /* (num_seqs, block_tables_width), rows block_tables_stride apart */
    int64_t block_tables_stride;  /* in elements */
    int64_t block_tables_width;
    const int32_t *seq_lens;      /* (num_seqs,): tokens whose K and V are in the pages */
    float sm_scale;               /* of scores: 1 / sqrt(head_dim) in most models; from -2e38 to 2e38 */
    int64_t window;               /* 0: every token; else the last `window` ones up to the query's own.  Blocks before
                                     all windows of a sequence are not read, nor their ids; those that only a mask
                                     hides are */
    float logits_soft_cap;        /* 0: none; else, from 1e-30 to 1e30, a score becomes cap * tanh(score / cap) */
    const float *alibi_slopes;    /* NULL, or (num_qo_heads,): slope * (t - position) is added, after the cap */
    const float *sinks;           /* NULL, or (num_qo_heads,): a score that takes weight and has no value */
    int32_t num_threads;          /* who share the units: decides how finely they are cut, never a bit.  There may be
                                     scratch for as many ranges at a time: one more waits until one of them ends */
    void *out;                    /* (num_queries, num_qo_heads, v_head_dim), C-contiguous */
    float *lse;                   /* NULL, or (num_queries, num_qo_heads): log of the sum of exp(scores), with sinks */
    float *block_scores;          /* NULL, or (num_queries, num_qo_heads, block_tables_width): the weights block by
                                     block, 0 for blocks outside of what a query may see.  No two of the three may
                                     overlap, nor anything that is read */
    int32_t arithmetic;           /* pp_arithmetic */
    int32_t q_dtype, out_dtype;   /* pp_dtype of q, widened exactly, and of out, rounded to nearest even */
    int32_t no_cascade;           /* 1: chunks that sequences share are read once for each of them; no bit differs */
} pp_decode_args;

typedef struct pp_decode_plan {
    pp_decode_args args;
    int64_t num_units;
    /* private */
    int32_t slices, block_queries, num_slots, num_shared;
    int64_t row_stride, row_elements, blocks_per_chunk, slot_bytes;
    float *q, *partial;
    unsigned char *slots;
    int64_t *unit_begin, *ids_begin, *packed_begin, *record_begin;
    int32_t *remaining, *query_begin, *seq_lens, *ids, *slot_taken, *order, *shared_chunks, *common,
        *heads_left;
    struct pp_shared_run *shared;
} pp_decode_plan;

/* The bytes of scratch that a plan for `args` needs: 0 < bytes, a multiple of 64.  Depends only on the layout, the
 * sizes, dtypes, arithmetic, seq_lens, query_start_loc, first block ids, window, num_threads, the instruction set and
 * whether there are a mask, slopes and block_scores, and reads no other array but mask_widths.  PP_INVALID_ARGUMENT as
 * of pp_decode_plan_init, where it can be told from these. */
PP_API pp_status pp_decode_workspace(const pp_decode_args *args, size_t *bytes);

/* Checks everything (PP_INVALID_ARGUMENT: a size, a num_qo_heads that num_kv_heads does not divide, an arithmetic that
 * the pages are not for, a scale or soft cap out of range, a seq_len below 0 or past the table's width, a
 * query_start_loc that does not begin with 0 or falls, an array or a pool's memory that is missing, a workspace that is
 * too small or not aligned, results or a workspace that overlap each other or anything that is read, whatever the
 * strides; PP_INVALID_BLOCK: an id out of range, of a block that is not before all windows of its sequence) and plans;
 * nothing is written on failure but the workspace. `workspace` is 64-byte aligned and must live until the last unit is
 * done; so must q, the pool, the mask with its two arrays, sinks and the results.  block_tables, seq_lens,
 * query_start_loc and slopes are copied.  Running a unit takes up to 20 KB of stack. */
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
 *            tokens, whose v does not count; inf or NaN: the row becomes NaN
 *   out      (num_rows, head_dim), C-contiguous; must not overlap v or s
 *   lse      NULL, or (num_rows,)
 *
 * A row whose parts are all without tokens (or num_parts 0) becomes zeros and -inf.  The bits depend on the row alone.
 * PP_INVALID_ARGUMENT, and nothing written, for a size below 0, a head_dim above 2^24, an array that is missing and
 * results that overlap each other or what is read. */
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

/* Plans and runs on up to `num_threads` threads, fewer for work of a few microseconds, with scratch of its own.
 * PP_NO_MEMORY when there is none.  The calling thread keeps up to 8 MB of scratch for its next call, until it ends. */
PP_API pp_status pp_decode(const pp_decode_args *args, int num_threads);

/* The same for the new tokens of prompts, or of chunks of them: query_start_loc must be there, or it is
 * PP_INVALID_ARGUMENT.  Sequences with one new token may be among them. */
PP_API pp_status pp_prefill(const pp_decode_args *args, int num_threads);

#ifdef __cplusplus
}
#endif
#endif
