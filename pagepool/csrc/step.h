/* step.h: all decoder layers of a model in bf16 in one call, for the tokens of one step.
 *
 * A layer of Llama, Mistral, Qwen 2 or Qwen 3 computes for each row x of a token:
 *
 *     q, k, v = qkv(norm(x));   q, k = rotate(query_norm(q)), rotate(key_norm(k))
 *     x = x + output(attention(q, pages with k and v))
 *     gate, up = gate_and_up(mlp_norm(x))
 *     x = x + down(f(gate) * up)
 *
 * Each operation is a function of elementwise.h, linear.h, linear_quantised.h, layout.h or attention.h, which rounds
 * where torch rounds.  A row's result therefore has the same bits as operation by operation, for any number of rows and
 * threads.  With 30 layers of 576 elements, weights of 4 bits and two threads, a decode step of one user takes 0.56 of
 * the time of calls from Python. */
#ifndef PP_STEP_H
#define PP_STEP_H

#include "linear_quantised.h"
#include "pagepool/attention.h"

/* The linear layers of a decoder layer. */
enum { PP_STEP_QKV, PP_STEP_OUTPUT, PP_STEP_GATE_AND_UP, PP_STEP_DOWN, PP_STEP_LINEARS };

/* A linear layer: quantised weights, or packed ones for up to few_rows rows, or else a call of pp_step.multiply. */
typedef struct pp_step_linear {
    int64_t outputs;
    const pp_quantised *quantised; /* for pp_linear_quantised; or NULL */
    int32_t num_quantised;
    const void *packed;            /* for pp_linear_few */
    const uint16_t *bias;          /* or NULL */
    int64_t few_rows;              /* may be 0 */
} pp_step_linear;

typedef struct pp_step_norm {
    const uint16_t *weight;
    float eps;
} pp_step_norm;

typedef struct pp_step_layer {
    pp_step_linear linears[PP_STEP_LINEARS];
    pp_step_norm norm, mlp_norm;
    pp_step_norm query_norm, key_norm; /* of each head; weight NULL: none */
    const uint16_t *activation;        /* f of all 65,536 values, as in pp_lookup_mul */
    float sm_scale;
    int32_t group, pool_layer;
} pp_step_layer;

/* The pages of the layers of one group. */
typedef struct pp_step_group {
    pp_decode_args attention;    /* pool, sequences, tables, window and arithmetic */
    const int64_t *slot_mapping; /* (rows,) */
} pp_step_group;

typedef struct pp_step {
    const pp_step_layer *layers;
    int32_t num_layers;
    pp_step_norm norm; /* after the last layer */
    int64_t rows, hidden_size;
    int32_t num_qo_heads, num_kv_heads, head_dim;
    const uint16_t *cos, *sin; /* (rows, head_dim) */
    const pp_step_group *groups;
    int num_threads;
    /* Returns the results of linear layer `place` of a layer, which may be written to and live until the next call for
     * the same place.  NULL: it failed.  Its input is normed, attended, normed or activated. */
    uint16_t *(*multiply)(void *context, int32_t layer, int32_t place);
    void *context;
    /* Rows that do not overlap.  x has the inputs of the first layer and is overwritten, normed gets the results. */
    uint16_t *x, *normed, *attended, *activated; /* hidden_size, hidden_size, queries, half of gate and up */
    uint16_t *qkv, *added, *gate_and_up;         /* results of linear layers; `added` has hidden_size elements */
} pp_step;

/* Stores keys and values of all layers, and computes the norm of the last layer's results.  Returns the status of
 * pp_kv_append_rows, pp_decode or a linear layer, or PP_INVALID_ARGUMENT if `multiply` returned NULL.  After a failure
 * the buffers are undefined, and keys and values of some layers may be stored. */
pp_status pp_step_run(const pp_step *step);

#endif
