"""The active sequences and whose turn it is."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from pagepool.scheduling.request import Rank, SeqState, Sequence

__all__ = ["ActiveSequences"]

FINISHED = SeqState.FINISHED
PREFILLING = SeqState.PREFILLING
# Below this many that have finished a sweep is not worth its pass.
SWEEP_FROM = 64


class ActiveSequences:
    """Active sequences in a ring: the head has waited longest. A step takes its sequences from the head and puts them
    back at the tail, prefills and decodes alike, with one exception: the oldest prefill has a place in every step
    (in every second one when a step has a single place).

    Why nobody waits longer than 2 * ceil(n / P) steps, with n active sequences and P places: whoever was just
    scheduled has at most n - 1 others ahead, and newcomers join behind. The reserved place costs the ring at most one
    place a step, so with P >= 2 at least P - 1 >= P / 2 leave the head in each step, with P = 1 one in every two steps.
    The last of n is reached after at most ceil(2 n / P) <= 2 * ceil(n / P) steps.

    Cost: a turn is O(places); a sequence that finishes stays in the ring, counted in `_gone`, until it reaches the head
    or the ring is swept, so leaving is O(log n). Preemption, which is rare, removes at once: a preempted sequence
    comes back, and must not find its old entry.

    Invariants: `len(_ring) - _gone == len(_ranks) == size`; `num_prefills` of them are PREFILLING; over those,
    `unread` is the sum of the tokens that they still have to read, and `promised` that of the blocks which these need;
    `reserved` is the sum, over all, of the blocks that they may ever need.
    """

    def __init__(self, blocks_for: Callable[[int], int]) -> None:
        self._ring: deque[Sequence] = deque()
        self._gone = 0
        self._prefills: deque[Sequence] = deque()
        self._ranks: list[Rank] = []
        self._taken: list[Sequence] = []
        self._prefill_turn = True
        self._blocks_for = blocks_for
        self.size = 0
        self.num_gone = 0  # how many have left so far
        self.num_prefills = 0
        self.unread = 0
        self.promised = 0
        self.reserved = 0

    def add(self, seq: Sequence) -> None:
        """Put `seq`, about to be PREFILLING, at the tail; or, where memory ends, leave all as it is."""
        if self._gone > self.size + SWEEP_FROM:
            self._sweep()  # steps of a cohort take nobody out of the ring
        size, reserved = self.size + 1, self.reserved + self._blocks_for(seq.max_tokens)
        num_prefills, (unread, promised) = self.num_prefills + 1, self._owed(seq)
        unread, promised = self.unread + unread, self.promised + promised
        insort(self._ranks, seq._rank)
        try:
            self._ring.append(seq)
            self._prefills.append(seq)
        except BaseException:
            self._ranks.remove(seq._rank)
            if self._ring and self._ring[-1] is seq:
                self._ring.pop()
            raise
        self.size, self.reserved = size, reserved
        self.num_prefills, self.unread, self.promised = num_prefills, unread, promised

    def leave(self, seq: Sequence) -> None:
        """Drop `seq`, which finishes: the caller sets its state to FINISHED right after."""
        self._unrank(seq)
        self._gone += 1

    def preempt(self, seq: Sequence) -> None:
        """Drop `seq`, which may come back."""
        self._unrank(seq)
        self._ring.remove(seq)
        # Also when it decodes: its entry from before may not have been swept yet.
        self._prefills = deque(other for other in self._prefills if other is not seq)

    def read(self, seq: Sequence, count: int) -> None:
        """Count `count` more tokens of a prefill as fed; after the last it decodes."""
        before = seq._fed
        seq._fed = after = before + count
        self.unread -= count
        self.promised -= self._blocks_for(after) - self._blocks_for(before)
        if after == seq._prefill_end:
            seq.state = SeqState.DECODING
            self.num_prefills -= 1

    def by_rank(self) -> list[int]:
        """The ids of all, the least rank first: the last is the first to give way."""
        return [rank[-1] for rank in self._ranks]

    def prefills(self) -> list[Sequence]:
        """All that are PREFILLING, in the order of admission."""
        if not self.num_prefills:
            return []
        if len(self._prefills) != self.num_prefills:
            self._prefills = deque(seq for seq in self._prefills if seq.state is PREFILLING)
        return list(self._prefills)

    def take_all(self) -> list[Sequence]:
        """Everyone, for a step that holds them all; the order of the ring does not matter then."""
        if self._gone:
            self._sweep()
        return list(self._ring)

    def take(self, places: int) -> list[Sequence]:
        """The next `places` sequences (fewer than are active), taken out of the ring until `put_back`; the oldest
        prefill first."""
        reserved = self._oldest_prefill()
        if reserved is not None and places == 1 and not self._prefill_turn:
            reserved = None
        taken: list[Sequence] = []
        self._taken = taken  # from the first one on: whoever is in neither has just left the head
        while len(taken) < places:
            seq = self._ring.popleft()
            if seq.state is FINISHED:
                self._gone -= 1
            else:
                taken.append(seq)
        if reserved is None:
            return taken
        if reserved not in taken:
            # The last one stands back; the reserved prefill keeps its place in the ring as well.
            self._ring.appendleft(taken.pop())
        return [reserved, *(seq for seq in taken if seq is not reserved)]

    def put_back(self, scheduled: bool) -> None:
        """End a `take`: at the tail when the step was scheduled, at the head when it was not."""
        if scheduled:
            self._ring.extend(self._taken)
            self._prefill_turn = not self._prefill_turn
        else:
            self._ring.extendleft(reversed(self._taken))
        self._taken = []

    def rebuild(self, active: list[Sequence]) -> None:
        """Hold exactly `active`, whatever stands here: in the order of the ring, in front of it who was being taken."""
        found = {seq.id: seq for seq in active}
        line = [seq for seq in (*self._taken, *self._ring) if seq.id in found]
        missing = found.keys() - {seq.id for seq in line}
        ring = {seq.id: seq for seq in ([found[number] for number in sorted(missing)] + line)}
        first = {seq.id: seq for seq in (*self._prefills, *ring.values()) if seq.state is PREFILLING and seq.id in ring}
        self._ring, self._taken, self._gone = deque(ring.values()), [], 0
        self._prefills = deque(first.values())
        self._ranks = sorted(seq._rank for seq in active)
        self.size, self.num_prefills, self.unread, self.promised, self.reserved = self._sums(active)

    def audit(self, active: list[Sequence]) -> str | None:
        """The first equation that does not hold, `active` being all that are, or None."""
        numbers = sorted(seq.id for seq in active)
        sums = (self.size, self.num_prefills, self.unread, self.promised, self.reserved)
        if sorted(seq.id for seq in self._ring if seq.state is not FINISHED) != numbers or self._taken:
            return f"{len(active)} sequences are active, {len(self._ring) - self._gone} in the ring"
        if len(self._ring) - self._gone != self.size or self._ranks != sorted(seq._rank for seq in active):
            return f"{self.size} sequences have {len(self._ranks)} ranks, {self._gone} of {len(self._ring)} have gone"
        if {seq.id for seq in active if seq.state is PREFILLING} - {seq.id for seq in self._prefills}:
            return f"of {self.num_prefills} prefills {len(self._prefills)} are in line"
        if sums != self._sums(active):
            return f"size, prefills, unread, promised and reserved are {self._sums(active)}, not {sums}"
        return None

    def _sums(self, active: list[Sequence]) -> tuple[int, int, int, int, int]:
        owed = [self._owed(seq) for seq in active if seq.state is PREFILLING]
        reserved = sum(self._blocks_for(seq.max_tokens) for seq in active)
        return len(active), len(owed), sum(unread for unread, _ in owed), sum(needed for _, needed in owed), reserved

    def _sweep(self) -> None:
        self._ring = deque(seq for seq in self._ring if seq.state is not FINISHED)
        self._gone = 0

    def _oldest_prefill(self) -> Sequence | None:
        line = self._prefills
        while line and line[0].state is not PREFILLING:
            line.popleft()
        return line[0] if line else None

    def _owed(self, seq: Sequence) -> tuple[int, int]:
        """Tokens that `seq` still has to read, and the blocks that these need."""
        return seq._prefill_end - seq._fed, self._blocks_for(seq._prefill_end) - self._blocks_for(seq._fed)

    def _unrank(self, seq: Sequence) -> None:
        del self._ranks[bisect_left(self._ranks, seq._rank)]
        self.size -= 1
        self.num_gone += 1
        self.reserved -= self._blocks_for(seq.max_tokens)
        if seq.state is PREFILLING:
            self.num_prefills -= 1
            unread, promised = self._owed(seq)
            self.unread -= unread
            self.promised -= promised
