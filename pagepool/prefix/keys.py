"""What a look-up is given, in the one form that the cache compares: tokens as int32, everything else as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["root_key", "root_name", "token_row"]

INT32 = np.dtype(np.int32)


def token_row(tokens: Any) -> NDArray[np.int32]:
    """Token ids as a contiguous int32 array (n,), the one given where it is such.

    Raises `TypeError` for what are no integers, `ValueError` for several dimensions or an id beyond 32 bits.

    >>> token_row([5, 7])
    array([5, 7], dtype=int32)
    """
    row = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens)
    if row.ndim != 1:
        raise ValueError(f"tokens must have 1 dimension, not {row.ndim}")
    if row.dtype != INT32:
        if row.size == 0:
            return np.empty(0, INT32)
        if row.dtype.kind not in "iu":
            raise TypeError(f"tokens must be integers, not {row.dtype}")
        low, high = int(row.min()), int(row.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"token {low if low < -(2**31) else high} has more than 32 bits")
    return np.ascontiguousarray(row, dtype=INT32)


def root_key(cache_salt: Any, extra_keys: Iterable[Any]) -> bytes:
    """Salt and keys as bytes that are equal only for equal ones: each with its type and its length before it.

    Raises `TypeError` for a key that is no str, bytes, bool, int or None.

    >>> root_key(None, ("ab", "c")) == root_key(None, ("a", "bc"))
    False
    >>> root_key(None, (1,)) == root_key(None, ("1",))
    False
    """
    if isinstance(extra_keys, (str, bytes)):
        raise TypeError(f"extra_keys must be a sequence of keys, not {type(extra_keys).__name__}")
    return b"".join([_framed(cache_salt), *map(_framed, extra_keys)])


def root_name(key: bytes) -> bytes:
    """The 16 bytes that the names of all prefixes under a salt and keys follow from: the same in every process.

    >>> len(root_name(root_key("tenant", ())))
    16
    """
    return blake2b(key, digest_size=16).digest()


def _framed(key: Any) -> bytes:
    kind = type(key)
    if key is None:
        tag, text = b"n", b""
    elif kind is bytes:
        tag, text = b"b", key
    elif kind is str:
        tag, text = b"s", key.encode("utf-8", "surrogatepass")
    elif kind is bool or kind is int:
        tag, text = (b"t" if kind is bool else b"i"), b"%d" % key
    else:
        raise TypeError(f"a salt or an extra key must be str, bytes, bool, int or None, not {kind.__name__}")
    return tag + len(text).to_bytes(8, "little") + text
