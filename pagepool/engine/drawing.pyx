"""Drawing the next token by its probability. Internal: for `pagepool.engine.sampling`."""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from pagepool.memory.kernels cimport c_draw, c_draw_total, c_keep_ahead, c_weigh

__all__ = ["draw"]

cdef extern from "draw.h" nogil:
    enum:
        PP_DRAW_CHUNK
    int64_t pp_draw_chunks(int64_t n) noexcept

cdef double LOG2_E = 1.4426950408889634


def draw(const float[::1] logits, float most, double temperature, double top_p, random):
    """Returns the index of a token, drawn by the softmax of its logit over the temperature.

    logits       float32 (n,), none of them NaN
    most         the largest of them, finite
    temperature  above 0, so that 1 / temperature is a finite float32
    top_p        only the fewest most likely tokens are drawn that together have this probability, of equal ones the
                 first; 1: all
    random       returns the next random number, from 0 up to but not 1: one is drawn for the token, and one more for
                 each that was drawn and is not among the most likely ones

    Raises `ValueError` for no logits, `MemoryError`, and what `random` raises. Releases the GIL.

    A token that is drawn of all is among the most likely ones when those before it, in falling order, have less than
    `top_p`. If it is not, neither is any behind it, and the next is drawn of those before it: so nothing is sorted.

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
        raise ValueError("a token is drawn of 1 or more, not of 0")
    cdef float *weights = <float *>malloc(num_chunks * (PP_DRAW_CHUNK + 1) * sizeof(float))
    if weights == NULL:
        raise MemoryError(f"no memory to draw one of {n} tokens")
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
            # Of 0 left, `needed` may be 0, too: a thread may take numbers as small as top_p can be for 0.
            if left == 0.0 or left < needed:
                return place
    finally:
        free(weights)
