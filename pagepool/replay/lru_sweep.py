"""LRU at every capacity in one pass, by stack distances.

A block is in an LRU cache of C blocks exactly when its stack distance is at most C: itself and the number of different
blocks touched since its last touch (Mattson et al., "Evaluation techniques for storage hierarchies", 1970). A prompt
touches its blocks from head to tail, so a block is a hit when the largest distance from the head to it is at most C.

The stack has an entry per prompt, not per block. Blocks that the same prompt touched last form one part of the stack.
Block ids form a tree, so a later prompt removes blocks from a part beginning at its head:

    newest  | prompt 9: all its blocks | prompt 7: the tail that 9 did not touch | prompt 4: ... |  oldest
    weights[p]  blocks in the part of prompt p        last[block]  the prompt with the block in its part, or -1

When a prompt touches k blocks of one part, each block leaves the part and joins the top. So all k blocks have the same
distance: blocks in newer parts + blocks in this part + blocks that the prompt has touched before. A part of any size
costs one query of a Fenwick tree over prompts.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagepool.replay.prompts import Prompts

__all__ = ["LruSweep", "NotSwept"]

# The sweep needs arrays over all ids. It refuses more than SPARSE ids per block of a prompt, plus FEW.
SPARSE = 4
FEW = 1 << 16


class NotSwept(Exception):
    """The ids do not form a tree (a block follows different blocks in different prompts), or they are too sparse."""


class LruSweep:
    """Hits, misses and evictions of LRU for any capacity, from one pass over `prompts`.

    Raises `NotSwept` for ids that do not form a tree: a cache would distinguish their blocks, but the sweep cannot.

    Attributes
    ----------
    touches : int
        Number of blocks of all prompts.
    leading : Counter
        Number of leading blocks by their largest distance from the head. Gives the hits.
    distances : ndarray of int64
        The sorted keys of `leading`.
    """

    def __init__(self, prompts: Prompts) -> None:
        self.touches = 0
        self.leading: Counter[int] = Counter()
        self._all: Counter[int] = Counter()
        self._weights = _Fenwick(len(prompts))
        self._run(prompts)
        self.distances = np.array(sorted(self.leading), np.int64)
        self._hits = np.cumsum([self.leading[distance] for distance in self.distances.tolist()], dtype=np.int64)

    def hits(self, capacity: int | None) -> int:
        """Return the number of leading blocks that a cache of `capacity` blocks finds. None: unlimited."""
        place = len(self._hits) if capacity is None else int(np.searchsorted(self.distances, capacity, "right"))
        return int(self._hits[place - 1]) if place else 0

    def misses(self, capacity: int | None) -> int:
        """Return the number of touched blocks that are not in the cache."""
        found = sum(count for distance, count in self._all.items() if capacity is None or distance <= capacity)
        return self.touches - found

    def evictions(self, capacity: int | None) -> int:
        """Return the number of evictions: all missed blocks are cached, and all but `capacity` are evicted again."""
        return max(0, self.misses(capacity) - capacity) if capacity else 0

    def _run(self, prompts: Prompts) -> None:
        first, size = prompts.id_ranges()
        if size > SPARSE * prompts.most_ids + FEW:
            raise NotSwept
        # The previous block of each block: its id + 2, or 1 at the head of a prompt, or 0 if the block was never seen.
        last, parent = np.full(size, -1, np.int32), np.zeros(size, np.int64)
        for prompt, (ids, session) in enumerate(prompts):
            blocks = ids + np.int64(first[session])
            above = np.ones(len(blocks), np.int64)
            above[1:] = blocks[:-1] + 2
            known = parent[blocks]
            parent[blocks] = above
            # The second condition is true if a block is in this prompt twice.
            if np.any((known != 0) & (known != above)) or np.any(parent[blocks] != above):
                raise NotSwept
            self._touch(last[blocks])
            last[blocks] = prompt
            self._weights.add(prompt, len(blocks))
            self.touches += len(blocks)

    def _touch(self, parts: NDArray[np.int32]) -> None:
        """Count the blocks of one prompt. `parts` has the part of the stack of each block."""
        weights, largest, leads = self._weights, 0, True
        borders = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
        for start, end in pairwise(borders):
            if start == end:
                return
            part = int(parts[start])
            if part < 0:
                leads = False
                continue
            distance = weights.from_on(part) + start
            weights.add(part, start - end)
            self._all[distance] += end - start
            largest = max(largest, distance)
            if leads:
                self.leading[largest] += end - start


class _Fenwick:
    """A Fenwick tree: change a weight, or sum the weights from an index on, in O(log n)."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self._total = 0

    def add(self, index: int, weight: int) -> None:
        self._total += weight
        index += 1
        while index < len(self._sums):
            self._sums[index] += weight
            index += index & -index

    def from_on(self, index: int) -> int:
        """Return the sum of the weights at `index` and above."""
        below = 0
        while index:
            below += self._sums[index]
            index &= index - 1
        return self._total - below
