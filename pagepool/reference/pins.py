"""Pins in plain Python: prefixes of a cache that stay, until a time or until they are let go.

references held == the blocks of all pins, each as often as it has pins        distinct blocks <= budget
"""

from __future__ import annotations

from typing import Any

from pagepool.errors import PoolError

__all__ = ["PrefixPins"]


class PrefixPins:
    """At most `budget` blocks of `cache` pinned at a time.

    >>> from pagepool.reference import BlockAllocator, PrefixCache
    >>> cache = PrefixCache(BlockAllocator(8), block_size=2)
    >>> cache.touch([1, 2, 3, 4, 5, 6])
    0
    >>> pins = PrefixPins(cache, budget=2)
    >>> pins.pin([1, 2, 3, 4], ttl=60.0, now=100.0), cache.evict(8), pins.expire(160.0), cache.evict(8)
    (1, 1, 1, 2)
    """

    kind = "pin"
    label = None

    def __init__(self, cache: Any, budget: int) -> None:
        self.cache = cache
        self.budget = budget
        self._made = 0
        self._pins: dict[int, tuple[float, list[int]]] = {}  # when it ends, its blocks
        cache.allocator.add_owner(self)

    @property
    def num_pinned(self) -> int:
        """Blocks with a pin."""
        return len(set(self.references()))

    def references(self) -> list[int]:
        """The ids of its blocks, one entry for each reference."""
        return [block for _, blocks in self._pins.values() for block in blocks]

    def pin(self, tokens: Any, *, ttl: float | None = None, now: float = 0) -> int:
        """Pins what is cached of a prompt, all of it or none; the pin's number. `PoolError` past the budget."""
        blocks = self.cache.match_prefix(tokens).tolist()
        pinned = len({*self.references(), *blocks})
        if pinned > self.budget:
            self.cache.allocator.free(blocks)
            raise PoolError(f"{pinned} blocks would be pinned, the budget is {self.budget}")
        self._made += 1
        self._pins[self._made] = (float("inf") if ttl is None else now + ttl, blocks)
        return self._made

    def unpin(self, pin: int) -> int:
        """Lets a pin go, the last block first; how many of its blocks have none any more."""
        _, blocks = self._pins.pop(pin)
        self.cache.allocator.free(blocks[::-1])
        return len(set(blocks) - set(self.references()))

    def expire(self, now: float) -> int:
        """Lets go those whose time has come, the earliest first; how many."""
        due = sorted((end, pin) for pin, (end, _) in self._pins.items() if end <= now)
        for _, pin in due:
            self.unpin(pin)
        return len(due)

    def check(self) -> None:
        """Raises `PoolError` when the budget is passed or a block has fewer references than pins."""
        references = self.references()
        if len(set(references)) > self.budget:
            raise PoolError(f"{len(set(references))} blocks have pins, {self.budget} may")
        for block in references:
            if self.cache.allocator.ref_count(block) < references.count(block):
                raise PoolError(f"block {block} has {references.count(block)} pins and fewer references")
