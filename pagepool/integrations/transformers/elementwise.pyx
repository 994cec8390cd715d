"""Operations of models in bfloat16, with the bits of torch's eager mode. Internal: for `fused` and `linear`.

Arguments are addresses of contiguous bfloat16 rows, as `torch.Tensor.data_ptr` returns them. They are not checked.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t, uintptr_t
from libc.stdlib cimport calloc, free

from pagepool.csrc cimport PP_OK, pp_dtype
from pagepool.memory.kernels cimport (
    c_linear_few, c_linear_has_few, c_linear_quantised, c_lookup_mul, c_rms_norm, c_rotate, pp_quantised,
)

__all__ = ["QuantisedWeights", "has_linear_few", "linear_few", "lookup_mul", "rms_norm", "rotate"]


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
