"""Sessions: one prefix, with its tokens and pages, as one portable file."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagepool.errors import PoolExhausted
from pagepool.memory.block_refs import BlockRefs
from pagepool.prefix.cache import PrefixCache
from pagepool.prefix.events import name_row
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.radix_tree import token_row
from pagepool.prefix.store import PageSum
from pagepool.prefix.stored_pages import read_block, write_block

__all__ = ["Session", "load_session", "save_session"]

MAGIC = b"pagepool session 1\n"
# Lengths in bytes of the fingerprint, the note, the tokens and the checksums of the pages.
LENGTHS = struct.Struct("<4Q")
SUM_BYTES = 16
MAX_HEAD = 1 << 30


class Session(NamedTuple):
    """Result of `load_session`.

    Attributes
    ----------
    tokens : ndarray
        int32 (n_tokens,): all tokens of the session.
    num_cached : int
        Number of tokens at the start with pages in the prefix cache.
    note : JSON value
        The note that was passed to `save_session`.
    """

    tokens: NDArray[np.int32]
    num_cached: int
    note: Any


def save_session(
    path: str | Path,
    cache: PrefixCache,
    fingerprint: Fingerprint,
    tokens: Any,
    *,
    note: Any = None,
    cache_salt: Any = None,
    extra_keys: Iterable[Any] = (),
) -> int:
    """Write tokens, and the cached pages of their longest prefix, to a file; return the number of tokens with pages.

    The file replaces an older file atomically, after it was written to the disk. It has the mode 0600, because it
    contains the prompt in plain text.

    Parameters
    ----------
    path : path
        The file.
    cache : PrefixCache
        The cache that has the pages.
    fingerprint : Fingerprint
        Fingerprint of the pages, from `fingerprint_of`.
    tokens : sequence of int or integer array
        All tokens of the session.
    note : JSON value
        Anything to keep with the tokens, such as the messages of a conversation.
    cache_salt, extra_keys
        As in `PrefixCache.match_prefix`.

    Returns
    -------
    int
        Number of tokens with pages in the file.

    Raises
    ------
    TypeError
        The tokens are not integers, or the note is not a JSON value.
    ValueError
        A token is negative, or the cache has a different block size than the fingerprint.
    PoolError
        The cache has pages of a different size than the fingerprint.
    OSError
        The file cannot be written. An older file stays as it was.
    """
    _check(cache, fingerprint)
    row = np.asarray(token_row(tokens))
    seed = os.urandom(SUM_BYTES)
    sums = PageSum(fingerprint, seed)
    page = memoryview(bytearray(fingerprint.page_bytes))
    target = Path(path)
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    text = json.dumps(note, allow_nan=False).encode()
    held = BlockRefs(cache.allocator)
    try:
        blocks = held.match_prefix(cache, row, cache_salt=cache_salt, extra_keys=extra_keys)
        names = _names(row, fingerprint, seed)
        begin = _head(fingerprint, seed, text, row, len(blocks))
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            size = len(begin) + SUM_BYTES * (len(blocks) + 1)
            file.seek(size)
            found = []
            for name, block in zip(names, blocks.tolist(), strict=False):
                read_block(cache.allocator, block, page)
                found.append(sums.of(name, page))
                file.write(page)
            head = begin + b"".join(found)
            file.seek(0)
            file.write(head + _head_sum(fingerprint, head))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        held.give_back()
        beside.unlink(missing_ok=True)
    return len(blocks) * cache.block_size


def load_session(
    path: str | Path,
    cache: PrefixCache,
    fingerprint: Fingerprint,
    *,
    cache_salt: Any = None,
    extra_keys: Iterable[Any] = (),
) -> Session:
    """Read a file of `save_session` and cache its pages.

    Pages are loaded into free blocks. Blocks that only the cache holds are evicted if needed. Every page has a
    checksum. Loading stops at the first damaged page and at the first page without a block. The tokens of missing pages
    are computed when they are used.

    Parameters
    ----------
    path, cache, fingerprint, cache_salt, extra_keys
        As in `save_session`.

    Returns
    -------
    Session
        The tokens, the number of cached tokens and the note.

    Raises
    ------
    ValueError
        The file is not a session, is damaged before its pages, or belongs to another model. Nothing has changed.
    OSError
        The file cannot be read.
    """
    _check(cache, fingerprint)
    keys = {"cache_salt": cache_salt, "extra_keys": tuple(extra_keys)}
    page = memoryview(bytearray(fingerprint.page_bytes))
    with Path(path).open("rb") as file:
        seed, note, row, wanted = _read_head(path, file, fingerprint)
        sums, size = PageSum(fingerprint, seed), cache.block_size
        held, fresh = BlockRefs(cache.allocator), BlockRefs(cache.allocator)
        try:
            before = held.match_prefix(cache, row[: len(wanted) * size], **keys).tolist()
            known, good = len(before), []
            blocks = _allocate(cache, fresh, len(wanted) - known)
            file.seek(known * len(page), os.SEEK_CUR)
            names = _names(row, fingerprint, seed)[known:]
            for name, checksum, block in zip(names, wanted[known:], blocks, strict=False):
                if file.readinto(page) != len(page) or sums.of(name, page) != checksum:
                    break
                write_block(cache.allocator, block, page)
                good.append(block)
            if good:
                cache.cache_blocks(row[: (known + len(good)) * size], [*before, *good], start=known, **keys)
        finally:
            fresh.give_back()
            held.give_back()
    return Session(row, (known + len(good)) * size, note)


def _check(cache: PrefixCache, fingerprint: Fingerprint) -> None:
    if cache.block_size != fingerprint.block_size:
        raise ValueError(f"the fingerprint has blocks of {fingerprint.block_size} tokens, the cache {cache.block_size}")


def _allocate(cache: PrefixCache, refs: BlockRefs, n: int) -> list[int]:
    cache.evict(max(0, n - cache.allocator.available))
    try:
        blocks: list[int] = refs.allocate_n(min(n, cache.allocator.available)).tolist()
    except PoolExhausted:  # another thread was faster
        return []
    return blocks


def _names(row: NDArray[np.int32], fingerprint: Fingerprint, seed: bytes) -> list[bytes]:
    names = name_row(row, fingerprint.block_size, seed)
    return [names[at : at + SUM_BYTES] for at in range(0, len(names), SUM_BYTES)]


def _head(fingerprint: Fingerprint, seed: bytes, note: bytes, row: NDArray[np.int32], num_pages: int) -> bytes:
    text = fingerprint.text.encode()
    lengths = LENGTHS.pack(len(text), len(note), row.nbytes, SUM_BYTES * num_pages)
    return MAGIC + fingerprint.digest + seed + lengths + text + note + row.tobytes()


def _head_sum(fingerprint: Fingerprint, head: bytes) -> bytes:
    return blake2b(head, key=fingerprint.digest, digest_size=SUM_BYTES).digest()


def _read_head(
    path: str | Path, file: BinaryIO, fingerprint: Fingerprint
) -> tuple[bytes, Any, NDArray[np.int32], list[bytes]]:
    """Return the seed, the note, the tokens and the checksums of the pages. The pages follow in the file."""
    first = file.read(len(MAGIC) + 2 * SUM_BYTES + LENGTHS.size)
    if not first.startswith(MAGIC) or len(first) < len(MAGIC) + 2 * SUM_BYTES + LENGTHS.size:
        raise ValueError(f"{path}: it is not a session of pagepool")
    digest, seed = (first[len(MAGIC) + place : len(MAGIC) + place + SUM_BYTES] for place in (0, SUM_BYTES))
    if digest != fingerprint.digest:
        raise ValueError(f"{path}: the session is of another model, or of other weights, page layout or dtype")
    lengths = LENGTHS.unpack(first[-LENGTHS.size :])
    if sum(lengths) > MAX_HEAD:
        raise ValueError(f"{path}: the session is damaged: {sum(lengths)} bytes of tokens, {MAX_HEAD} at most")
    rest = file.read(sum(lengths) + SUM_BYTES)
    head, checksum = first + rest[:-SUM_BYTES], rest[-SUM_BYTES:]
    if len(rest) != sum(lengths) + SUM_BYTES or checksum != _head_sum(fingerprint, head):
        raise ValueError(f"{path}: the session is damaged: the checksum of its tokens is wrong")
    pieces, at = [], 0
    for length in lengths:
        pieces.append(rest[at : at + length])
        at += length
    row = np.frombuffer(pieces[2], np.int32)
    return seed, json.loads(pieces[1]), row, [pieces[3][at : at + SUM_BYTES] for at in range(0, lengths[3], SUM_BYTES)]
