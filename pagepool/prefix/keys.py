"""Salt and extra keys of a look-up, in the form that the cache compares: bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagepool._arguments import wrong

__all__ = ["STATE", "key_digest", "listed", "root_key", "root_name"]

STATE = b"state"  # the parent of a recurrent state in a store; names of pages are longer


def root_key(cache_salt: Any, extra_keys: Iterable[Any]) -> bytes:
    """Encode salt and keys as bytes, each after its type and length, so that only equal keys have equal bytes.

    Raises `TypeError` for any other type than str, bytes, bool, int and None; also for integers and strings of NumPy,
    since keys of different types are different keys.

    >>> root_key(None, ("ab", "c")) == root_key(None, ("a", "bc"))
    False
    >>> root_key(None, (1,)) == root_key(None, ("1",))
    False
    """
    if isinstance(extra_keys, (str, bytes)) or not isinstance(extra_keys, Iterable):
        raise TypeError(f"extra_keys must be a sequence of keys, not {type(extra_keys).__name__}")
    return b"".join([_framed("cache_salt", cache_salt), *[_framed("a key of extra_keys", key) for key in extra_keys]])


def listed(extra_keys: Any) -> Any:
    """Return extra keys as a sequence, because `root_key` may read them more than once."""
    is_checked = isinstance(extra_keys, (str, bytes, tuple, list)) or not isinstance(extra_keys, Iterable)
    return extra_keys if is_checked else tuple(extra_keys)


def key_digest(key: bytes) -> bytes:
    """Return 16 bytes that identify a salt and keys."""
    from hashlib import blake2b  # imported late: it loads OpenSSL, and only shared pools and names need it

    return blake2b(key, digest_size=16).digest()


def root_name(key: bytes, secret: bytes = bytes(16)) -> bytes:
    """Return the 16-byte root of the names of all prefixes with this salt and keys. It is equal in every process.

    With a `secret` of 16 bytes, collisions of names cannot be found without the secret.

    >>> len(root_name(root_key("tenant", ())))
    16
    """
    from pagepool.prefix.events import name_of_root  # imported late: events import this module

    return name_of_root(key_digest(key), secret)


def _framed(name: str, key: Any) -> bytes:
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
        raise wrong(name, "str, bytes, bool, int or None", key)
    return tag + len(text).to_bytes(8, "little") + text
