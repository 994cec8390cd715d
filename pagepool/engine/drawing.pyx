"""Sample the next token by its probability. Internal: for `pagepool.engine.sampling`."""

from libc.stdint cimport int64_t, uint16_t
from libc.stdlib cimport free, malloc

from pagepool.memory.kernels cimport c_draw, c_draw_total, c_keep_ahead, c_largest_bf16, c_weigh

__all__ = ["draw", "largest"]

cdef extern from "draw.h" nogil:
    enum:
        PP_DRAW_CHUNK
    int64_t pp_draw_chunks(int64_t n) noexcept

cdef double LOG2_E = 1.4426950408889634


def draw(const float[::1] logits, float most, double temperature, double top_p, random):
    """Sample the index of a token from softmax(logits / temperature). Releases the GIL.

    Parameters
    ----------
    logits : ndarray of float32, shape (n,)
        Must not contain NaN.
    most : float
        The largest logit, finite.
    temperature : float
        Above 0; 1 / temperature must be a finite float32.
    top_p : float
        Sample only from the smallest set of most likely tokens with at least this total probability. If two tokens are
        equal, the lower index comes first. 1: sample from all tokens.
    random : callable
        Returns a random number in [0, 1). It is called once for each sampled token, including rejected ones.

    Returns
    -------
    int
        The index of the sampled token.

    Raises
    ------
    ValueError
        If `logits` is empty.
    MemoryError
        If the weights cannot be allocated.

    Notes
    -----
    Rejection sampling makes sorting unnecessary. Sort the tokens by falling probability in thought: a sampled token is
    accepted if the tokens before it have less than `top_p` together. If it is rejected, all tokens after it would be
    rejected as well, so the next one is sampled only from the tokens before it.

    Examples
    --------
    >>> import numpy as np
    >>> logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    >>> numbers = iter([0.05, 0.5])
    >>> draw(logits, logits.max(), 1.0, 0.9, lambda: next(numbers))
    1
    """
    cdef int64_t n = logits.shape[0], num_chunks = pp_draw_chunks(n), place
    cdef float scale = <float>(LOG2_E / temperature)
    cdef double number, needed, left
    if not n:
        raise ValueError("logits must have at least 1 element, not 0")
    cdef float *weights = <float *>malloc(num_chunks * (PP_DRAW_CHUNK + 1) * sizeof(float))
    if weights == NULL:
        raise MemoryError(f"no memory to sample one of {n} tokens")
    cdef float *sums = weights + num_chunks * PP_DRAW_CHUNK
    try:
        with nogil:
            c_weigh(&logits[0], n, most, scale, weights, sums)
            needed = top_p * c_draw_total(sums, num_chunks)
        while True:
            number = random()
            with nogil:
                place = c_draw(weights, sums, num_chunks, number)
                if top_p >= 1.0:
                    left = 0.0
                else:
                    c_keep_ahead(weights, num_chunks, place, sums)
                    left = c_draw_total(sums, num_chunks)
            # `left < needed` is not enough: a very small top_p can be flushed to zero, then both sides are 0.
            if left == 0.0 or left < needed:
                return place
    finally:
        free(weights)


def largest(const uint16_t[:, ::1] rows):
    """Return the index of the largest element of each row, the first one if several are equal. Releases the GIL.

    Parameters
    ----------
    rows : ndarray of uint16, shape (n, vocab_size)
        The bits of bfloat16 numbers.

    Returns
    -------
    list of int
        -1 for a row with NaN, or with an infinite largest element.

    Examples
    --------
    >>> import numpy as np
    >>> largest(np.array([[0x3f80, 0x4000, 0x4000]], np.uint16))  # 1.0, 2.0, 2.0
    [1]
    """
    cdef int64_t i, n = rows.shape[0], place
    found = []
    for i in range(n):
        with nogil:
            place = c_largest_bf16(&rows[i, 0], rows.shape[1]) if rows.shape[1] else -1
        found.append(place)
    return found
