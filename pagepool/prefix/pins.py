"""PrefixPins: prefixes that stay cached, until a time or until they are let go, within a budget of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from pagepool.arguments import integer, real
from pagepool.errors import PoolError, refuse_copy
from pagepool.memory.block_refs import BlockRefs, block_refs
from pagepool.prefix.cache import PrefixCache

__all__ = ["PrefixPins"]


class PrefixPins:
    """Keeps prefixes of a cache from being evicted: a pin holds one reference to each block of its prefix.

    cache   the `PrefixCache` whose prefixes are pinned
    budget  the most blocks that may be pinned at a time; a block counts once, however many pins it has

    It reads no clock: `ttl` and `now` are the caller's numbers, in any one unit. A pinned block counts as in use. Pins
    outlast `reset_prefix_cache`; dropping the object drops its pins. One thread at a time may use it. Raises
    `ValueError` when the budget is below 0.

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

    __reduce__ = refuse_copy

    def __init__(self, cache: PrefixCache, budget: int) -> None:
        self.cache = cache
        self.budget = integer("budget", budget, low=0)
        self._pins: dict[int, tuple[BlockRefs, list[int]]] = {}
        self._times: dict[int, int] = {}  # how many pins a block has
        self._due: list[tuple[Any, int]] = []  # a heap of ends and pins; those let go before are passed over
        self._next = count(1)
        cache.allocator.add_owner(self)

    def __del__(self) -> None:
        for held, _ in getattr(self, "_pins", {}).values():
            held.give_back()

    @property
    def num_pinned(self) -> int:
        """Blocks with a pin."""
        return len(self._times)

    def __len__(self) -> int:
        """Pins."""
        return len(self._pins)

    def references(self) -> list[int]:
        """The ids of its blocks, one entry for each reference."""
        pins = list(self._pins.values())  # at once: other threads ask while a pin is made or dropped
        return [block for _, blocks in pins for block in blocks]

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
        if ttl is not None:
            ttl = real("ttl", ttl, low=0)
        now = real("now", now)
        if len(self._due) > 64 + 2 * len(self._pins):
            self._due = [due for due in self._due if due[1] in self._pins]
            heapify(self._due)
        held = block_refs(self.cache.allocator)
        try:
            blocks = held.match_prefix(self.cache, tokens, cache_salt=cache_salt, extra_keys=extra_keys).tolist()
            times = self._times.copy()
            for block in blocks:
                times[block] = times.get(block, 0) + 1
            if len(times) > self.budget:
                raise PoolError(f"{len(times)} blocks would be pinned, the budget is {self.budget}")
            number = next(self._next)
            if ttl is not None:
                heappush(self._due, (now + ttl, number))
            self._pins[number] = held, blocks
            self._times = times
        except BaseException:
            held.give_back()
            raise
        return number

    def unpin(self, pin: int) -> int:
        """Drops a pin; returns how many of its blocks no pin holds any more. Raises `KeyError` for a dropped pin."""
        held, blocks = self._pins[pin]
        times = self._times
        gone, each = len([block for block in blocks if times[block] == 1]), iter(blocks)
        held.give_back()  # from here on nothing wants memory
        for block in each:
            if times[block] == 1:
                del times[block]
            else:
                times[block] -= 1
        del self._pins[pin]
        return gone

    def expire(self, now: float) -> int:
        """Drops every pin whose time has ended by `now`; returns how many. O(log pins) each.

        Raises `ValueError` when `now` is no number."""
        now = real("now", now)
        done = 0
        while self._due and self._due[0][0] <= now:
            number = self._due[0][1]
            if number in self._pins:
                self.unpin(number)  # first: one that raises is due still
                done += 1
            heappop(self._due)
        return done

    def check(self) -> None:
        """Raises `PoolError` when one of the equations does not hold."""
        times = Counter(block for _, blocks in self._pins.values() for block in blocks)
        if times != self._times or len(times) > self.budget:
            raise PoolError(f"{len(times)} blocks have pins, {len(self._times)} are counted, {self.budget} allowed")
        for block in times:
            if self.cache.allocator.ref_count(block) < times[block]:
                raise PoolError(f"block {block} has {times[block]} pins and fewer references")
