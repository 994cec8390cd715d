"""What each group of cached blocks keeps when others need room, in plain Python.

`spared[g]` are nodes beside the lists of the policy, in the order in which they came. A node is spared when it is the
policy's victim while its group has no more cached blocks than it has reserved. When the group has more, the first of
these goes before all others.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["CacheReservations"]


class CacheReservations:
    """`PrefixCache.reservations`. `cache` is the `PrefixCache`; `groups` has the group of each cached block."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._least: Counter[int] = Counter()
        self.clear()

    def set(self, group: int, blocks: int) -> None:
        """Reserves `blocks` for `group` from now on."""
        if blocks < 0:
            raise ValueError(f"a reservation must be 0 blocks or more, not {blocks}")
        self._least[_checked(group)] = blocks

    def get(self, group: int) -> int:
        """The reservation of `group`."""
        return self._least[_checked(group)]

    def cached(self, group: int) -> int:
        """How many blocks of `group` are cached, in use or not."""
        return self._counts[_checked(group)]

    def evictable(self, group: int = 0) -> int:
        """What `evict` could free now, for `group`."""
        return int(self._cache.evictable) - sum(
            self.protected(other) for other, least in self._least.items() if least and other != group
        )

    def protected(self, group: int) -> int:
        """How many of them are of `group` and spared when others need room."""
        idle: int = sum(
            other == group and self._cache.allocator.ref_count(block) == 1 for block, other in self.groups.items()
        )
        return max(0, min(idle, self.get(group) - (self.cached(group) - idle)))

    def clear(self) -> None:
        """Forget all blocks; reservations stay."""
        self.groups: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self.spared: dict[int, dict[Any, None]] = {}

    def add(self, block: int, group: int) -> None:
        """A block is cached."""
        self.groups[block] = group
        self._counts[group] += 1

    def remove(self, block: int) -> None:
        """A block is cached no more."""
        self._counts[self.groups.pop(block)] -= 1

    def replace(self, old: int, block: int) -> None:
        """A cached block is another one from now on."""
        self.groups[block] = self.groups.pop(old)

    def protects(self, node: Any, group: int) -> bool:
        """Whether the block of `node` is not for a request of `group`."""
        own = self.groups[node.block]
        return self.cached(own) <= self._least[own] and own != group

    def surplus(self) -> Any:
        """The first node that was spared and need not be any more, or None."""
        for group in sorted(self.spared):
            if self.spared[group] and self.cached(group) > self._least[group]:
                return next(iter(self.spared[group]))
        return None

    def last_resort(self, group: int) -> Any:
        """When the policy has none: the first node that is spared, but not from its own group, or None."""
        return next(iter(self.spared.get(group, ())), None)

    def spare(self, node: Any) -> None:
        """Put aside `node`, which is in no list."""
        self.spared.setdefault(self.groups[node.block], {})[node] = None

    def take_back(self, node: Any) -> bool:
        """Whether `node` was put aside; it is no longer."""
        for nodes in self.spared.values():
            if node in nodes:
                del nodes[node]
                return True
        return False

    def aside(self) -> list[Any]:
        """All nodes that are spared."""
        return [node for nodes in self.spared.values() for node in nodes]


def _checked(group: int) -> int:
    if not 0 <= group < 255:
        raise ValueError(f"a group must be from 0 to 254, not {group}")
    return group
