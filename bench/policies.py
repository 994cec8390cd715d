"""Eviction policies from papers, for comparison with `gittins`: the cache of `pagepool.reference` runs them.

S3-FIFO and ARC remember evicted nodes as ghosts.
"""

from __future__ import annotations

from typing import Any

from pagepool.reference.policies import Lru, oldest
from pagepool.reference.prefix import POLICIES


class Base(Lru):
    """A policy that forgets ghosts."""

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


class S3Fifo(Base):
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


class Arc(Base):
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


POLICIES.update(arc=Arc, s3fifo=S3Fifo, lfu=Lfu)
