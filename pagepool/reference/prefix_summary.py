"""What a prefix cache holds and has done, in plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagepool.errors import PoolError
from pagepool.reference.floors import CacheFloors
from pagepool.reference.prefix_tree import Node

__all__ = ["CacheSummary"]


class CacheSummary:
    """What can be asked of a prefix cache, and changes nothing: the base of `PrefixCache`."""

    allocator: Any
    policy: str
    evicted: int
    cleared: int
    looked_up: int
    hits: int
    floors: CacheFloors
    _cached: dict[int, Node]
    _held: dict[Node, None]
    _order: Any

    kind = "cache"
    label = None

    def references(self) -> list[int]:
        """The ids of its blocks."""
        return list(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that the cache holds a reference to."""
        return len(self._cached)

    @property
    def inserted(self) -> int:
        """How many blocks were ever cached."""
        return self.num_cached + self.evicted + self.cleared

    @property
    def evictable(self) -> int:
        """Cached blocks that nobody else holds."""
        return sum(not self._in_use(node) for node in self._cached.values())

    def holds(self, block: int) -> bool:
        """Whether the block is cached."""
        return block in self._cached

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are cached."""
        return sum(block in self._cached for block in blocks)

    def count_outside(self, states: Iterable[Any]) -> int:
        """How many different blocks these sequences hold that are not cached."""
        return len({block for state in states for block in state.blocks} - set(self._cached))

    def stats(self) -> dict[str, Any]:
        """What it holds and has done, as a dict."""
        return {
            "policy": self.policy,
            "cached": self.num_cached,
            "evictable": self.evictable,
            "looked_up": self.looked_up,
            "hits": self.hits,
            "inserted": self.inserted,
            "evicted": self.evicted,
            "cleared": self.cleared,
        }

    def check(self) -> None:
        """Raises `PoolError` when one of the invariants above is broken."""
        for block, node in self._cached.items():
            if node.block != block or self.allocator.ref_count(block) < 1:
                raise PoolError(f"block {block} is cached at a node that has block {node.block}, or it is free")
        linked = [node for nodes in self._order.linked() for node in nodes if node.block is not None]
        if sorted(map(id, [*linked, *self._held, *self.floors.aside()])) != sorted(map(id, self._cached.values())):
            raise PoolError(f"{len(linked)} nodes are in the policy, {len(self._held)} held, not {self.num_cached}")

    def _in_use(self, node: Node) -> bool:
        return bool(self.allocator.ref_count(node.block) > 1)
