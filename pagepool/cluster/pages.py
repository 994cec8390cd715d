"""PageMover: copies pages of prompts from the prefix cache of one worker to the prefix cache of another worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock
from time import monotonic, sleep
from typing import Any

from pagepool.cluster.messages import Offer
from pagepool.errors import PoolExhausted, TransferError
from pagepool.memory.block_refs import BlockRefs
from pagepool.memory.kv_pool import KvCachePool
from pagepool.prefix.cache import PrefixCache
from pagepool.prefix.events import prefix_names
from pagepool.prefix.fingerprint import weights_digest
from pagepool.prefix.keys import root_key, root_name
from pagepool.transfer import Lease, ReadResult, Ticket, Transfer

__all__ = ["Fetched", "PageMover", "model_identity"]

PAUSE = 1e-4  # seconds between polls, because the peer's thread also needs a core


def model_identity(name: str, folder: str | Path, dtype: str, arithmetic: str = "exact") -> str:
    """Return the `model` of a `PageMover`. It differs for models with equal names and different keys and values.

    Parameters
    ----------
    name : str
        Name of the model.
    folder : path
        Directory with the weights. All files are read.
    dtype : str
        The dtype in which the weights are loaded.
    arithmetic : str
        The arithmetic of attention, as in `decode`.

    Returns
    -------
    str
        The name, a digest of the weights, the dtype and the arithmetic.
    """
    return f"{name}, weights {weights_digest(folder)} as {dtype}, {arithmetic} attention"


@dataclass(frozen=True)
class Fetched:
    """Result of `PageMover.fetch`.

    Attributes
    ----------
    found_tokens : int
        Number of tokens that were in the prefix cache before.
    moved_tokens : int
        Number of tokens that were read from the other worker and cached.
    error : str
        Reason why offered pages are missing, or "".
    """

    found_tokens: int
    moved_tokens: int
    error: str


class PageMover:
    """Offers cached pages of prompts to other workers, and reads offered pages into this worker's prefix cache.

    Thread-safe, also while an engine uses the pool and the cache.

    Parameters
    ----------
    transfer : Transfer
        A `Transfer` without a registered pool. This object closes it.
    pool : KvCachePool
        The pool of the pages.
    cache : PrefixCache
        A cache over the pool's allocator.
    model : str
        Name of the model and its weights. Peers with a different name are refused.
    seconds : float
        Seconds until an offer expires.

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
        self._lock = Lock()  # a transfer is not thread-safe
        self._changed = Condition()  # guards `_fetching` and `_lost`
        self._fetching: set[Any] = set()
        self._lost: dict[str, int] = {}  # by worker: number of reads that it did not answer
        self._leases: dict[int, Lease] = {}
        self._last_lease = 0
        self._results: dict[int, ReadResult] = {}

    def offer(self, worker: str, tokens: Sequence[int], cache_salt: Any = None) -> Offer | None:
        """Hold the cached pages of a prompt for another worker, until `release` or until the offer expires.

        Parameters
        ----------
        worker : str
            Name of this worker.
        tokens : sequence of int
            The prompt.
        cache_salt
            As in `PrefixCache.match_prefix`.

        Returns
        -------
        Offer or None
            None if no page of the prompt is cached.
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
        """End an offer. Does nothing if it has ended."""
        with self._lock:
            lease = self._leases.pop(number, None)
            if lease is not None:
                self._transfer.withdraw(lease)

    def release_all(self) -> None:
        """End all offers."""
        for number in [*self._leases]:
            self.release(number)

    def fetch(self, offer: Offer, tokens: Sequence[int], cache_salt: Any = None) -> Fetched:
        """Read the offered pages that are missing in the prefix cache, and cache them. Blocks until this is done.

        Prompts with the same first block are read one after another, so each finds the pages that were moved before it.
        Pages that cannot be read are skipped, and the engine computes them. A lost peer, reallocated blocks and a full
        pool do not raise: `error` in the result reports them.

        Parameters
        ----------
        offer : Offer
            An offer of another worker.
        tokens : sequence of int
            The prompt.
        cache_salt
            As in `PrefixCache.match_prefix`.

        Returns
        -------
        Fetched
            Number of tokens found and moved, and the error.
        """
        size = self._cache.block_size
        count = min(len(offer.ticket.blocks), (len(tokens) - 1) // size)
        row = list(tokens[: count * size])
        beginning = cache_salt, tuple(row[:size])
        with self._changed:
            lost = self._lost.get(offer.worker, 0)
            self._changed.wait_for(lambda: beginning not in self._fetching)
            if self._lost.get(offer.worker, 0) != lost:  # no answer to the read that this one waited for
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
        """End expired offers, and collect the results of reads."""
        with self._lock:
            self._poll()

    def close(self) -> None:
        """End all offers and connections."""
        with self._lock:
            self._leases.clear()
            self._transfer.close()

    def _fetch(self, offer: Offer, row: list[int], count: int, cache_salt: Any) -> Fetched:
        """Read and cache the first `count` blocks of the offer. `row` holds their tokens."""
        size = self._cache.block_size
        matched, taken = BlockRefs(self._allocator), BlockRefs(self._allocator)
        try:
            epoch = self._cache.epoch
            held = matched.match_prefix(self._cache, row, cache_salt=cache_salt).tolist()
            found = len(held) * size
            if len(held) == count:
                return Fetched(found, 0, "")
            blocks = self._take(taken, count - len(held))
            self._check_names(offer.ticket, row, count, cache_salt)
            wanted = Ticket(offer.ticket.peer, offer.ticket.epoch, offer.ticket.blocks[len(held) : count])
            result = self._read(offer, wanted, blocks)
            # A page can be cached only if all pages before it were loaded.
            bad = set(result.failed)
            good = next((place for place, block in enumerate(blocks) if block in bad), len(blocks))
            if good:
                end = (len(held) + good) * size
                both = held + blocks[:good]
                self._cache.cache_blocks(row[:end], both, start=len(held), epoch=epoch, cache_salt=cache_salt)
            return Fetched(found, good * size, result.error)
        except (PoolExhausted, TransferError) as error:
            return Fetched(found, 0, str(error))
        finally:
            taken.give_back()
            matched.give_back()

    def _names(self, tokens: Sequence[int], count: int, cache_salt: Any) -> list[bytes]:
        """Return the names of the first `count` blocks of a prompt, computed from its salt and its tokens."""
        size = self._cache.block_size
        return prefix_names(tokens[: count * size], size, root_name(root_key(cache_salt, ())))

    def _check_names(self, ticket: Ticket, row: list[int], count: int, cache_salt: Any) -> None:
        """Raise `TransferError` unless the ticket is for the pages of this prompt."""
        names = self._names(row, count, cache_salt)
        if list(ticket.names[:count]) != names:
            pairs = enumerate(zip(ticket.names, names, strict=False))
            first = next((place for place, (theirs, ours) in pairs if theirs != ours), 0)
            raise TransferError(f"the ticket is for another prompt: the name of block {first} of {count} differs")

    def _take(self, refs: BlockRefs, count: int) -> list[int]:
        """Allocate `count` blocks, after evicting cached blocks if needed. Raises `PoolExhausted`."""
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
            except ValueError:  # the peer has restarted since it was met
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
                    self._forget(peer)  # it may have exited; a later offer meets it again
            if result is not None:
                return result
            sleep(PAUSE)

    def _forget(self, peer: str) -> None:
        try:
            self._transfer.forget(peer)
        except ValueError:  # another read has forgotten it already
            return

    def _poll(self) -> None:
        self._results.update((result.read, result) for result in self._transfer.poll())
        now = monotonic()
        self._leases = {number: lease for number, lease in self._leases.items() if lease.expires > now}
