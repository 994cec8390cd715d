"""PageTier: pages of bytes under the tokens of prompts, in memory that processes share, with a store behind it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagepool._arguments import integer, wrong
from pagepool.config import MAX_BLOCK_SIZE, KvLayout
from pagepool.errors import PoolError, PoolExhausted, StaleHandle, refuse_copy
from pagepool.memory.block_refs import BlockRefs
from pagepool.memory.budget import MemoryBudget
from pagepool.memory.kv_pool import KvCachePool
from pagepool.memory.shared_files import open_named, path_of
from pagepool.memory.shared_pages import read_pool
from pagepool.prefix.cache import PrefixCache
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.keys import listed
from pagepool.prefix.radix_tree import token_row
from pagepool.prefix.store import PrefixStore
from pagepool.prefix.stored_pages import move_page

__all__ = ["PageTier", "TierMatch"]

logger = logging.getLogger("pagepool")

HEAD_DIM = 8  # the smallest of a layout: the bytes of a page are rounded up to a multiple of TOKEN_BYTES for each token
TOKEN_BYTES = 2 * HEAD_DIM * 4
LEAST_PAGES = 4


class TierMatch:
    """Pages that a tier has found. They stay in the tier until the match is closed or deleted.

    Attributes
    ----------
    num_tokens : int
        Number of tokens with pages, from the first token of the prompt on.
    blocks : int32 array (n,)
        Places of the pages in the tier.
    """

    __reduce__ = refuse_copy

    def __init__(self, refs: BlockRefs, blocks: NDArray[np.int32], block_size: int, shared: Any) -> None:
        self.blocks, self.num_tokens, self._shared = blocks, len(blocks) * block_size, shared
        self._finalizer = weakref.finalize(self, refs.give_back)
        self._finalizer.atexit = False  # a pool releases the blocks of a process that ends

    def close(self) -> None:
        """Release the pages. May be called again."""
        self._finalizer()

    def __enter__(self) -> TierMatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PageTier:
    """Pages of bytes under the tokens of prompts, for engines with pages of their own. Processes of one host share it.

    The memory is a shared pool, and a `PrefixCache` finds its pages: every token is compared, from the first of the
    prompt on. The pages stay when processes end, also by `kill -9`. A page belongs to `fingerprint.block_size` tokens.
    With a store, pages that were found again or evicted are written to it, and look-ups read pages from it that the
    memory does not have. `submit_match` reads them in a thread. `store` writes pages without waiting for that.

    No call fails because the tier is full, the disk fails, or another process was killed: pages are not kept or not
    found, and the logger "pagepool" gets one line. Any thread may call it. After a fork, it finds nothing in the child.

    Parameters
    ----------
    name : str
        Name of the tier, 1 to 80 letters, digits, `.`, `_` or `-`. Processes with the same name and fingerprint share
        pages.
    max_bytes : int
        Limit in bytes of the memory, the same in all processes. It is taken at once. If other processes have a tier of
        another fingerprint with this name, they give up pages that are not in use until this one has a half.
    fingerprint : Fingerprint
        Identifies everything that pages depend on besides the tokens. It has the bytes and the tokens of a page.
    store : str, path-like or None
        Directory of a `PrefixStore`. One process that has a store writes to it.
    store_bytes : int or None
        Limit in bytes of that directory.

    Raises
    ------
    ValueError
        A wrong argument, `max_bytes` without room for four pages, or another limit than the tier has.
    PoolError
        The files belong to another user or are damaged.
    OSError
        The host has too little memory, or the directory cannot be made.

    Examples
    --------
    >>> import os
    >>> from pagepool.prefix.fingerprint import Fingerprint
    >>> model = Fingerprint("sha256:1234, bfloat16", page_bytes=4096, block_size=16)
    >>> tier = PageTier("example", 16 << 20, model)
    >>> tier.put(range(32), [b"a" * 4096, b"b" * 4096])  # pages of 16 tokens each
    2
    >>> page = bytearray(4096)
    >>> with PageTier("example", 16 << 20, model).match(range(40)) as found:  # in another process
    ...     tier.read(found, [page], start=1)
    >>> found.num_tokens, page[:4]
    (32, bytearray(b'bbbb'))
    >>> tier.remove()
    """

    __reduce__ = refuse_copy

    def __init__(
        self,
        name: str,
        max_bytes: int,
        fingerprint: Fingerprint,
        *,
        store: str | Path | None = None,
        store_bytes: int | None = None,
    ) -> None:
        if not isinstance(fingerprint, Fingerprint):
            raise TypeError(f"fingerprint must be a Fingerprint, not {type(fingerprint).__name__}")
        if (store is None) != (store_bytes is None):
            raise ValueError("store and store_bytes must be given together")
        self.block_size = integer("block_size of the fingerprint", fingerprint.block_size, 1, MAX_BLOCK_SIZE)
        self.page_bytes = integer("page_bytes of the fingerprint", fingerprint.page_bytes, 1)
        layers = -(-self.page_bytes // (TOKEN_BYTES * self.block_size))
        layout = KvLayout(layers, 1, HEAD_DIM, self.block_size, "float32")
        self._pid = os.getpid()
        self.name, self._faults = name, set[str]()  # faults that were logged, and not seen to be over
        kept, self._budget = None, MemoryBudget(name, max_bytes)
        try:
            most = self._budget.most_blocks(layout.block_bytes, self.block_size)
            if most < LEAST_PAGES:
                size = layout.block_bytes
                raise ValueError(f"max_bytes must have room for {LEAST_PAGES} pages of {size} bytes, not for {most}")
            if store is not None and store_bytes is not None:
                kept = PrefixStore(store, replace(fingerprint, page_bytes=layout.block_bytes), store_bytes)
            self._pool = self._open_pool(layout, most, fingerprint.digest.hex())
            self._cache = PrefixCache(self._pool.allocator, store=kept)
        except BaseException:
            if kept is not None:
                kept.close()
            self._remove_budget()
            raise
        self._allocator = self._pool.allocator
        self._reader = ThreadPoolExecutor(1, "pagepool-tier")
        self._pages: NDArray[np.uint8] = self._pool.numpy().view(np.uint8)[:, : self.page_bytes]

    def _open_pool(self, layout: KvLayout, most: int, digest: str) -> KvCachePool:
        """Return the pool, with all memory that the budget has: no later call waits until the system finds some.

        Removes pools that no process has: their pages are of former weights. From other pools, takes up to a half.
        """
        shared = f"{self.name}-{digest[:16]}"
        for other in self._budget.pools():
            if other != shared and not _has_processes(other):
                path_of(other).unlink(missing_ok=True)
        options: dict[str, Any] = {"shared": shared, "fingerprint": digest, "budget": self._budget}
        pool = KvCachePool.from_layout(layout, 1, max_blocks=most, **options)
        for goal, takes in ((most, False), (most // 2, True)):
            while pool.num_blocks < goal and pool.allocator.shared_pages.extend(goal - pool.num_blocks, takes):
                pass
        if pool.num_blocks < most // 4:
            self._fail("it has little memory", f"{pool.num_blocks} pages of {most}")
        return pool

    def _remove_budget(self) -> None:
        if not self._budget.pools():
            path_of(self.name, "memory budget", "pagepool.budget-").unlink(missing_ok=True)

    def match(self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> TierMatch:
        """Find the pages of the longest prefix of `tokens`, and mark them as used.

        Reads pages from the store that the memory does not have, and waits for the disk.

        Parameters
        ----------
        tokens : sequence of int or integer array (n_tokens,)
            Token ids of at least 0.
        cache_salt, extra_keys
            As in `PrefixCache.match_prefix`: find only pages that were put with equal ones.

        Returns
        -------
        TierMatch
            Close it after `read`.

        Raises
        ------
        TypeError, ValueError
            The tokens or keys are wrong.
        """
        return self._match(token_row(tokens), cache_salt, listed(extra_keys), reads=True)

    def submit_match(self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> Future[TierMatch]:
        """As `match`, but a thread reads the pages from the store. No call waits for the disk.

        The thread reads for one prompt after another. Pages that it reads take the places of free pages and of pages
        that were used longest ago.

        Returns
        -------
        concurrent.futures.Future
            Done at once if the store has no page that the memory lacks. If you do not need its result any more, close
            the match: `future.cancel() or future.add_done_callback(lambda done: done.result().close())`.
        """
        row, keys = np.array(token_row(tokens)), listed(extra_keys)  # a copy: the caller may change its own
        link = self._cache.link
        try:
            reads = link is not None and link.has_next(self._cache, row, cache_salt, keys)
        except PoolError as error:
            self._fail("nothing is found", error)
            reads = False
        if reads:
            return self._reader.submit(self._match, row, cache_salt, keys, reads=True)
        done: Future[TierMatch] = Future()
        done.set_result(self._match(row, cache_salt, keys, reads=False))
        return done

    def _match(self, row: Any, cache_salt: Any, keys: Iterable[Any], reads: bool) -> TierMatch:
        refs, blocks = BlockRefs(self._allocator), np.empty(0, np.int32)
        try:
            blocks = self._cache.match_held(refs, row, cache_salt, keys, reads=reads)
            self._faults.discard("nothing is found")
        except PoolError as error:
            self._fail("nothing is found", error)
        return TierMatch(refs, blocks, self.block_size, self._pool.shared)

    def read(self, found: TierMatch, into: Sequence[Any], start: int = 0) -> None:
        """Copy pages of a match, from page `start` on, into buffers. Copies without the GIL.

        Parameters
        ----------
        found : TierMatch
            From `match`, and not closed.
        into : sequence of buffers
            A writable C-contiguous buffer of `page_bytes` for each page, or a list or tuple of buffers that have this
            size together.
        start : int
            Number of first pages that are left out.

        Raises
        ------
        ValueError
            `found` is closed or from another tier, or there are more buffers than pages. Or a buffer has another size:
            pages before it were copied.
        StaleHandle
            Another thread has closed the tier meanwhile.
        """
        if not isinstance(found, TierMatch):
            raise wrong("found", "a TierMatch", found)
        if found._shared != self._pool.shared or not found._finalizer.alive or not len(self._pages):
            raise ValueError("found must be a match of this tier; neither it nor the tier may be closed")
        blocks = found.blocks[integer("start", start, 0) :]
        if len(into) > len(blocks):
            raise ValueError(f"into has {len(into)} buffers, the match {len(blocks)} pages from page {start} on")
        for block, page in zip(blocks.tolist(), into, strict=False):
            move_page(self._page(block), page, into_page=False)

    def _page(self, block: int) -> NDArray[np.uint8]:
        try:
            page: NDArray[np.uint8] = self._pages[block]
        except IndexError:
            raise StaleHandle(f"the page tier {self.name} was closed meanwhile") from None
        return page

    def put(self, tokens: Any, pages: Sequence[Any], *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> int:
        """Keep the pages of a prompt. Evicts pages that were used longest ago if needed. Copies without the GIL.

        Parameters
        ----------
        tokens : sequence of int or integer array (n_tokens,)
            All tokens of the prompt from the first one on. Those of its pages are used.
        pages : sequence of buffers
            The pages of the first `len(pages) * block_size` tokens, as for `read`. Only pages that the tier does not
            have are looked at.
        cache_salt, extra_keys
            As in `match`.

        Returns
        -------
        int
            How many of the first pages the tier has afterwards. Fewer than `len(pages)` if too many pages are in use.

        Raises
        ------
        TypeError, ValueError
            The tokens or keys are wrong, or a page has another size. No page is kept.
        """
        size, row, keys = self.block_size, token_row(tokens), listed(extra_keys)
        if len(row) < len(pages) * size:
            raise ValueError(f"{len(pages)} pages have {len(pages) * size} tokens, got {len(row)}")
        row = row[: len(pages) * size]
        known, fresh = BlockRefs(self._allocator), BlockRefs(self._allocator)
        try:
            epoch = self._cache.epoch
            before = self._cache.match_held(known, row, cache_salt, keys, is_use=False, reads=False).tolist()
            blocks = [*before, *self._allocate(fresh, len(pages) - len(before))]
            for place in range(len(before), len(blocks)):
                move_page(self._page(blocks[place]), pages[place], into_page=True)
            row = row[: len(blocks) * size]
            self._cache.cache_blocks(
                row, blocks, cache_salt=cache_salt, extra_keys=keys, start=len(before), epoch=epoch
            )
        except PoolError as error:
            self._fail("nothing is kept", error)
            return 0
        finally:
            fresh.give_back()
            known.give_back()
        if len(blocks) == len(pages):
            self._faults -= {"nothing is kept", "pages find no room"}
        return len(blocks)

    def make_room(self, n: int) -> None:
        """Evict pages until `n` are free, as `put` does. For a process with a store, before another one calls `put`."""
        missing = n - self._allocator.available
        try:
            if missing > 0 and self._cache.evict(missing) < missing and self._pool.reap():
                self.make_room(n)  # killed processes have released theirs
        except PoolError as error:
            self._fail("nothing is kept", error)

    def _allocate(self, refs: BlockRefs, n: int) -> list[int]:
        self.make_room(n)
        available = self._allocator.available
        if available < n:
            self._fail("pages find no room", f"{n} are new, {available} of {self._pool.num_blocks} are not in use")
        try:
            blocks: list[int] = refs.allocate_n(min(n, available)).tolist()
        except PoolExhausted:  # another process was faster
            return []
        return blocks

    def store(self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> None:
        """Let a thread write the pages of a prompt that are in memory to the store. Does nothing without a store.

        Parameters and errors as in `match`. Marks the pages as used.
        """
        if self._cache.store is None:
            return
        row, keys = token_row(tokens), {"cache_salt": cache_salt, "extra_keys": listed(extra_keys)}
        try:
            known: int = self._cache.cached_tokens(row, **keys)
        except PoolError as error:
            self._fail("nothing is found", error)
            return
        self.match(row[:known], **keys).close()

    def flush(self, timeout: float | None = None) -> bool:
        """Write every page to the store, and wait for it; return False as `PrefixCache.flush`."""
        return self._cache.flush(timeout)

    def clear(self) -> None:
        """Forget all pages in all processes, and the pages of the store. Raises as `PrefixCache.reset_prefix_cache`."""
        self._cache.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """Return the counters of the `PrefixCache`. The entry `store` has the counters of the store, or None."""
        store = self._cache.store
        return {**self._cache.stats(), "store": None if store is None else store.stats()}

    def check(self) -> None:
        """Audit the pages and their tokens. Raises `PoolError` with the name of a broken invariant."""
        self._cache.check()

    def close(self) -> None:
        """Leave the tier. The pages stay for other processes and for the next one. May be called again.

        Waits for the prompt that the thread of `submit_match` reads for, and cancels the futures of other prompts.
        Raises `BufferError` while another thread copies pages: call it again then.
        """
        self._reader.shutdown(cancel_futures=True)
        if self._cache.link is not None:
            self._cache.link.close()
            self._cache.link.store.close()
        self._pages = self._pages[:0].copy()  # a view would keep the memory
        try:
            self._pool.close()
        except BufferError:  # after a fork, the copy of a thread that the child does not have
            if os.getpid() == self._pid:
                raise

    def remove(self) -> None:
        """Leave the tier and remove its memory. Processes that have it keep it until they end. A store stays."""
        self.close()
        path_of(str(self._pool.shared)).unlink(missing_ok=True)
        self._remove_budget()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self._pool.num_blocks} pages of {self.page_bytes} bytes>"

    def _fail(self, what: str, why: Exception | str) -> None:
        """Log a fault, once until the same operation succeeds."""
        if what not in self._faults:
            self._faults.add(what)
            logger.warning("the page tier %s: %s (%s)", self.name, what, why)


def _has_processes(name: str) -> bool:
    """Return whether a process has the pool of this name. True for a file that cannot be read."""
    try:
        fd = open_named(name)
    except PoolError:  # it was replaced by the file of another user
        return True
    if fd is None:
        return True
    try:
        return bool(read_pool(fd)["processes"])
    except OSError:  # it is damaged
        return True
    finally:
        os.close(fd)
