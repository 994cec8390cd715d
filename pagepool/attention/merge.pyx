"""Merging partial results of attention: of a shared prefix and each sequence's own tokens, for example."""

from libc.stdint cimport int64_t

from pagepool.csrc cimport pp_merge_args
from pagepool.memory.kernels cimport c_merge_states

import numpy as np

__all__ = ["merge_state", "merge_states"]

cdef object FLOAT32 = np.dtype(np.float32)
cdef int64_t MOST_DIMS = 1 << 24  # of pp_merge_states


cdef object read_float32(str name, object source, int ndim):
    array = np.asarray(source)
    if array.dtype != FLOAT32:
        raise TypeError(f"{name} must be float32, not {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, not {array.ndim}")
    return np.ascontiguousarray(array)


def merge_states(v, s):
    """Merge partial results of the same queries over disjoint sets of tokens, in the given order. Releases the GIL.

    Parameters
    ----------
    v : ndarray of float32, shape (n, num_states, num_heads, head_dim)
        The partial outputs.
    s : ndarray of float32, shape (n, num_states, num_heads)
        Their lse, the natural log of the sum of exp(score), as `decode` returns it. The output of a part with lse -inf
        is ignored: it has no tokens.

    Returns
    -------
    out : ndarray of float32, shape (n, num_heads, head_dim)
        Attention over all tokens together. A row without tokens is 0. A NaN or inf in `s` makes its row NaN. The bits
        of a row depend only on that row.
    lse : ndarray of float32, shape (n, num_heads)
        The natural log of the sum of exp(score), -inf for a row without tokens.

    Raises
    ------
    TypeError
        If an array is not float32.
    ValueError
        If the shapes do not match.

    Notes
    -----
    This is FlashInfer's recursion of attention states (Ye et al., MLSys 2025), with the natural logarithm.

    Examples
    --------
    >>> import numpy as np
    >>> v = np.array([[[[1.0, 1.0]], [[3.0, 5.0]]]], np.float32)
    >>> merge_states(v, np.zeros((1, 2, 1), np.float32))[0].tolist()
    [[[2.0, 3.0]]]
    """
    values, sums = read_float32("v", v, 4), read_float32("s", s, 3)
    if values.shape[:3] != sums.shape:
        raise ValueError(f"s must have the shape of v without its last axis, {values.shape[:3]}, not {sums.shape}")
    num_rows, _, heads, dim = values.shape
    if dim > MOST_DIMS:
        raise ValueError(f"head_dim of v must be at most {MOST_DIMS}, not {dim}")
    out, lse = np.empty((num_rows, heads, dim), FLOAT32), np.empty((num_rows, heads), FLOAT32)
    if not out.size and not lse.size:
        return out, lse
    cdef const float[::1] v_view = values.reshape(-1)
    cdef const float[::1] s_view = sums.reshape(-1)
    cdef float[::1] out_view = out.reshape(-1)
    cdef float[::1] lse_view = lse.reshape(-1)
    cdef int64_t n = num_rows, parts = values.shape[1], num_heads = heads, head_dim = dim, row
    cdef pp_merge_args args
    args.num_rows = num_heads
    args.num_parts = parts
    args.head_dim = head_dim
    args.v_stride_row = head_dim
    args.v_stride_part = num_heads * head_dim
    args.s_stride_row = 1
    args.s_stride_part = num_heads
    with nogil:
        for row in range(n):
            args.v = &v_view[0] + row * parts * num_heads * head_dim
            args.s = &s_view[0] + row * parts * num_heads
            args.out = &out_view[0] + row * num_heads * head_dim
            args.lse = &lse_view[0] + row * num_heads
            c_merge_states(&args)
    return out, lse


def merge_state(v_a, s_a, v_b, s_b):
    """Merges two partial results of the same queries: `merge_states` of a, then b.

    Returns (out, lse) of the same shapes. Raises as `merge_states` does.

    Parameters
    ----------
    v_a, v_b
        (n, num_heads, head_dim), float32.
    s_a, s_b
        (n, num_heads), float32, natural log; -inf for a part without tokens.

    Examples
    --------
    >>> import numpy as np
    >>> one, two = np.ones((1, 1, 4), np.float32), np.full((1, 1, 4), 2, np.float32)
    >>> nothing, some = np.full((1, 1), -np.inf, np.float32), np.zeros((1, 1), np.float32)
    >>> merge_state(one, nothing, two, some)[0].tolist()
    [[[2.0, 2.0, 2.0, 2.0]]]
    """
    values = [read_float32("v_a", v_a, 3), read_float32("v_b", v_b, 3)]
    sums = [read_float32("s_a", s_a, 2), read_float32("s_b", s_b, 2)]
    if values[0].shape != values[1].shape or sums[0].shape != sums[1].shape:
        raise ValueError(
            f"a and b must have the same shapes, not {values[0].shape} and {values[1].shape}, "
            f"{sums[0].shape} and {sums[1].shape}"
        )
    if values[0].shape[:2] != sums[0].shape:
        raise ValueError(
            f"s_a must have the shape of v_a without its last axis, {values[0].shape[:2]}, not {sums[0].shape}"
        )
    return merge_states(np.stack(values, axis=1), np.stack(sums, axis=1))
