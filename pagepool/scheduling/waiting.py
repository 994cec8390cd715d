"""The waiting line: a heap by rank whose removed entries are skipped when they surface."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from pagepool.scheduling.policy import rank
from pagepool.scheduling.request import Sequence

__all__ = ["WaitingQueue"]

# Below this many dead entries a sweep is not worth its pass.
SWEEP_FROM = 64


class WaitingQueue:
    """Sequences that wait, best rank first.

    push and pop are O(log n), remove O(1) amortised: a removed entry stays in the heap until it surfaces, or until half
    of the heap is dead and one sweep clears it. Invariant: `_live` holds exactly those that wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._live: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def push(self, seq: Sequence) -> None:
        """Add `seq`, which must not be waiting already."""
        self._live[seq.id] = seq
        heappush(self._heap, rank(seq))

    def peek(self) -> Sequence | None:
        """The sequence that goes next, or None."""
        heap = self._heap
        while heap:
            seq = self._live.get(heap[0][1])
            if seq is not None:
                return seq
            heappop(heap)
        return None

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` showed."""
        seq = self.peek()
        if seq is None:
            raise IndexError("pop from an empty waiting queue")
        heappop(self._heap)
        del self._live[seq.id]
        return seq

    def remove(self, seq: Sequence) -> None:
        """Take out `seq`, wherever it stands."""
        del self._live[seq.id]
        if len(self._heap) > 2 * len(self._live) + SWEEP_FROM:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapify(self._heap)
