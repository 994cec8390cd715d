"""Tokens in the one form that the cache compares: a row of int32."""

from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t

import numpy as np

__all__ = ["token_row"]

cdef object INT32 = np.dtype(np.int32)


def token_row(tokens):
    """Token ids as a contiguous int32 array (n,), the one given where it is such.

    Raises `TypeError` for what are no integers, `ValueError` for several dimensions or an id beyond 32 bits.

    >>> token_row([5, 7])
    array([5, 7], dtype=int32)
    """
    row = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)
    if row.ndim != 1:
        raise ValueError(f"tokens must have 1 dimension, not {row.ndim}")
    if row.dtype == INT32:
        return np.ascontiguousarray(row, dtype=INT32)
    if row.size == 0:
        return np.empty(0, INT32)
    if row.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers, not {row.dtype}")
    return narrow(row)


# In one pass over the ids, and not by numpy's minimum and maximum: with no memory left those may fail without an error
# (numpy 2.4, "returned NULL without setting an exception").
cdef object narrow(object row):
    cdef bint unsigned = row.dtype.kind == "u"
    # What takes all of 64 bits is negative as int64, and no unsigned id is.
    cdef const int64_t[:] wide = row.astype(np.uint64).view(np.int64) if unsigned else row.astype(np.int64)
    cdef int64_t least = 0 if unsigned else INT32_MIN
    cdef Py_ssize_t i, size = wide.shape[0]
    result = np.empty(size, INT32)
    cdef int32_t[::1] ids = result
    for i in range(size):
        if not least <= wide[i] <= INT32_MAX:
            raise ValueError(f"token {row[i]} has more than 32 bits")
        ids[i] = <int32_t>wide[i]
    return result
