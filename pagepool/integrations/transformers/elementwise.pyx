"""Operations of models in bfloat16, with the bits of torch's eager mode. Internal: for `fused` and `linear`.

Arguments are addresses of contiguous bfloat16 rows, as `torch.Tensor.data_ptr` returns them. They are not checked.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t, uintptr_t
from libc.stdlib cimport calloc, free

from pagepool.attention.decode cimport c_finds_free
from pagepool.csrc cimport (
    PP_BF16X2, PP_EXACT, PP_NO_MEMORY, PP_OK, PP_ROUNDED_BF16, pp_dtype, pp_status,
)
from pagepool.memory.kernels cimport (
    PP_STEP_LINEARS, c_linear_few, c_linear_has_few, c_linear_quantised, c_lookup_mul, c_rms_norm, c_rotate, c_step_run,
    pp_quantised, pp_step, pp_step_group, pp_step_layer, pp_step_linear, pp_step_norm,
)
from pagepool.memory.kv_pool cimport KvCachePool

from pagepool.errors import InvalidBlock
from pagepool.memory.explain import unwritable_slot

__all__ = ["DecoderLayers", "QuantisedWeights", "has_linear_few", "linear_few", "lookup_mul", "rms_norm", "rotate"]

cdef dict ARITHMETICS = {"exact": PP_EXACT, "bf16": PP_ROUNDED_BF16, "bf16x2": PP_BF16X2}


def has_linear_few():
    """Return whether this CPU has the instructions of `linear_few`, AMX."""
    return bool(c_linear_has_few())


def linear_few(uintptr_t x, int64_t rows, int64_t inputs, uintptr_t weight, uintptr_t bias, int64_t outputs,
               uintptr_t out, int num_threads):
    """Write x weight + bias to `out`, (rows, outputs), for a weight that oneDNN has packed for AMX.

    `inputs` is a multiple of 32. `bias` may be 0. Raises MemoryError. Releases the GIL.
    """
    cdef bint has_memory
    with nogil:
        has_memory = c_linear_few(<const uint16_t *>x, rows, inputs, <const void *>weight, <const uint16_t *>bias,
                                  outputs, <uint16_t *>out, num_threads) == PP_OK
    if not has_memory:
        raise MemoryError(f"no memory for {rows} rows of {inputs} inputs")


cdef class QuantisedWeights:
    """Addresses of the quantised weights of layers with the same input, whose outputs follow one another.

    Parameters
    ----------
    inputs : int
        Inputs of the layers, a multiple of 32.
    weights : list of tuple of int
        For each layer its format (of linear_quantised.h), outputs, and addresses of weight and bias. The bias is in
        float32 and may be 0. The caller keeps this memory.
    """

    cdef pp_quantised *_weights
    cdef int32_t _count
    cdef readonly int64_t inputs, outputs

    def __cinit__(self, int64_t inputs, weights):
        self._count = len(weights)
        self._weights = <pp_quantised *>calloc(max(1, self._count), sizeof(pp_quantised))
        if self._weights == NULL:
            raise MemoryError(f"no memory for {self._count} quantised weights")
        self.inputs = inputs
        cdef uintptr_t data, bias
        cdef int32_t i = 0
        for form, outputs, data, bias in weights:
            self._weights[i] = pp_quantised(form, outputs, <const unsigned char *>data, <const float *>bias)
            self.outputs += self._weights[i].outputs
            i += 1

    def __dealloc__(self):
        free(self._weights)

    def run(self, uintptr_t x, int32_t dtype, int64_t rows, uintptr_t out, int num_threads):
        """Write the results of all layers to `out`, (rows, outputs), in the dtype of `x`, a pp_dtype.

        Raises MemoryError. Releases the GIL.
        """
        cdef bint has_memory
        with nogil:
            has_memory = c_linear_quantised(<const void *>x, <pp_dtype>dtype, rows, self.inputs, self._weights,
                                            self._count, <void *>out, num_threads) == PP_OK
        if not has_memory:
            raise MemoryError(f"no memory for {rows} rows of {self.inputs} inputs")


cdef pp_step_norm norm_of(norm):
    """Return the norm for a pair of its weight's address and eps, or no norm for None."""
    cdef uintptr_t weight = 0
    cdef float eps = 0
    if norm is not None:
        weight, eps = norm
    return pp_step_norm(<const uint16_t *>weight, eps)


cdef int read_linear(pp_step_linear *to, linear) except -1:
    cdef uintptr_t packed, bias
    if isinstance(linear, QuantisedWeights):
        to.outputs = (<QuantisedWeights>linear).outputs
        to.quantised = (<QuantisedWeights>linear)._weights
        to.num_quantised = (<QuantisedWeights>linear)._count
        return 0
    to.outputs, packed, bias, to.few_rows = linear
    to.packed, to.bias = <const void *>packed, <const uint16_t *>bias
    return 0


cdef uint16_t *multiply(void *context, int32_t layer, int32_t place) noexcept with gil:
    """Call the function of a call of `run` and keep its result, or its exception."""
    cdef list call = <list>context
    try:
        call[place] = call[PP_STEP_LINEARS](layer, place)
        return <uint16_t *><uintptr_t>call[place].data_ptr()
    except BaseException as error:
        call[PP_STEP_LINEARS + 1] = error
        return NULL


cdef class DecoderLayers:
    """The decoder layers of a model, which one call of C computes: csrc/step.h. The caller keeps the memory of weights.

    Parameters
    ----------
    hidden_size, num_qo_heads, num_kv_heads, head_dim : int
        Sizes of all layers.
    layers : list of tuple
        For each layer its linear layers (q, k and v; output; gate and up; down), its norms (before attention, before
        the MLP, of queries, of keys), the address of the activation's table, the factor of scores, the group of its
        pages and the layer in its pool. A linear layer is a `QuantisedWeights`, or a tuple of its outputs, the
        addresses of the packed weight and the bias, and the number of rows up to which `linear_few` computes it. A
        norm is a tuple of its weight's address and eps, or None.
    norm : tuple
        The norm after the last layer.
    """

    cdef pp_step _step
    cdef pp_step_layer *_layers
    cdef pp_step_group *_groups
    cdef int32_t _num_groups
    cdef object _held

    def __cinit__(self, int64_t hidden_size, int32_t num_qo_heads, int32_t num_kv_heads, int32_t head_dim, list layers,
                  norm):
        cdef pp_step_layer *to
        cdef uintptr_t activation
        cdef int32_t place
        self._held = layers
        self._num_groups = 1 + max([layer[10] for layer in layers], default=0)
        self._layers = <pp_step_layer *>calloc(max(1, len(layers)), sizeof(pp_step_layer))
        self._groups = <pp_step_group *>calloc(self._num_groups, sizeof(pp_step_group))
        if self._layers == NULL or self._groups == NULL:
            raise MemoryError(f"no memory for {len(layers)} layers")
        to = self._layers
        for *linears, norm_, mlp_norm, query_norm, key_norm, activation, scale, group, pool_layer in layers:
            for place in range(PP_STEP_LINEARS):
                read_linear(&to.linears[place], linears[place])
            to.norm, to.mlp_norm = norm_of(norm_), norm_of(mlp_norm)
            to.query_norm, to.key_norm = norm_of(query_norm), norm_of(key_norm)
            to.activation = <const uint16_t *>activation
            to.sm_scale, to.group, to.pool_layer = scale, group, pool_layer
            to += 1
        self._step.layers, self._step.num_layers = self._layers, len(layers)
        self._step.norm = norm_of(norm)
        self._step.hidden_size, self._step.head_dim = hidden_size, head_dim
        self._step.num_qo_heads, self._step.num_kv_heads = num_qo_heads, num_kv_heads
        self._step.groups, self._step.multiply = self._groups, multiply

    def __dealloc__(self):
        free(self._layers)
        free(self._groups)

    def run(self, int64_t rows, memory, uintptr_t cos, uintptr_t sin, pools, tables, windows, str arithmetic,
            int num_threads, function):
        """Store keys and values of rows, and compute the norm of the last layer's results. Releases the GIL.

        One call at a time.

        Parameters
        ----------
        rows : int
            Number of rows, at least 1.
        memory : tuple of int
            Addresses of x, which is overwritten, of the results, and of buffers for attention's results, half of gate
            and up, q, k and v, one row of x, and gate and up: for `rows` rows each.
        cos, sin : int
            Addresses of rows of `head_dim` elements.
        pools, tables, windows : sequence
            For each group its pool, `Tables` and window.
        arithmetic : str
            As in `decode`, but not "auto".
        num_threads : int
            The maximum number of threads.
        function : callable
            Takes a layer and the place of one of its linear layers, and returns a tensor with the results. Called for
            linear layers with packed weights and more rows than they have in `layers`.

        Raises
        ------
        MemoryError
            There is no memory.
        InvalidBlock, InvalidSlot, ValueError
            A block, a slot or a size is out of range, or in checked mode free.
        """
        cdef pp_step step = self._step
        cdef list call = [None] * PP_STEP_LINEARS + [function, None]
        cdef uintptr_t x, normed, attended, activated, qkv, added, gate_and_up
        cdef pp_status status
        cdef int32_t i, num_pinned = 0
        x, normed, attended, activated, qkv, added, gate_and_up = memory
        step.x, step.normed, step.attended = <uint16_t *>x, <uint16_t *>normed, <uint16_t *>attended
        step.activated, step.qkv, step.added = <uint16_t *>activated, <uint16_t *>qkv, <uint16_t *>added
        step.gate_and_up = <uint16_t *>gate_and_up
        step.cos, step.sin = <const uint16_t *>cos, <const uint16_t *>sin
        step.rows, step.num_threads, step.context = rows, num_threads, <void *>call
        if len(pools) < self._num_groups:
            raise ValueError(f"the layers have pages in {self._num_groups} groups, not {len(pools)}")
        for i in range(self._num_groups):
            self.read_group(i, pools[i], rows, tables[i], windows[i], ARITHMETICS[arithmetic])
        try:
            for i in range(self._num_groups):
                (<KvCachePool>pools[i]).pin()
                num_pinned += 1
            with nogil:
                status = c_step_run(&step)
        finally:
            for i in range(num_pinned):
                (<KvCachePool>pools[i]).unpin()
        if call[PP_STEP_LINEARS + 1] is not None:
            raise call[PP_STEP_LINEARS + 1]
        if status == PP_NO_MEMORY:
            raise MemoryError(f"no memory for a step of {rows} rows")
        if status != PP_OK:
            raise ValueError(f"cannot compute {rows} rows: status {status}")

    cdef int read_group(self, int32_t number, KvCachePool pool, int64_t rows, tables, window,
                        int32_t arithmetic) except -1:
        """Check the tables of a group and note their addresses. The caller keeps them."""
        cdef const int32_t[:, ::1] block_tables
        cdef const int32_t[::1] seq_lens, query_start_loc
        cdef const int64_t[::1] slot_mapping
        if pool is None:
            raise TypeError("each group needs a KvCachePool, not None")
        block_tables, seq_lens, slot_mapping, query_start_loc = tables
        cdef pp_step_group *group = &self._groups[number]
        cdef Py_ssize_t num_seqs = block_tables.shape[0]
        cdef int32_t seq = 0
        cdef int64_t index = 0
        if seq_lens.shape[0] != num_seqs or query_start_loc.shape[0] != num_seqs + 1 or slot_mapping.shape[0] != rows:
            raise ValueError(f"tables of {num_seqs} sequences have {slot_mapping.shape[0]} slots for {rows} rows")
        if query_start_loc[num_seqs] != rows:
            raise ValueError(f"query_start_loc must end with {rows} rows, not {query_start_loc[num_seqs]}")
        if (pool.c_pool.layout.num_kv_heads, pool.c_pool.layout.head_dim, pool.c_pool.layout.v_head_dim) != (
                self._step.num_kv_heads, self._step.head_dim, self._step.head_dim):
            raise ValueError(f"the pool must have {self._step.num_kv_heads} heads of {self._step.head_dim} dims, not "
                             f"{pool.c_pool.layout.num_kv_heads} of {pool.c_pool.layout.head_dim}")
        group.attention.pool = &pool.c_pool
        group.attention.num_seqs = <int32_t>num_seqs
        group.attention.block_tables = &block_tables[0, 0]
        group.attention.block_tables_stride = group.attention.block_tables_width = block_tables.shape[1]
        group.attention.seq_lens = &seq_lens[0]
        group.attention.query_start_loc = &query_start_loc[0]
        group.attention.window = 0 if window is None else window + 1
        group.attention.arithmetic = arithmetic
        group.slot_mapping = &slot_mapping[0]
        index = pool.c_first_unwritable(group.slot_mapping, rows)
        if index >= 0:
            slot = slot_mapping[index]
            block = slot // pool.c_pool.layout.block_size
            raise unwritable_slot(slot, index, block, pool.allocator.c_ref_count(block))
        if c_finds_free(pool, &group.attention, &seq, &index):
            raise InvalidBlock(f"block_tables[{seq}, {index}] is {block_tables[seq, index]}, which is free")
        return 0


def rms_norm(uintptr_t x, uintptr_t delta, uintptr_t weight, float eps, int64_t rows, int64_t n, uintptr_t sum,
             uintptr_t out, int num_threads):
    """Add `delta` to `x` into `sum`, and write the RMS norm of the sum to `out`. Rows have n elements.

    If `delta` is 0, `x` is normalised and `sum` is not used. Releases the GIL.
    """
    with nogil:
        c_rms_norm(<const uint16_t *>x, <const uint16_t *>delta, <const uint16_t *>weight, eps, rows, n,
                   <uint16_t *>sum, <uint16_t *>out, num_threads)


def rotate(uintptr_t x, int64_t stride, uintptr_t cos, uintptr_t sin, int64_t rows, int64_t heads, int64_t dim,
           int num_threads):
    """Apply rotary embeddings in place to the first `heads` heads of rows, which are `stride` elements apart.

    `cos` and `sin` have `dim` elements for each row. Releases the GIL.
    """
    with nogil:
        c_rotate(<uint16_t *>x, stride, <const uint16_t *>cos, <const uint16_t *>sin, rows, heads, dim, num_threads)


def lookup_mul(uintptr_t gate, uintptr_t up, int64_t stride, uintptr_t table, int64_t rows, int64_t n, uintptr_t out,
               int num_threads):
    """Write f(gate) * up to `out`. `table` has f of all 65,536 values. Rows are `stride` elements apart.

    Releases the GIL.
    """
    with nogil:
        c_lookup_mul(<const uint16_t *>gate, <const uint16_t *>up, stride, <const uint16_t *>table, rows, n,
                     <uint16_t *>out, num_threads)
