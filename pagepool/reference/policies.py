"""Eviction policies in plain Python: which node a prefix cache evicts first.

The cache calls a policy for each node, from the head of a prefix to its tail: when the node is cached (`insert`), found
by a lookup (`touch`), loses its block (`evicted`), is found in use (`unlink`), or is unused again (`link`). `victim`
returns the node to evict next. Each list is a dict, the oldest node first. S3-FIFO and ARC remember evicted nodes as
ghosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

__all__ = ["Arc", "Lfu", "Lru", "S3Fifo", "belady_pass"]


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

    def forget_oldest(self, index: int) -> None:
        """Drop the oldest ghost of a list."""
        node = oldest(self.lists[index])
        del self.lists[index][node], self.place[node]


class Lfu(Lru):
    """Least frequently used, then least recently used. One list per number of uses; the last is for 255 and more."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 256)

    def insert(self, node: Any) -> None:
        self.move(node, 1)

    def touch(self, node: Any) -> None:
        self.move(node, min(255, self.place[node] + 1))

    def victim(self) -> Any:
        return next((oldest(nodes) for nodes in self.lists if nodes), None)


class S3Fifo(Lru):
    """A small queue, a main queue, and the ghosts of the small queue. Uses are counted up to 3."""

    SMALL, MAIN, GHOST = range(3)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 3)
        self.uses: dict[Any, int] = {}

    def insert(self, node: Any) -> None:
        self.uses[node] = 0
        self.move(node, self.MAIN if node in self.lists[self.GHOST] else self.SMALL)

    def touch(self, node: Any) -> None:
        self.uses[node] = min(3, self.uses[node] + 1)

    def victim(self) -> Any:
        small, main = self.lists[self.SMALL], self.lists[self.MAIN]
        while small or main:
            if small and (not main or 10 * len(small) >= len(small) + len(main)):
                node = oldest(small)
                if self.uses[node] <= 1:
                    return node
                self.uses[node] = 0
            else:
                node = oldest(main)
                if self.uses[node] == 0:
                    return node
                self.uses[node] -= 1
            self.move(node, self.MAIN)
        return None

    def evicted(self, node: Any) -> None:
        if node in self.lists[self.MAIN]:
            super().evicted(node)
            return
        self.move(node, self.GHOST)
        if len(self.lists[self.GHOST]) > self.capacity - self.capacity // 10:
            self.forget_oldest(self.GHOST)


class Arc(Lru):
    """Balances nodes used once against nodes used again. A lookup of a ghost changes the target size of the first."""

    RECENT, FREQUENT, RECENT_GHOSTS, FREQUENT_GHOSTS = range(4)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 4)
        self.target = 0

    def insert(self, node: Any) -> None:
        recent, frequent = len(self.lists[self.RECENT_GHOSTS]), len(self.lists[self.FREQUENT_GHOSTS])
        if node in self.lists[self.RECENT_GHOSTS]:
            self.target = min(self.capacity, self.target + max(1, frequent // recent))
        elif node in self.lists[self.FREQUENT_GHOSTS]:
            self.target = max(0, self.target - max(1, recent // frequent))
        self.move(node, self.FREQUENT if node in self.place else self.RECENT)
        self.trim()

    def touch(self, node: Any) -> None:
        self.move(node, self.FREQUENT)

    def victim(self) -> Any:
        recent, frequent = self.lists[self.RECENT], self.lists[self.FREQUENT]
        if recent and (len(recent) > self.target or not frequent):
            return oldest(recent)
        return oldest(frequent) if frequent else None

    def evicted(self, node: Any) -> None:
        self.move(node, self.RECENT_GHOSTS if self.place[node] == self.RECENT else self.FREQUENT_GHOSTS)
        self.trim()

    def trim(self) -> None:
        """Forget ghosts: RECENT and its ghosts have at most `capacity` nodes, all four lists at most twice as many."""
        recent, _, recent_ghosts, frequent_ghosts = self.lists
        while recent_ghosts and len(recent) + len(recent_ghosts) > self.capacity:
            self.forget_oldest(self.RECENT_GHOSTS)
        while frequent_ghosts and sum(map(len, self.lists)) > 2 * self.capacity:
            self.forget_oldest(self.FREQUENT_GHOSTS)


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
