"""The pages of prompts between the prefix caches of two workers: offered by one, read and cached by the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Lock
from time import monotonic, sleep
from typing import Any

from pagepool.cluster.messages import Offer
from pagepool.errors import PoolExhausted, TransferError
from pagepool.memory.block_refs import BlockRefs
from pagepool.memory.kv_pool import KvCachePool
from pagepool.prefix.cache import PrefixCache
from pagepool.prefix.events import prefix_names
from pagepool.prefix.keys import root_key, root_name
from pagepool.transfer import Lease, ReadResult, Ticket, Transfer

__all__ = ["Fetched", "PageMover"]

PAUSE = 1e-4  # seconds: the peer's thread needs a core, too


@dataclass(frozen=True)
class Fetched:
    """What `PageMover.fetch` has done.

    Attributes
    ----------
    found_tokens
        That the prefix cache had before.
    moved_tokens
        That it has now beside them.
    error
        Why it has not all that was offered, or "".
    """

    found_tokens: int
    moved_tokens: int
    error: str


class PageMover:
    """Offers the cached pages of prompts to other workers, and reads theirs into the prefix cache of this one.

    Any number of threads may call it, beside the engine that uses pool and cache.

    Parameters
    ----------
    transfer
        A `Transfer` without a pool, which this object closes.
    pool
        The pages.
    cache
        The `PrefixCache` over the pool's allocator.
    model
        A name of the model and its weights: others are refused.
    seconds
        After which an offer that nobody has read ends.

    Examples
    --------
    >>> from pagepool import KvCachePool, KvLayout, PrefixCache
    >>> from pagepool.transfer import LocalTransfer
    >>> layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=2, dtype="float32")
    >>> pools = [KvCachePool.from_layout(layout, num_blocks=4) for _ in range(2)]
    >>> caches = [PrefixCache(pool.allocator) for pool in pools]
    >>> movers = [PageMover(LocalTransfer(name), *both) for name, both in zip("ab", zip(pools, caches))]
    >>> caches[0].touch([1, 2, 3, 4, 5])
    0
    >>> movers[1].fetch(movers[0].offer("a", [1, 2, 3, 4, 5]), [1, 2, 3, 4, 5])
    Fetched(found_tokens=0, moved_tokens=4, error='')
    >>> caches[1].cached_tokens([1, 2, 3, 4, 5])
    4
    >>> for mover in movers:
    ...     mover.close()
    """

    def __init__(
        self, transfer: Transfer, pool: KvCachePool, cache: PrefixCache, model: str = "", seconds: float = 30.0
    ) -> None:
        transfer.register(pool, model)
        self._transfer, self._allocator, self._cache, self._seconds = transfer, pool.allocator, cache, seconds
        self._lock = Lock()  # a transfer is for one thread at a time
        self._changed = Condition()  # guards the beginnings of prompts that are being read
        self._fetching: set[Any] = set()
        self._lost: dict[str, int] = {}  # by worker: how often a read found that it does not answer
        self._leases: dict[int, Lease] = {}
        self._last_lease = 0
        self._results: dict[int, ReadResult] = {}

    def offer(self, worker: str, tokens: Sequence[int], cache_salt: Any = None) -> Offer | None:
        """Holds the cached pages of a prompt for another worker; None when there are none.

        Parameters
        ----------
        worker
            The name of this one.
        tokens
            Of the prompt.
        cache_salt
            As in `PrefixCache.match_prefix`.
        """
        refs = BlockRefs(self._allocator)
        try:
            blocks = refs.match_prefix(self._cache, tokens, cache_salt=cache_salt)
            if not len(blocks):
                return None
            with self._lock:
                names = self._names(tokens, len(blocks), cache_salt)
                lease = self._transfer.offer(blocks.tolist(), names, seconds=self._seconds)
                self._last_lease += 1
                self._leases[self._last_lease] = lease
                return Offer(lease.ticket, self._transfer.describe(), self._last_lease, worker)
        finally:
            refs.give_back()

    def release(self, number: int) -> None:
        """Ends an offer. Does nothing for one that has ended."""
        with self._lock:
            lease = self._leases.pop(number, None)
            if lease is not None:
                self._transfer.withdraw(lease)

    def release_all(self) -> None:
        """Ends all offers."""
        for number in [*self._leases]:
            self.release(number)

    def fetch(self, offer: Offer, tokens: Sequence[int], cache_salt: Any = None) -> Fetched:
        """Reads the offered pages that the prefix cache lacks and caches them; waits for it.

        Prompts that begin alike are read one after another: each finds what the one before it has moved.
        What cannot be read is left out: the engine computes it. Nothing is raised for a peer that is gone, pages that
        were taken anew or a pool without room; `error` says so.
        """
        size = self._cache.block_size
        count = min(len(offer.ticket.blocks), (len(tokens) - 1) // size)
        row = list(tokens[: count * size])
        beginning = cache_salt, tuple(row[:size])
        with self._changed:
            lost = self._lost.get(offer.worker, 0)
            self._changed.wait_for(lambda: beginning not in self._fetching)
            if self._lost.get(offer.worker, 0) != lost:  # it did not answer the read that this one has waited for
                found = min(self._cache.cached_tokens(row, cache_salt=cache_salt), len(row))
                return Fetched(found, 0, f"worker {offer.worker!r} did not answer another read")
            self._fetching.add(beginning)
        try:
            return self._fetch(offer, row, count, cache_salt)
        finally:
            with self._changed:
                self._fetching.remove(beginning)
                self._changed.notify_all()

    def poll(self) -> None:
        """Ends offers that have expired, and reads that came late."""
        with self._lock:
            self._poll()

    def close(self) -> None:
        """Ends all offers and connections."""
        with self._lock:
            self._leases.clear()
            self._transfer.close()

    def _fetch(self, offer: Offer, row: list[int], count: int, cache_salt: Any) -> Fetched:
        """`row` has the tokens of the first `count` blocks of the offer."""
        size = self._cache.block_size
        matched, taken = BlockRefs(self._allocator), BlockRefs(self._allocator)
        try:
            held = matched.match_prefix(self._cache, row, cache_salt=cache_salt).tolist()
            found = len(held) * size
            if len(held) == count:
                return Fetched(found, 0, "")
            blocks = self._take(taken, count - len(held))
            self._check_names(offer.ticket, row, count, cache_salt)
            wanted = Ticket(offer.ticket.peer, offer.ticket.epoch, offer.ticket.blocks[len(held) : count])
            result = self._read(offer, wanted, blocks)
            # A page is of use if those before it are there.
            bad = set(result.failed)
            good = next((place for place, block in enumerate(blocks) if block in bad), len(blocks))
            if good:
                end = (len(held) + good) * size
                self._cache.cache_blocks(row[:end], held + blocks[:good], start=len(held), cache_salt=cache_salt)
            return Fetched(found, good * size, result.error)
        except (PoolExhausted, TransferError) as error:
            return Fetched(found, 0, str(error))
        finally:
            taken.give_back()
            matched.give_back()

    def _names(self, tokens: Sequence[int], count: int, cache_salt: Any) -> list[bytes]:
        """The names of the first `count` blocks of a prompt: they follow from its salt and its tokens."""
        size = self._cache.block_size
        return prefix_names(tokens[: count * size], size, root_name(root_key(cache_salt, ())))

    def _check_names(self, ticket: Ticket, row: list[int], count: int, cache_salt: Any) -> None:
        """Raise `TransferError` unless the ticket is for the pages of this prompt."""
        names = self._names(row, count, cache_salt)
        if list(ticket.names[:count]) != names:
            pairs = enumerate(zip(ticket.names, names, strict=False))
            first = next((place for place, (theirs, ours) in pairs if theirs != ours), 0)
            raise TransferError(f"the ticket is of another prompt: block {first} of {count} has another name")

    def _take(self, refs: BlockRefs, count: int) -> list[int]:
        """So many blocks, evicted from the cache if need be. Raises `PoolExhausted`."""
        try:
            blocks = refs.allocate_n(count)
        except PoolExhausted:
            self._cache.evict(max(1, count - self._allocator.available))
            blocks = refs.allocate_n(count)
        return [*map(int, blocks)]

    def _read(self, offer: Offer, ticket: Ticket, blocks: list[int]) -> ReadResult:
        with self._lock:
            try:
                peer = self._transfer.meet(offer.peer)
            except ValueError:  # it was met before it started again
                self._forget(offer.peer.name)
                peer = self._transfer.meet(offer.peer)
            number = self._transfer.read(ticket, blocks)
        while True:
            with self._lock:
                self._poll()
                result = self._results.pop(number, None)
                if result is not None and self._transfer.is_lost(peer):
                    with self._changed:
                        self._lost[offer.worker] = self._lost.get(offer.worker, 0) + 1
                    self._forget(peer)  # it may be gone for good; a worker that offers again is met again
            if result is not None:
                return result
            sleep(PAUSE)

    def _forget(self, peer: str) -> None:
        try:
            self._transfer.forget(peer)
        except ValueError:  # another read has found it so, too
            return

    def _poll(self) -> None:
        self._results.update((result.read, result) for result in self._transfer.poll())
        now = monotonic()
        self._leases = {number: lease for number, lease in self._leases.items() if lease.expires > now}
