"""LRU at every capacity in one pass, by stack distances.

A block is in an LRU cache of C blocks exactly when fewer than C others were touched since it was: its distance, itself
counted, is at most C (Mattson and others, "Evaluation techniques for storage hierarchies", 1970). A prompt touches its
blocks from head to tail, so that a block counts as hit when the largest distance from the head down to it is at most C.

The stack is kept by prompts, not by blocks. The blocks that were touched last by the same prompt lie side by side, and
because block ids form a tree, a later prompt takes them away from their head on:

    newest  | prompt 9: all its blocks | prompt 7: the tail that 9 did not touch | prompt 4: ... |  oldest
    weights[p]  blocks in the part of prompt p        last[block]  the prompt whose part has it, -1 for none

While a prompt takes k blocks of one part, each block taken is one fewer in the part and one more on top: all k are at
the same distance, the blocks in newer parts + those in this one + those that the prompt has touched already. So a part
costs one query of a Fenwick tree over prompts, however many blocks it has.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagepool.replay.prompts import Prompts

__all__ = ["LruSweep", "NotSwept"]

# Ids so sparse that an array over all of them would be longer than this many times the blocks of all prompts, and a
# little more, are left to the cache.
SPARSE = 4
FEW = 1 << 16


class NotSwept(Exception):
    """The ids form no tree, as a block follows different blocks in different prompts, or are too sparse."""


class LruSweep:
    """Hits, misses and evictions of LRU for any capacity, from one pass over `prompts`.

    Raises `NotSwept` for ids that do not form a tree, which the cache would tell apart and this pass would not.

    touches    blocks given
    distances  leading full blocks by the largest distance from the head down to them: what the hits are read from
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
        """Full blocks in the leading runs that a cache of that many blocks finds; None: unlimited."""
        place = len(self._hits) if capacity is None else int(np.searchsorted(self.distances, capacity, "right"))
        return int(self._hits[place - 1]) if place else 0

    def misses(self, capacity: int | None) -> int:
        """Blocks, full or not, that it does not have when they are touched."""
        found = sum(count for distance, count in self._all.items() if capacity is None or distance <= capacity)
        return self.touches - found

    def evictions(self, capacity: int | None) -> int:
        """Every block missed is cached, and what does not stay has been evicted. A cache without room caches none."""
        return max(0, self.misses(capacity) - capacity) if capacity else 0

    def _run(self, prompts: Prompts) -> None:
        first, size = prompts.id_ranges()
        if size > SPARSE * prompts.most_ids + FEW:
            raise NotSwept
        # What a block follows: 0 while it was not seen, 1 at the head of a prompt, else the block before it + 2.
        last, parent = np.full(size, -1, np.int32), np.zeros(size, np.int64)
        for prompt, (ids, full, session) in enumerate(prompts):
            blocks = ids + np.int64(first[session])
            above = np.ones(len(blocks), np.int64)
            above[1:] = blocks[:-1] + 2
            known = parent[blocks]
            parent[blocks] = above
            # The second holds where a block is twice in this prompt.
            if np.any((known != 0) & (known != above)) or np.any(parent[blocks] != above):
                raise NotSwept
            self._touch(last[blocks], full)
            last[blocks] = prompt
            self._weights.add(prompt, len(blocks))
            self.touches += len(blocks)

    def _touch(self, parts: NDArray[np.int32], full: int) -> None:
        """Counts the blocks of one prompt, each given as the part of the stack that has it."""
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
            if leads and start < full:
                self.leading[largest] += min(end, full) - start


class _Fenwick:
    """Weights by index, and their sum from an index on, in O(log n) each."""

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
        """The sum of the weights at `index` and above."""
        below = 0
        while index:
            below += self._sums[index]
            index &= index - 1
        return self._total - below
