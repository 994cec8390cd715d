/* step.c: see step.h. */
#include "step.h"

#include <stddef.h>

#include "elementwise.h"
#include "linear.h"

/* Multiplies x by linear layer `place`.  Returns the results, in `out` or in memory of pp_step.multiply, or NULL with
 * the reason in `status`. */
static uint16_t *multiply(const pp_step *step, int32_t layer, int32_t place, const uint16_t *x, int64_t inputs,
                          uint16_t *out, pp_status *status) {
    const pp_step_linear *linear = &step->layers[layer].linears[place];
    if (linear->quantised) {
        *status = pp_linear_quantised(x, PP_BF16, step->rows, inputs, linear->quantised, linear->num_quantised, out,
                                      step->num_threads);
    } else if (step->rows <= linear->few_rows) {
        *status = pp_linear_few(x, step->rows, inputs, linear->packed, linear->bias, linear->outputs, out,
                                step->num_threads);
    } else {
        uint16_t *found = step->multiply(step->context, layer, place);
        if (!found) *status = PP_INVALID_ARGUMENT;
        return found;
    }
    return *status == PP_OK ? out : NULL;
}

/* Writes x + added to x unless `added` is NULL, and its norm to step->normed. */
static void normalise(const pp_step *step, const uint16_t *added, pp_step_norm norm) {
    pp_rms_norm(step->x, added, norm.weight, norm.eps, step->rows, step->hidden_size, step->x, step->normed,
                step->num_threads);
}

/* Stores the keys and values in rows of q, k and v, and attends with the queries. */
static pp_status attend(const pp_step *step, const pp_step_layer *layer, uint16_t *qkv) {
    const int64_t dim = step->head_dim, queries = step->num_qo_heads, keys = step->num_kv_heads;
    const int64_t width = (queries + 2 * keys) * dim;
    uint16_t *k = qkv + queries * dim, *v = k + keys * dim;
    if (layer->query_norm.weight) {
        pp_rms_norm_heads(qkv, width, layer->query_norm.weight, layer->query_norm.eps, step->rows, queries, dim,
                          step->num_threads);
        pp_rms_norm_heads(k, width, layer->key_norm.weight, layer->key_norm.eps, step->rows, keys, dim,
                          step->num_threads);
    }
    pp_rotate(qkv, width, step->cos, step->sin, step->rows, queries + keys, dim, step->num_threads);
    const pp_step_group *group = step->groups + layer->group;
    const pp_kv_rows k_rows = {k, width, dim}, v_rows = {v, width, dim};
    const pp_status status = pp_kv_append_rows(group->attention.pool, layer->pool_layer, group->slot_mapping,
                                               step->rows, k_rows, v_rows, PP_BF16);
    if (status != PP_OK) return status;
    pp_decode_args args = group->attention;
    args.layer = layer->pool_layer;
    args.num_qo_heads = step->num_qo_heads;
    args.q = qkv;
    args.q_stride_seq = width;
    args.q_stride_head = dim;
    args.q_dtype = args.out_dtype = PP_BF16;
    args.sm_scale = layer->sm_scale;
    args.num_threads = step->num_threads;
    args.out = step->attended;
    return pp_decode(&args, step->num_threads);
}

pp_status pp_step_run(const pp_step *step) {
    const uint16_t *added = NULL; /* the results of a layer's MLP: x is written when the next norm reads it */
    for (int32_t i = 0; i < step->num_layers; i++) {
        const pp_step_layer *layer = step->layers + i;
        const int64_t middle = layer->linears[PP_STEP_GATE_AND_UP].outputs / 2;
        pp_status status = PP_OK;
        normalise(step, added, layer->norm);
        uint16_t *qkv = multiply(step, i, PP_STEP_QKV, step->normed, step->hidden_size, step->qkv, &status);
        if (qkv) status = attend(step, layer, qkv);
        if (status != PP_OK) return status;
        added = multiply(step, i, PP_STEP_OUTPUT, step->attended, (int64_t)step->num_qo_heads * step->head_dim,
                         step->added, &status);
        if (!added) return status;
        normalise(step, added, layer->mlp_norm);
        const uint16_t *gate = multiply(step, i, PP_STEP_GATE_AND_UP, step->normed, step->hidden_size,
                                        step->gate_and_up, &status);
        if (!gate) return status;
        pp_lookup_mul(gate, gate + middle, 2 * middle, layer->activation, step->rows, middle, step->activated,
                      step->num_threads);
        added = multiply(step, i, PP_STEP_DOWN, step->activated, middle, step->added, &status);
        if (!added) return status;
    }
    normalise(step, added, step->norm);
    return PP_OK;
}
