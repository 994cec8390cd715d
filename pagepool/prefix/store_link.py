"""StoreLink: connects a prefix cache to its store. A thread writes pages, and look-ups load pages into blocks."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Lock, Thread
from typing import Any
from weakref import WeakSet

from pagepool.errors import PoolExhausted
from pagepool.memory.block_refs import BlockRefs
from pagepool.prefix.keys import STATE, root_key
from pagepool.prefix.store import PrefixStore
from pagepool.prefix.stored_pages import PageQueue
from pagepool.prefix.stored_states import StateQueue

__all__ = ["QUEUE_BYTES", "StoreLink"]

logger = logging.getLogger("pagepool")

QUEUE_BYTES = 128 << 20  # size of the queue of pages to write; a page that does not fit is not written
BATCH = 64  # pages that are written together
RETRY_SECONDS = 20.0  # how often a reader tries to become the writer


class StoreLink:
    """Connects a cache to a store. Internal: `PrefixCache` calls it.

    Order of locks: the lock of the link, then the critical section of the cache.

    Parameters
    ----------
    store : PrefixStore
        The store.
    queue : PageQueue
        Pages to write to the store.
    """

    def __init__(self, store: PrefixStore, queue: PageQueue) -> None:
        size = store.fingerprint.block_size
        if queue.block_size != size:
            raise ValueError(f"the store has blocks of {size} tokens, the prefix cache {queue.block_size}")
        if queue.page_bytes != store.fingerprint.page_bytes:
            raise ValueError(
                f"the store has pages of {store.fingerprint.page_bytes} bytes, a block {queue.page_bytes} in all pools"
            )
        self.store, self.queue, self.states = store, queue, StateQueue()
        self.checkpoints: WeakSet[Any] = WeakSet()  # each `StateCheckpoints` that keeps states for this cache
        self._lock = Lock()
        self._writer = _Writer(store, queue, self.states)
        self._writer.start()
        # The thread does not hold the link. It ends with the link, or when Python ends.
        self.close = weakref.finalize(self, self._writer.stop)

    @contextmanager
    def promoted(self, cache: Any, row: Any, cache_salt: Any, extra_keys: Any, reads: bool = True) -> Iterator[None]:
        """Read blocks of `row` that are not cached from the store and cache them, while there is room.

        Evicts blocks that only the cache holds. The blocks of `row` stay cached until the end of the `with` block. If
        `reads` is false, nothing is read or evicted.
        """
        if self.store.is_inherited:
            yield
            return
        keys = {"cache_salt": cache_salt, "extra_keys": extra_keys}
        held, fresh = BlockRefs(cache.allocator), BlockRefs(cache.allocator)
        try:
            known = cache.cached_tokens(row, **keys) // cache.block_size if reads else len(row)
            if known < len(row) // cache.block_size:
                with self._lock:
                    self._promote(cache, row, keys, known, held, fresh)
            yield
        finally:
            fresh.give_back()
            held.give_back()
            self.wake()

    def _promote(
        self, cache: Any, row: Any, keys: dict[str, Any], known: int, held: BlockRefs, fresh: BlockRefs
    ) -> None:
        size = cache.block_size
        names = self.store.names(row, root_key(**keys))[known:]
        names = names[: self._writer.num_valid(names)]
        ends = range(known * size, (known + len(names)) * size, size)
        found = self.store.find(names, [row[begin : begin + size].tobytes() for begin in ends])
        if not found:
            return
        epoch = cache.epoch
        before = cache.match_held(held, row[: known * size], **keys, is_use=False, reads=False).tolist()
        if len(before) < known:  # another thread has evicted one meanwhile
            return
        blocks = _allocate(cache, fresh, len(found))
        blocks = blocks[: self.store.pages.load(found[: len(blocks)], cache.allocator, blocks)]
        if blocks:
            row = row[: (known + len(blocks)) * size]
            cache.cache_blocks(row, [*before, *blocks], **keys, start=known, epoch=epoch)
            self.queue.mark(blocks)

    def has_next(self, cache: Any, row: Any, cache_salt: Any, extra_keys: Any) -> bool:
        """Return whether the store has the first block of `row` that is not cached. Reads the index, and no page.

        Also true if that would need the whole index of a store with much that is new.
        """
        if self.store.is_inherited:
            return False
        size, keys = cache.block_size, {"cache_salt": cache_salt, "extra_keys": extra_keys}
        known = cache.cached_tokens(row, **keys)
        row = row[: known + size]
        if len(row) < known + size:
            return False
        name = self.store.names(row, root_key(**keys))[-1]
        return self.store.pages.is_behind() or bool(self.store.find([name], [row[known:].tobytes()]))

    def load_state(self, names: Sequence[bytes], tokens: Sequence[bytes], state: memoryview) -> int:
        """Read the last of these states that the store has, with a right sum; return its place, or -1."""
        if self.store.is_inherited:
            return -1
        with self._lock:
            end = len(names) if self._writer.num_valid([STATE]) else 0
            while end:
                found = self.store.find_last(names[:end], tokens[:end])
                if found is None:
                    break
                if self.store.pages.read(found[1], state):
                    return found[0]
                end = found[0]
        return -1

    def offer_states(self) -> bool:
        """Queue the kept states of all checkpoints; False when the queue is full."""
        return all(each.offer_states() for each in list(self.checkpoints))

    def wake(self) -> None:
        """Let the thread write what is in the queues. A few notes of uses wait for the next batch."""
        if len(self.queue) or len(self.states) or self.queue.has_found or self.store.pages.has_notes:
            self._writer.wake()

    def take_over(self) -> bool:
        """Become the process that writes to the store, if no other process is; return whether this process writes."""
        return self._writer.take_over()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all pages of the queue are written; return whether they are, within `timeout` seconds."""
        return self._writer.wait(timeout)

    @contextmanager
    def forgetting(self, names: Sequence[bytes] | None) -> Iterator[None]:
        """Delete the entries of `names` (None: all) and of all states, while the `with` block forgets the blocks.

        Look-ups do not see them from the beginning on. The thread deletes them after the block: until then another
        thread can put one of the pages into the queue.
        """
        if self.store.is_inherited or (names is not None and not names):
            yield
            return
        with self._lock:  # a look-up that has found one of them ends first
            forgotten = self._writer.hide(names)
        try:
            yield
        finally:
            self.states.clear()
            self._writer.forget(forgotten)


def _allocate(cache: Any, refs: BlockRefs, n: int) -> list[int]:
    """Allocate up to `n` blocks for `refs`. If fewer are free, cached blocks are evicted first."""
    available = cache.allocator.available
    if available < n:
        cache.evict(n - available)
    try:
        blocks: list[int] = refs.allocate_n(min(n, cache.allocator.available)).tolist()
    except PoolExhausted:  # another thread was faster
        return []
    return blocks


class _Forgotten:
    """Names to delete from the store (None: all), and all states.

    `after` is the number of pages that must be written before, because a page in the queue may have one of the names.
    None: the cache has not forgotten the blocks yet.
    """

    __slots__ = ("after", "names")

    def __init__(self, names: frozenset[bytes] | None) -> None:
        self.names = names
        self.after: int | None = None


class _Writer(Thread):
    """The thread that writes the pages of a queue, and deletes what was forgotten."""

    def __init__(self, store: PrefixStore, queue: PageQueue, states: StateQueue) -> None:
        super().__init__(name="pagepool-store", daemon=True)
        self._store, self._queue, self._states = store, queue, states
        self._changed = Condition()  # guards the fields below
        self._is_stopping = self._is_woken = self._has_ended = False
        self._forgotten: deque[_Forgotten] = deque()
        self._was_writer = store.is_writer
        self._num_dropped = 0  # pages that found no room in the queue and are counted

    def run(self) -> None:
        """Write until `stop`."""
        try:
            while not self._is_stopping:
                with self._changed:
                    retry = None if self._store.is_writer else RETRY_SECONDS
                    self._changed.wait_for(lambda: self._is_stopping or self._is_woken, retry)
                    self._is_woken = False
                self._write_all()
        except Exception as error:  # a defect: nothing more is written, as without a store
            logger.error("the thread of the prefix store failed", exc_info=error)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def take_over(self) -> bool:
        """Try to become the process that writes. The pages that this process has dropped so far are offered again."""
        self._store.write(())
        is_writer = self._store.is_writer
        if is_writer and not self._was_writer:
            self._queue.offer_again()
        self._was_writer = is_writer
        return is_writer

    def _write_all(self) -> None:
        queue = self._queue
        self.take_over()
        if queue.dropped > self._num_dropped:
            dropped, self._num_dropped = queue.dropped - self._num_dropped, queue.dropped
            self._store.pages.note_dropped(dropped, "the queue of pages to write is full")
        while not self._is_stopping:
            with self._changed:
                self._changed.notify_all()
                forgotten = self._forgotten[0] if self._forgotten else None
            most = BATCH
            if forgotten is not None and forgotten.after is not None:
                most = min(BATCH, forgotten.after - (queue.num_added - len(queue)))
                if most <= 0:
                    self._store.forget(forgotten.names)
                    with self._changed:
                        self._forgotten.popleft()
                    continue
            pages, states = queue.peek(most), self._states.peek()
            self._store.write([*pages, *states], queue.take_found())
            written = len(pages) + len(states)
            queue.pop(len(pages))
            self._states.pop(states)
            del pages, states
            if not written:
                return

    def wake(self) -> None:
        """Let the thread look at the queue."""
        if self._store.is_inherited:
            return
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until all pages are written and all deletions are done; False when time runs out or the thread ends."""
        if self._store.is_inherited:
            return False
        self.wake()
        with self._changed:
            return self._changed.wait_for(self._is_done, timeout) and not self._has_ended

    def _is_done(self) -> bool:
        return self._has_ended or not (len(self._queue) or len(self._states) or self._forgotten)

    def hide(self, names: Iterable[bytes] | None) -> _Forgotten:
        """Hide entries from look-ups. They are deleted after `forget`."""
        forgotten = _Forgotten(None if names is None else frozenset(names))
        with self._changed:
            self._forgotten.append(forgotten)
        return forgotten

    def forget(self, forgotten: _Forgotten) -> None:
        """Let the thread delete hidden entries, after the pages that are in the queue now."""
        with self._changed:
            forgotten.after = self._queue.num_added
        self.wake()

    def num_valid(self, names: Sequence[bytes]) -> int:
        """How many of the first names are not to be deleted. `STATE` stands for all states."""
        with self._changed:
            forgotten = [each.names for each in self._forgotten]
        for count, name in enumerate(names if forgotten else ()):
            if name == STATE or any(gone is None or name in gone for gone in forgotten):
                return count
        return len(names)

    def stop(self) -> None:
        """End the thread after its batch."""
        if self._store.is_inherited:
            return
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self.join()
