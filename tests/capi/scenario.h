/* scenario.h: a pool of known numbers, sequences of uneven length in shuffled blocks, and reference attention by a
 * plain loop in double.  For the C and C++ programs in this folder. */
#ifndef SCENARIO_H
#define SCENARIO_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "pagepool/pagepool.h"

typedef struct scenario {
    pp_kv_pool pool;
    int32_t num_seqs;
    int32_t num_qo_heads;
    int32_t width;     /* blocks per row of the table */
    int32_t *tables;   /* (num_seqs, width); entries past a sequence's length are -1 */
    int32_t *seq_lens; /* (num_seqs,) */
    int32_t *starts;   /* (num_seqs + 1,): first query token of each sequence; by default one query token each */
    float *q;          /* (num_queries, num_qo_heads, head_dim) */
} scenario;

static inline uint32_t scenario_hash(uint32_t value) {
    value = (value ^ (value >> 16)) * 0x7feb352du;
    value = (value ^ (value >> 15)) * 0x846ca68bu;
    return value ^ (value >> 16);
}

/* A multiple of 1/64 from -2 to below 2: exact in f16 and bf16, so that gather returns the appended value. */
static inline float scenario_number(int which, int64_t seq, int64_t token, int64_t head, int64_t dim) {
    uint32_t index = (uint32_t)(((seq * 8192 + token) * 64 + head) * 512 + dim * 3 + which);
    return (float)((int32_t)(scenario_hash(index) & 255u) - 128) / 64.0f;
}

static inline void *scenario_memory(size_t bytes) {
    size_t rounded = (bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, rounded ? rounded : 64);
    CHECK(memory != NULL);
    memset(memory, 0xff, rounded ? rounded : 64);
    return memory;
}

static inline int64_t scenario_row_count(const scenario *s) {
    return (int64_t)s->starts[s->num_seqs] * s->num_qo_heads;
}

static inline int64_t scenario_out_count(const scenario *s) {
    return scenario_row_count(s) * s->pool.layout.v_head_dim;
}

/* An element of V; an element of K with v_in_k. */
static inline float scenario_v(const scenario *s, int64_t seq, int64_t token, int64_t head, int64_t dim) {
    return scenario_number(s->pool.layout.v_in_k ? 0 : 1, seq, token, head, dim);
}

static inline int32_t scenario_blocks_of(const scenario *s, int32_t seq) {
    return (s->seq_lens[seq] + s->pool.layout.block_size - 1) / s->pool.layout.block_size;
}

/* Appends tokens [begin, end) of one sequence, K and V of every layer.  Layer l contains the numbers of sequence
 * seq + 1000 * l. */
static inline void scenario_append(const scenario *s, int32_t seq, int32_t begin, int32_t end) {
    const pp_kv_layout *layout = &s->pool.layout;
    int64_t heads = layout->num_kv_heads, dims = layout->head_dim, v_dims = layout->v_head_dim, count = end - begin;
    float *k = (float *)scenario_memory((size_t)(count * heads * dims) * sizeof(float));
    float *v = (float *)scenario_memory((size_t)(count * heads * v_dims) * sizeof(float));
    const pp_kv_rows k_rows = {k, heads * dims, dims}, v_rows = {v, heads * v_dims, v_dims};
    int64_t *slots = (int64_t *)scenario_memory((size_t)count * sizeof(int64_t));
    for (int32_t layer = 0; layer < layout->num_layers; layer++) {
        for (int64_t t = 0; t < count; t++) {
            int64_t token = begin + t, block = s->tables[(int64_t)seq * s->width + token / layout->block_size];
            slots[t] = block * layout->block_size + token % layout->block_size;
            for (int64_t h = 0; h < heads; h++) {
                for (int64_t d = 0; d < dims; d++)
                    k[(t * heads + h) * dims + d] = scenario_number(0, seq + 1000 * layer, token, h, d);
                for (int64_t d = 0; d < v_dims; d++)
                    v[(t * heads + h) * v_dims + d] = scenario_v(s, seq + 1000 * layer, token, h, d);
            }
        }
        if (dims == v_dims)
            CHECK(pp_kv_append(&s->pool, layer, slots, count, k, v, PP_F32, heads * dims, dims) == PP_OK);
        else
            CHECK(pp_kv_append_rows(&s->pool, layer, slots, count, k_rows, v_rows, PP_F32) == PP_OK);
    }
    free(k);
    free(v);
    free(slots);
}

static inline void scenario_make_q(scenario *s) {
    int32_t head_dim = s->pool.layout.head_dim;
    free(s->q);
    s->q = (float *)scenario_memory((size_t)(scenario_row_count(s) * head_dim) * sizeof(float));
    for (int32_t i = 0; i < s->starts[s->num_seqs]; i++)
        for (int32_t h = 0; h < s->num_qo_heads; h++)
            for (int32_t d = 0; d < head_dim; d++)
                s->q[((int64_t)i * s->num_qo_heads + h) * head_dim + d] = scenario_number(2, i, 0, h, d);
}

/* Makes a pool with just enough blocks, assigned to the sequences in shuffled order, and a query token per sequence.
 * Appends nothing. */
static inline void scenario_make_of(scenario *s, const pp_kv_layout *layout, int32_t group, int32_t num_seqs,
                                    const int32_t *seq_lens) {
    memset(s, 0, sizeof *s);
    s->pool.layout = *layout;
    s->num_seqs = num_seqs;
    s->num_qo_heads = layout->num_kv_heads * group;
    s->seq_lens = (int32_t *)scenario_memory((size_t)num_seqs * sizeof(int32_t));
    memcpy(s->seq_lens, seq_lens, (size_t)num_seqs * sizeof(int32_t));
    for (int32_t seq = 0; seq < num_seqs; seq++) {
        s->pool.num_blocks += scenario_blocks_of(s, seq);
        if (s->width < scenario_blocks_of(s, seq)) s->width = scenario_blocks_of(s, seq);
    }
    s->width += 2;
    s->pool.base = (unsigned char *)scenario_memory((size_t)(s->pool.num_blocks * s->pool.layout.block_bytes));

    int32_t *ids = (int32_t *)scenario_memory((size_t)s->pool.num_blocks * sizeof(int32_t)), next = 0;
    for (int32_t i = 0; i < (int32_t)s->pool.num_blocks; i++) {
        int32_t other = (int32_t)(scenario_hash((uint32_t)i) % (uint32_t)(i + 1));
        ids[i] = ids[other];
        ids[other] = i;
    }
    s->tables = (int32_t *)scenario_memory((size_t)num_seqs * (size_t)s->width * sizeof(int32_t));
    for (int32_t seq = 0; seq < num_seqs; seq++)
        for (int32_t b = 0; b < scenario_blocks_of(s, seq); b++) s->tables[seq * s->width + b] = ids[next++];
    free(ids);

    s->starts = (int32_t *)scenario_memory((size_t)(num_seqs + 1) * sizeof(int32_t));
    for (int32_t seq = 0; seq <= num_seqs; seq++) s->starts[seq] = seq;
    scenario_make_q(s);
}

static inline void scenario_make(scenario *s, int32_t num_layers, int32_t num_kv_heads, int32_t group, int32_t head_dim,
                                 int32_t block_size, pp_dtype dtype, int32_t num_seqs, const int32_t *seq_lens) {
    pp_kv_layout layout;
    CHECK(pp_kv_layout_init(&layout, num_layers, num_kv_heads, head_dim, block_size, dtype) == PP_OK);
    scenario_make_of(s, &layout, group, num_seqs, seq_lens);
}

static inline void scenario_free(scenario *s) {
    free(s->pool.base);
    free(s->tables);
    free(s->seq_lens);
    free(s->starts);
    free(s->q);
}

static inline void scenario_args(const scenario *s, int32_t layer, float *out, float *lse, pp_decode_args *args) {
    memset(args, 0, sizeof *args);
    args->pool = &s->pool;
    args->layer = layer;
    args->num_seqs = s->num_seqs;
    args->num_qo_heads = s->num_qo_heads;
    args->q = s->q;
    args->q_stride_head = s->pool.layout.head_dim;
    args->q_stride_seq = (int64_t)s->num_qo_heads * s->pool.layout.head_dim;
    args->block_tables = s->tables;
    args->block_tables_stride = s->width;
    args->block_tables_width = s->width;
    args->seq_lens = s->seq_lens;
    args->sm_scale = 1.0f / sqrtf((float)s->pool.layout.head_dim);
    args->out = out;
    args->lse = lse;
}

/* Computes the results of `args`, whose q and results are f32, row by row as far as the interface allows: each query
 * head of a group in a call of its own, and each query token without a mask in a sequence of its own.  So a call of few
 * query tokens under a mask computes no panels, and other calls neither panels nor shared chunks. */
static inline void scenario_decode_apart(const scenario *s, const pp_decode_args *args) {
    const pp_kv_layout *layout = &s->pool.layout;
    const int32_t heads = layout->num_kv_heads, group = s->num_qo_heads / heads, dims = layout->v_head_dim;
    const size_t queries = (size_t)s->starts[s->num_seqs], most = queries + (size_t)s->num_seqs;
    int32_t *tables = (int32_t *)scenario_memory(most * (size_t)s->width * sizeof(int32_t));
    int32_t *lens = (int32_t *)scenario_memory(most * sizeof(int32_t));
    int32_t *starts = (int32_t *)scenario_memory((most + 1) * sizeof(int32_t));
    int64_t *indptr = (int64_t *)scenario_memory(most * sizeof(int64_t));
    int32_t *widths = (int32_t *)scenario_memory(most * sizeof(int32_t));
    float *slopes = (float *)scenario_memory((size_t)heads * sizeof(float));
    float *sinks = (float *)scenario_memory((size_t)heads * sizeof(float));
    float *out = (float *)scenario_memory(queries * (size_t)(heads * dims) * sizeof(float));
    float *lse = (float *)scenario_memory(queries * (size_t)heads * sizeof(float));
    pp_decode_args one = *args;
    one.num_seqs = starts[0] = 0;
    for (int32_t seq = 0; seq < s->num_seqs; seq++) {
        const int32_t count = s->starts[seq + 1] - s->starts[seq];
        const int masked = args->custom_mask && args->mask_indptr[seq] >= 0;
        for (int32_t i = 0; i < (masked ? 1 : count); i++, one.num_seqs++) {
            const int32_t end = s->seq_lens[seq] - (masked ? 0 : count - 1 - i), at = one.num_seqs;
            memcpy(tables + (size_t)at * (size_t)s->width, s->tables + (size_t)seq * (size_t)s->width,
                   (size_t)s->width * sizeof(int32_t));
            lens[at] = end > 0 ? end : 0;
            starts[at + 1] = starts[at] + (masked ? count : 1);
            indptr[at] = masked ? args->mask_indptr[seq] : -1;
            widths[at] = masked ? args->mask_widths[seq] : 0;
        }
    }
    one.block_tables = tables;
    one.seq_lens = lens;
    one.query_start_loc = starts;
    one.mask_indptr = indptr;
    one.mask_widths = widths;
    one.num_qo_heads = heads;
    one.q_stride_head = group * args->q_stride_head;
    one.alibi_slopes = args->alibi_slopes ? slopes : NULL;
    one.sinks = args->sinks ? sinks : NULL;
    one.out = out;
    one.lse = lse;
    one.no_cascade = 1;
    for (int32_t g = 0; g < group; g++) {
        one.q = (const float *)args->q + g * args->q_stride_head;
        for (int32_t h = 0; h < heads; h++) {
            if (args->alibi_slopes) slopes[h] = args->alibi_slopes[h * group + g];
            if (args->sinks) sinks[h] = args->sinks[h * group + g];
        }
        CHECK(pp_decode(&one, 1) == PP_OK);
        for (size_t i = 0; i < queries; i++)
            for (int32_t h = 0; h < heads; h++) {
                const size_t from = i * (size_t)heads + (size_t)h;
                const size_t to = i * (size_t)s->num_qo_heads + (size_t)(h * group + g);
                memcpy((float *)args->out + to * (size_t)dims, out + from * (size_t)dims,
                       (size_t)dims * sizeof(float));
                if (args->lse) args->lse[to] = lse[from];
            }
    }
    free(tables);
    free(lens);
    free(starts);
    free(indptr);
    free(widths);
    free(slopes);
    free(sinks);
    free(out);
    free(lse);
}

/* Units of a plan for one thread, the argument of scenario_run_range. */
typedef struct scenario_range {
    pp_decode_plan *plan;
    int64_t begin, end;
} scenario_range;

static inline void *scenario_run_range(void *argument) {
    const scenario_range *own = (const scenario_range *)argument;
    pp_decode_run(own->plan, own->begin, own->end);
    return NULL;
}

/* Returns whether query token i of a sequence attends to token t. */
static inline int scenario_sees(const scenario *s, const pp_decode_args *args, int32_t seq, int32_t i, int32_t t) {
    int32_t count = s->starts[seq + 1] - s->starts[seq], position = s->seq_lens[seq] - count + i;
    if (args->window && position - t >= args->window) return 0;
    if (!args->custom_mask || args->mask_indptr[seq] < 0) return t <= position;
    int64_t width = args->mask_widths[seq], column = t - (s->seq_lens[seq] - width), bit = i * width + column;
    return column < 0 || (args->custom_mask[args->mask_indptr[seq] + bit / 8] >> bit % 8 & 1);
}

/* Compares one head of one query token with attention in double over the appended numbers.  Queries are exact in bf16,
 * so bf16 arithmetic rounds only the weights, by up to 2^-8 of each and of their sum. */
static inline void scenario_check_row(const scenario *s, const pp_decode_args *args, int32_t seq, int32_t i,
                                      int32_t head) {
    const pp_kv_layout *layout = &s->pool.layout;
    int32_t dims = layout->head_dim, v_dims = layout->v_head_dim, length = s->seq_lens[seq], any = 0;
    int32_t kv_head = head / (s->num_qo_heads / layout->num_kv_heads);
    int32_t position = length - (s->starts[seq + 1] - s->starts[seq]) + i;
    int64_t row = (int64_t)(s->starts[seq] + i) * s->num_qo_heads + head, source = seq + 1000 * args->layer;
    const float *q = s->q + row * dims, *out = (const float *)args->out + row * v_dims;
    double *weight = (double *)scenario_memory((size_t)length * sizeof(double));
    double largest = args->sinks ? (double)args->sinks[head] : -INFINITY, sum = 0.0, error = 0.0, scale = 0.0;
    const double rounding = args->arithmetic == PP_ROUNDED_BF16 ? 1.01 / 128 : 0.0;
    for (int32_t t = 0; t < length; t++) {
        double score = 0.0;
        weight[t] = -INFINITY;
        if (!scenario_sees(s, args, seq, i, t)) continue;
        for (int32_t d = 0; d < dims; d++)
            score += (double)q[d] * (double)scenario_number(0, source, t, kv_head, d);
        score *= (double)args->sm_scale;
        if (args->logits_soft_cap != 0.0f)
            score = (double)args->logits_soft_cap * tanh(score / (double)args->logits_soft_cap);
        if (args->alibi_slopes) score += (double)args->alibi_slopes[head] * (t - position);
        weight[t] = score;
        any = 1;
        if (score > largest) largest = score;
    }
    if (any && args->sinks) sum = exp((double)args->sinks[head] - largest);
    for (int32_t t = 0; t < length; t++) sum += weight[t] = weight[t] == -INFINITY ? 0.0 : exp(weight[t] - largest);
    for (int32_t t = 0; any && t < length; t++) weight[t] /= sum;
    for (int32_t d = 0; d < v_dims; d++) {
        double expected = 0.0, size = 0.0;
        for (int32_t t = 0; t < length; t++) {
            if (weight[t] == 0.0) continue;
            expected += weight[t] * (double)scenario_v(s, source, t, kv_head, d);
            size += weight[t] * fabs((double)scenario_v(s, source, t, kv_head, d));
        }
        error = fmax(error, fabs(expected - (double)out[d]) - rounding * size);
        scale = fmax(scale, fabs(expected));
    }
    CHECK(error <= 1e-5 * scale);
    if (args->lse != NULL && !any) CHECK(isinf(args->lse[row]) && args->lse[row] < 0.0f);
    if (args->lse != NULL && any)
        CHECK(fabs(args->lse[row] - (largest + log(sum))) <= 1e-5 * (1.0 + fabs(largest)) + rounding);
    free(weight);
}

static inline void scenario_check(const scenario *s, const pp_decode_args *args) {
    for (int32_t seq = 0; seq < s->num_seqs; seq++)
        for (int32_t i = 0; i < s->starts[seq + 1] - s->starts[seq]; i++)
            for (int32_t head = 0; head < s->num_qo_heads; head++) scenario_check_row(s, args, seq, i, head);
}

#endif
