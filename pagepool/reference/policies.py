"""Eviction policies in plain Python: which node a prefix cache evicts first.

The cache calls a policy for each node, from the head of a prefix to its tail: when the node is cached (`insert`), found
by a lookup (`touch`), loses its block (`evicted`), is found in use (`unlink`), or is unused again (`link`). `victim`
returns the node to evict next. Each list is a dict, the oldest node first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

__all__ = ["Lru", "belady_pass"]


def oldest(nodes: dict[Any, None]) -> Any:
    """Return the first key of a dict."""
    return next(iter(nodes))


class Lru:
    """Least recently used. Base class of all policies: it has lists, and knows the list of each node."""

    def __init__(self, capacity: int, num_lists: int = 1) -> None:
        self.capacity = capacity
        self.lists: list[dict[Any, None]] = [{} for _ in range(num_lists)]
        self.place: dict[Any, int] = {}

    def insert(self, node: Any) -> None:
        """Add a node that has got a block."""
        self.move(node, 0)

    def touch(self, node: Any) -> None:
        """Note that a lookup has found the node."""
        self.move(node, 0)

    def refuses(self, node: Any) -> bool:
        """Return true if the node should not be cached. Called before another node is evicted for it."""
        return False

    def victim(self) -> Any:
        """Return the node to evict next, or None."""
        return oldest(self.lists[0]) if self.lists[0] else None

    def evicted(self, node: Any) -> None:
        """Note that the node has lost its block."""
        del self.lists[self.place.pop(node)][node]

    def unlink(self, node: Any) -> None:
        """Remove the node from its list, but remember the list."""
        del self.lists[self.place[node]][node]

    def link(self, node: Any) -> None:
        """Return the node to the recent end of its list."""
        self.lists[self.place[node]][node] = None

    def linked(self) -> Iterable[Iterable[Any]]:
        """Return all lists, for `check`."""
        return self.lists

    def move(self, node: Any, to: int) -> None:
        """Move the node to the recent end of a list."""
        if node in self.place:
            self.lists[self.place[node]].pop(node, None)
        self.place[node] = to
        self.lists[to][node] = None


def belady_pass(ids: Sequence[int], ends: Sequence[int], capacity: int) -> tuple[int, int]:
    """Run the optimal policy, by Belady, which knows all requests in advance. O(n log n).

    `ids` are the block ids of all prompts, one prompt after the other; `ends` is the end of each prompt in them. Return
    the hits in leading blocks, and the evictions. A block that is not cached counts as evicted.

    >>> belady_pass([0, 1, 2, 0, 1, 2], [1, 2, 3, 4, 5, 6], 2)
    (2, 2)
    """
    following: dict[int, int] = {}
    next_use = [0] * len(ids)
    for place in reversed(range(len(ids))):
        next_use[place] = following.get(ids[place], len(ids) + place)
        following[ids[place]] = place
    cached: dict[int, int] = {}
    heap: list[tuple[int, int]] = []  # the farthest next use first; entries of other uses are out of date
    hits = evicted = start = 0
    for end in ends:
        leading = True
        for place in range(start, end):
            block = ids[place]
            if block in cached:
                hits += leading
            else:
                leading = False
                if len(cached) == capacity:
                    evicted += 1
                    while heap and cached.get(heap[0][1]) != -heap[0][0]:
                        heappop(heap)
                    if not heap or -heap[0][0] <= next_use[place]:
                        continue
                    del cached[heappop(heap)[1]]
            cached[block] = next_use[place]
            heappush(heap, (-next_use[place], block))
        start = end
    return hits, evicted
