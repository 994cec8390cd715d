"""What a kept state is worth, and which is worth the least.

Its value is the tokens that it saves, those from the state before it on, times the times that it will be used: those
counted since, and before any the mean of its kind so far. It is weighed by the byte, and the priority is that of
GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998): the age of the cache is added, so that what was once valuable goes
in the end.

    priority = age when it was used last + uses * saved tokens / (state bytes + 4 * saved tokens)
    age      = the priority of the state dropped last
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TypeAlias

from pagepool.prefix.token_tree import TokenNode

__all__ = ["PRIOR", "TOKEN_BYTES", "Mark", "ValueQueue", "mark_of"]

TOKEN_BYTES = 4
# A kind's mean of uses begins at 1 and moves as if so many states had been used once each before.
PRIOR = 8


class Mark:
    """What the tree has at a position: the slot of the state, and what its priority is made of."""

    __slots__ = ("age", "birth", "priority", "reason", "slot", "uses", "version")

    def __init__(self, slot: int, birth: int, reason: str, uses: float, age: float) -> None:
        self.slot = slot
        self.birth = birth  # of two with one priority, the older goes first
        self.reason = reason
        self.uses = uses
        self.age = age
        self.priority = 0.0
        self.version = 0


Entry: TypeAlias = tuple[float, int, int, TokenNode]  # priority, birth, version


class ValueQueue:
    """Marked nodes by priority. Of the entries of one node, that with the version of its mark counts."""

    def __init__(self, state_bytes: int) -> None:
        self.age = 0.0
        self._state_bytes = state_bytes
        self._heap: list[Entry] = []

    def push(self, node: TokenNode, num_states: int) -> None:
        """Works out the priority anew: after a use, and when the state before it came or went. O(log num_states)."""
        mark, above = mark_of(node), node.above()
        saves = node.end - (above.end if above is not None else 0)
        priority, version = mark.age + self.value(mark.uses, saves), mark.version + 1
        heappush(self._heap, (priority, mark.birth, version, node))
        mark.priority, mark.version = priority, version
        if len(self._heap) > 64 + 4 * num_states:
            self._heap = [entry for entry in self._heap if _is_current(entry)]
            heapify(self._heap)

    def value(self, uses: float, saves: int) -> float:
        """What the state that saves so many tokens is worth by the byte, those of the tokens included."""
        return uses * saves / (self._state_bytes + saves * TOKEN_BYTES)

    def least(self) -> TokenNode | None:
        """The node that goes next; it stays."""
        while self._heap and not _is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def __len__(self) -> int:
        return sum(map(_is_current, self._heap))


def mark_of(node: TokenNode) -> Mark:
    """The mark of a marked node."""
    assert isinstance(node.mark, Mark)
    return node.mark


def _is_current(entry: Entry) -> bool:
    mark = entry[3].mark
    return isinstance(mark, Mark) and (mark.birth, mark.version) == entry[1:3]
