"""The best that any eviction policy could do, with all requests known in advance, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["belady_pass"]


def belady_pass(ids: Sequence[int], ends: Sequence[int], capacity: int) -> tuple[int, int]:
    """Hits in the leading runs of the prompts, and evictions; a block that does not come in counts as evicted.

    >>> belady_pass([0, 1, 2, 0, 1, 2], [1, 2, 3, 4, 5, 6], 2)
    (2, 2)
    """
    following: dict[int, int] = {}
    next_use = [0] * len(ids)
    for place in reversed(range(len(ids))):
        next_use[place] = following.get(ids[place], len(ids) + place)
        following[ids[place]] = place
    cached: dict[int, int] = {}
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
                    farthest = max(cached, key=cached.__getitem__, default=None)
                    if farthest is None or cached[farthest] <= next_use[place]:
                        continue
                    del cached[farthest]
            cached[block] = next_use[place]
        start = end
    return hits, evicted
