"""Sessions: one prefix, with its tokens, pages and recurrent state, as one portable file."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagepool._arguments import integer
from pagepool.errors import PoolExhausted
from pagepool.memory.block_refs import BlockRefs
from pagepool.prefix.cache import PrefixCache
from pagepool.prefix.checkpoints import StateCheckpoints
from pagepool.prefix.events import name_row
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.keys import listed
from pagepool.prefix.page_index import PageSum
from pagepool.prefix.radix_tree import token_row
from pagepool.prefix.stored_pages import read_block, write_block

__all__ = ["Session", "load_session", "save_session"]

MAGIC = b"pagepool session 3\n"
# Lengths in bytes of the fingerprint, the note, the tokens and the checksums; the number of groups, and the number of
# tokens before the recurrent state, 0 without one.
NUMBERS = struct.Struct("<6Q")
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
    num_groups: int = 1,
    checkpoints: StateCheckpoints | None = None,
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
    num_groups : int
        Number of groups of layers with a block table of their own. A `Scheduler` caches the blocks of each group.
    checkpoints : StateCheckpoints or None
        The recurrent states of the cache. The file also gets the longest kept state within its pages.

    Returns
    -------
    int
        Number of tokens with pages in the file, and with a state for a model that has states.

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
    extra_keys = listed(extra_keys)
    keys = _group_keys(cache, fingerprint, num_groups, checkpoints, cache_salt, extra_keys)
    row = np.asarray(token_row(tokens))
    seed = os.urandom(SUM_BYTES)
    sums = PageSum(fingerprint.digest, seed)
    page = memoryview(bytearray(fingerprint.page_bytes))
    target = Path(path)
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    text = json.dumps(note, allow_nan=False).encode()
    held = [BlockRefs(cache.allocator) for _ in keys]
    try:
        blocks = [refs.match_prefix(cache, row, **key).tolist() for refs, key in zip(held, keys, strict=True)]
        most = min(map(len, blocks))
        names = _names(row, fingerprint, seed)[:most]
        position, state = 0, b""
        if checkpoints is not None:
            checkpoints.follow(cache)
            options = {"cache_salt": cache_salt, "extra_keys": extra_keys}
            position, state = checkpoints.read_state(row, most * cache.block_size, **options)
        num_sums = num_groups * most + (position > 0)
        begin = _head(fingerprint, seed, text, row, num_sums, num_groups, position)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.seek(len(begin) + SUM_BYTES * (num_sums + 1))
            found = []
            for group, group_blocks in enumerate(blocks):
                for name, block in zip(names, group_blocks, strict=False):
                    read_block(cache.allocator, block, page)
                    found.append(sums.of(_group_name(name, group), page))
                    file.write(page)
            if position:
                found.append(sums.of(_state_name(position), state))
                file.write(state)
            head = begin + b"".join(found)
            file.seek(0)
            file.write(head + _head_sum(fingerprint, head))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        for refs in held:
            refs.give_back()
        beside.unlink(missing_ok=True)
    return most * cache.block_size if checkpoints is None else position


def load_session(
    path: str | Path,
    cache: PrefixCache,
    fingerprint: Fingerprint,
    *,
    cache_salt: Any = None,
    extra_keys: Iterable[Any] = (),
    num_groups: int = 1,
    checkpoints: StateCheckpoints | None = None,
) -> Session:
    """Read a file of `save_session`, and cache its pages and its recurrent state.

    Pages are loaded into free blocks. Blocks that only the cache holds are evicted if needed. Every page has a
    checksum. Loading stops at the first damaged page and at the first page without a block. The tokens of missing pages
    are computed when they are used.

    Parameters
    ----------
    path, cache, fingerprint, cache_salt, extra_keys, num_groups, checkpoints
        As in `save_session`.

    Returns
    -------
    Session
        The tokens, the number of cached tokens and the note.

    Raises
    ------
    ValueError
        The file is not a session, is damaged before its pages, or belongs to another model or to another number of
        groups. Nothing has changed.
    OSError
        The file cannot be read.
    """
    extra_keys = listed(extra_keys)
    keys = _group_keys(cache, fingerprint, num_groups, checkpoints, cache_salt, extra_keys)
    page = memoryview(bytearray(fingerprint.page_bytes))
    with Path(path).open("rb") as file:
        head = _read_head(path, file, fingerprint)
        if head.num_groups != num_groups:
            raise ValueError(f"{path}: the session has {head.num_groups} groups of layers, not {num_groups}")
        sums, begin, size = PageSum(fingerprint.digest, head.seed), file.tell(), cache.block_size
        names = _names(head.tokens, fingerprint, head.seed)[: head.num_pages]
        num_cached = len(names)
        held = [BlockRefs(cache.allocator) for _ in keys]
        try:
            for group, key in enumerate(keys):
                wanted = head.sums[group * head.num_pages : (group + 1) * head.num_pages]
                named = [_group_name(name, group) for name in names[:num_cached]]
                pages = list(zip(named, wanted, strict=False))
                file.seek(begin + group * head.num_pages * len(page))
                num_cached = _load_pages(cache, held[group], file, head.tokens, key, pages, sums, page)
        finally:
            for refs in held:
                refs.give_back()
        num_cached *= size
        if checkpoints is not None:
            checkpoints.follow(cache)
            options = {"cache_salt": cache_salt, "extra_keys": extra_keys}
            if 0 < head.position <= num_cached:
                file.seek(begin + num_groups * head.num_pages * len(page))
                state = file.read(checkpoints.state_bytes)
                if sums.of(_state_name(head.position), state) == head.sums[-1]:
                    checkpoints.add_state(head.tokens[: head.position], state, **options)
            num_cached, _ = checkpoints.read_state(head.tokens, num_cached, **options)
    return Session(head.tokens, num_cached, head.note)


def _load_pages(
    cache: PrefixCache,
    held: BlockRefs,
    file: BufferedReader,
    row: NDArray[np.int32],
    key: dict[str, Any],
    pages: list[tuple[bytes, bytes]],
    sums: PageSum,
    page: memoryview,
) -> int:
    """Cache the pages of a group, up to the first damaged one; return how many are cached from the beginning on."""
    size = cache.block_size
    epoch = cache.epoch
    before = held.match_prefix(cache, row[: len(pages) * size], **key).tolist()
    known, good, fresh = len(before), [], BlockRefs(cache.allocator)
    try:
        blocks = _allocate(cache, fresh, len(pages) - known)
        file.seek(known * len(page), os.SEEK_CUR)
        for (name, checksum), block in zip(pages[known:], blocks, strict=False):
            if file.readinto(page) != len(page) or sums.of(name, page) != checksum:
                break
            write_block(cache.allocator, block, page)
            good.append(block)
        if good:
            cache.cache_blocks(row[: (known + len(good)) * size], [*before, *good], start=known, epoch=epoch, **key)
    finally:
        fresh.give_back()
    return known + len(good)


def _group_keys(
    cache: PrefixCache,
    fingerprint: Fingerprint,
    num_groups: int,
    checkpoints: StateCheckpoints | None,
    cache_salt: Any,
    extra_keys: Iterable[Any],
) -> list[dict[str, Any]]:
    """Check the arguments; return the keys of each group's blocks in the cache, as a `Scheduler` has them."""
    if cache.block_size != fingerprint.block_size:
        raise ValueError(f"the fingerprint has blocks of {fingerprint.block_size} tokens, the cache {cache.block_size}")
    state_bytes = 0 if checkpoints is None else checkpoints.state_bytes
    if state_bytes != fingerprint.state_bytes:
        raise ValueError(f"the fingerprint has states of {fingerprint.state_bytes} bytes, checkpoints {state_bytes}")
    own = [(group,) if num_groups > 1 else () for group in range(integer("num_groups", num_groups, 1))]
    return [{"cache_salt": cache_salt, "extra_keys": (*extra_keys, *group)} for group in own]


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


def _group_name(name: bytes, group: int) -> bytes:
    """Return the name of a page for its checksum. Pages of two groups have two names, so they cannot be swapped."""
    return name + group.to_bytes(4, "little")


def _state_name(position: int) -> bytes:
    return b"state" + position.to_bytes(8, "little")


def _head(
    fingerprint: Fingerprint,
    seed: bytes,
    note: bytes,
    row: NDArray[np.int32],
    num_sums: int,
    num_groups: int,
    position: int,
) -> bytes:
    text = fingerprint.text.encode()
    numbers = NUMBERS.pack(len(text), len(note), row.nbytes, SUM_BYTES * num_sums, num_groups, position)
    return MAGIC + fingerprint.digest + seed + numbers + text + note + row.tobytes()


def _head_sum(fingerprint: Fingerprint, head: bytes) -> bytes:
    return blake2b(head, key=fingerprint.digest, digest_size=SUM_BYTES).digest()


class _Head(NamedTuple):
    """The file up to its pages. `sums` has the checksum of each page of each group, then the state's."""

    seed: bytes
    note: Any
    tokens: NDArray[np.int32]
    sums: list[bytes]
    num_groups: int
    num_pages: int  # of a group
    position: int  # number of tokens before the state; 0 without a state


def _read_head(path: str | Path, file: BinaryIO, fingerprint: Fingerprint) -> _Head:
    """Read and check the file up to its pages, which follow in the file."""
    first = file.read(len(MAGIC) + 2 * SUM_BYTES + NUMBERS.size)
    if not first.startswith(MAGIC) or len(first) < len(MAGIC) + 2 * SUM_BYTES + NUMBERS.size:
        raise ValueError(f"{path}: it is not a session of this version of pagepool")
    digest, seed = (first[len(MAGIC) + place : len(MAGIC) + place + SUM_BYTES] for place in (0, SUM_BYTES))
    if digest != fingerprint.digest:
        raise ValueError(f"{path}: the session is of another model, or of other weights, page layout or dtype")
    *lengths, num_groups, position = NUMBERS.unpack(first[-NUMBERS.size :])
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
    sums = [pieces[3][at : at + SUM_BYTES] for at in range(0, lengths[3], SUM_BYTES)]
    num_pages = (len(sums) - (position > 0)) // max(1, num_groups)
    return _Head(seed, json.loads(pieces[1]), row, sums, num_groups, num_pages, position)
