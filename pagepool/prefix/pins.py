"""PrefixPins: prefixes that stay cached, until a time or until they are let go, within a budget of blocks."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from pagepool.errors import PoolError
from pagepool.prefix.cache import PrefixCache

__all__ = ["PrefixPins"]


class PrefixPins:
    """Keeps prefixes of a cache from being evicted: a pin holds one reference to each block of its prefix.

    cache   the `PrefixCache` whose prefixes are pinned
    budget  the most blocks that may be pinned at a time, each counted once however many pins it has

    There is no clock in it: `ttl` and `now` are numbers of the caller's, of one unit, so that a replay is exact. Blocks
    pinned count as in use. Pins outlast `reset_prefix_cache`. Their blocks are free when the object goes and nobody
    else holds them. One thread at a time may use it. Raises `ValueError` when the budget is below 0.

    blocks with a pin <= budget        references held == sum over pins of their blocks

    >>> from pagepool import BlockAllocator, PrefixCache
    >>> cache = PrefixCache(BlockAllocator(8), block_size=2)
    >>> cache.touch([1, 2, 3, 4, 5, 6])
    0
    >>> pins = PrefixPins(cache, budget=2)
    >>> pin = pins.pin([1, 2, 3, 4], ttl=60.0, now=100.0)
    >>> cache.evict(8), pins.num_pinned
    (1, 2)
    >>> pins.expire(160.0), cache.evict(8)
    (1, 2)
    """

    kind = "pin"
    label = None

    def __init__(self, cache: PrefixCache, budget: int) -> None:
        self.cache = cache
        self.budget = operator.index(budget)
        if self.budget < 0:
            raise ValueError(f"the budget must be 0 blocks or more, not {self.budget}")
        self._pins: dict[int, list[int]] = {}
        self._times: Counter[int] = Counter()  # how many pins a block has
        self._due: list[tuple[Any, int]] = []  # a heap of ends and pins; those let go before are passed over
        self._next = count(1)
        cache.allocator.add_holder(self)

    def __del__(self) -> None:
        for blocks in getattr(self, "_pins", {}).values():
            self.cache.allocator.free(blocks)

    @property
    def num_pinned(self) -> int:
        """Blocks with a pin."""
        return len(self._times)

    def __len__(self) -> int:
        """Pins."""
        return len(self._pins)

    def references(self) -> list[int]:
        """The ids of its blocks, one entry for each reference."""
        return list(self._times.elements())

    def pin(
        self,
        tokens: Any,
        *,
        ttl: float | None = None,
        now: float = 0,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
    ) -> int:
        """Pins the cached blocks of the longest prefix of `tokens`, all of them or none; returns the pin's number.

        ttl  how long from `now` on, at least; None: until `unpin`

        It counts as a look-up. Raises `PoolError` when the blocks would pass the budget, `ValueError` when ttl is below
        0; then nothing is pinned.
        """
        if ttl is not None and not ttl >= 0:
            raise ValueError(f"ttl must be 0 or more, not {ttl}")
        blocks = self.cache.match_prefix(tokens, cache_salt=cache_salt, extra_keys=extra_keys).tolist()
        kept = False
        try:
            pinned = len(self._times.keys() | set(blocks))
            if pinned > self.budget:
                raise PoolError(f"{pinned} blocks would be pinned, the budget is {self.budget}")
            number = next(self._next)
            if ttl is not None:
                heappush(self._due, (now + ttl, number))
            self._pins[number] = blocks
            self._times.update(blocks)
            kept = True
        finally:
            if not kept:
                self.cache.allocator.free(blocks)
        if len(self._due) > 64 + 2 * len(self._pins):
            self._due = [due for due in self._due if due[1] in self._pins]
            heapify(self._due)
        return number

    def unpin(self, pin: int) -> int:
        """Lets a pin go; returns how many of its blocks have none any more. Raises `KeyError` for one that is gone."""
        blocks = self._pins[pin]
        self.cache.allocator.free(blocks)
        del self._pins[pin]
        before = len(self._times)
        self._times.subtract(blocks)
        for block in blocks:
            if not self._times[block]:
                del self._times[block]
        return before - len(self._times)

    def expire(self, now: float) -> int:
        """Lets go every pin whose time has come; returns how many. O(log pins) each."""
        done = 0
        while self._due and self._due[0][0] <= now:
            number = heappop(self._due)[1]
            if number in self._pins:
                self.unpin(number)
                done += 1
        return done

    def check(self) -> None:
        """Raises `PoolError` when one of the equations does not hold."""
        times = Counter(block for blocks in self._pins.values() for block in blocks)
        if times != self._times or len(times) > self.budget:
            raise PoolError(f"{len(times)} blocks have pins, {len(self._times)} are counted, {self.budget} allowed")
        for block in times:
            if self.cache.allocator.ref_count(block) < times[block]:
                raise PoolError(f"block {block} has {times[block]} pins and fewer references")
