"""The waiting line: one lane per tenant, in the order of rank; the policy chooses among the heads."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from pagepool.scheduling.policies import Policy, View
from pagepool.scheduling.request import Rank, Sequence
from pagepool.scheduling.turns import Turns

__all__ = ["WaitingQueue"]

# Below this many dead entries a sweep is not worth its pass.
SWEEP_FROM = 64


class Lane:
    """The requests of one tenant: `front` is sorted, `rest` a heap, and nothing in the rest is before the front.

    push and pop are O(log n), a removal O(window) amortised: behind the front a removed entry stays until it surfaces,
    or until half of all are dead and one sweep clears them.
    """

    def __init__(self, window: int, live: dict[int, Sequence]) -> None:
        self._window = window
        self._live = live
        self._front: list[Rank] = []
        self._rest: list[Rank] = []
        self._arrivals: list[int] = []
        self.counted: dict[int, Sequence] = {}  # those of whom the quota counts what they need
        self.size = 0

    def push(self, seq: Sequence) -> None:
        """Add a sequence that is live right after."""
        self.size += 1
        if seq._counted:
            self.counted[seq.id] = seq
        heappush(self._arrivals, seq.id)
        if self._front and seq._rank < self._front[-1]:
            insort(self._front, seq._rank)
            if len(self._front) > self._window:
                heappush(self._rest, self._front[-1])
                self._front.pop()
        else:
            heappush(self._rest, seq._rank)

    def heads(self) -> list[Sequence]:
        """The first `window` that are live, in the order of rank; behind them the first one that the quota counts, when
        it is none of these: it may always start, and as long as it does not, it may keep them out."""
        live, front, rest = self._live, self._front, self._rest
        if any(rank[2] not in live for rank in front):
            self._front = front = [rank for rank in front if rank[2] in live]
        while len(front) < self._window and rest:
            rank = rest[0]
            # A removed one that is back may still have its old entry here, which is not before its new one.
            if rank[2] in live and all(rank[2] != other[2] for other in front):
                front.append(rank)
            heappop(rest)  # last: whatever raises, it is not lost
        found = [live[rank[2]] for rank in front]
        if self.counted and not any(seq.id in self.counted for seq in found):
            found += sorted(self._counted(), key=lambda seq: seq._rank)[:1]
        return found

    def oldest(self) -> list[Sequence]:
        """The live one that came first, and the first one that the quota counts."""
        while self._arrivals:
            seq = self._live.get(self._arrivals[0])
            if seq is not None:
                return [seq] if seq.id in self.counted else [seq, *sorted(self._counted(), key=_id)[:1]]
            heappop(self._arrivals)
        return []

    def _counted(self) -> list[Sequence]:
        """Those of `counted` that are live: one whose removal was interrupted is not."""
        return [seq for number, seq in self.counted.items() if number in self._live]

    def removed(self, seq: Sequence) -> None:
        """One of the sequences is no longer live."""
        self.size -= 1
        self.counted.pop(seq.id, None)
        # At once: it may come back before anybody looks, with another rank even, and would stand here twice.
        self._front = [rank for rank in self._front if rank[2] != seq.id]
        if len(self._arrivals) > 2 * self.size + SWEEP_FROM:
            self._rest = [rank for rank in self._rest if rank[2] in self._live]
            heapify(self._rest)
            self._arrivals = [number for number in self._arrivals if number in self._live]
            heapify(self._arrivals)

    def audit(self, line: dict[int, Sequence]) -> str | None:
        """The first equation that does not hold, `line` being the live ones, or None."""
        if self.size != len(line) or not {seq._rank for seq in line.values()} <= {*self._front, *self._rest}:
            return f"{len(line)} requests wait, {self.size} have places"
        if not line.keys() <= set(self._arrivals) or self._front != sorted(self._front):
            return f"the order of {len(line)} requests is broken"
        if self.counted != {number: seq for number, seq in line.items() if seq._counted}:
            return f"{len(self.counted)} requests are counted by the quota"
        return None


class WaitingQueue:
    """Sequences that wait. Invariant: `_live` holds exactly those, and the sizes of the lanes add up to them.

    Nobody starves: one that has waited `max_wait_steps` goes before all that came later, whatever the policy says.
    """

    def __init__(self, policy: Policy, max_wait_steps: int | None) -> None:
        self._policy = policy
        self._max_wait = max_wait_steps
        self.rebuild([])

    def rebuild(self, waiting: list[Sequence]) -> None:
        """Hold exactly `waiting`, whatever stands here."""
        self._live: dict[int, Sequence] = {}
        self._lanes: dict[Any, Lane] = {}
        self._turns = Turns(self._heads)
        self._ages = Turns(self._oldest)
        for seq in waiting:
            self.push(seq)

    def audit(self, waiting: list[Sequence]) -> str | None:
        """The first equation that does not hold, `waiting` being all that do, or None."""
        lines: dict[Any, dict[int, Sequence]] = {}
        for seq in waiting:
            lines.setdefault(seq.tenant, {})[seq.id] = seq
        if self._live != {seq.id: seq for seq in waiting}:
            return f"{len(waiting)} requests wait, {len(self._live)} are in line"
        if self._lanes.keys() != lines.keys():
            return f"requests of {len(lines)} tenants wait, there are lines of {len(self._lanes)}"
        for tenant, line in lines.items():
            broken = self._lanes[tenant].audit(line)
            if broken is not None:
                return f"tenant {tenant!r}: {broken}"
        return None

    def __len__(self) -> int:
        return len(self._live)

    def push(self, seq: Sequence) -> None:
        """Add `seq`, which must not be waiting already."""
        self.changed(seq.tenant)
        lane = self._lanes.get(seq.tenant)
        if lane is None:
            lane = self._lanes[seq.tenant] = Lane(self._policy.window, self._live)
        lane.push(seq)
        self._live[seq.id] = seq  # last: who is live has its place

    def starts(self, seq: Sequence) -> None:
        """The quota is about to count `seq`, which waits until it is removed."""
        self.changed(seq.tenant)
        self._lanes[seq.tenant].counted[seq.id] = seq

    def changed(self, tenant: Any) -> None:
        """Others of the tenant's requests may start than before."""
        self._turns.changed(tenant)
        if self._max_wait is not None:  # nobody asks who is oldest without it
            self._ages.changed(tenant)

    def peek(self, view: View, now: int, may_start: Callable[[Sequence], bool]) -> Sequence | None:
        """The sequence that goes next in step `now`, or None; of those that may start, tenant by tenant."""
        if self._max_wait is not None:
            oldest = self._ages.first(_id, may_start)
            if oldest is not None and self.is_aged(oldest, now):
                return oldest
        key = self._policy.key
        if not self._policy.by_cache:
            return self._turns.first(lambda seq: key(seq, view), may_start)
        grown = view.grown()
        for tenant in self._lanes if grown is None else grown:
            self._turns.changed(tenant)
        bounds = view.bounds
        return self._turns.first(lambda seq: key(seq, bounds), may_start, lambda seq: key(seq, view))

    def is_aged(self, seq: Sequence, now: int) -> bool:
        """True when `seq` has waited so long that nobody who came later may go before it."""
        return self._max_wait is not None and now - seq._arrived >= self._max_wait

    def remove(self, seq: Sequence) -> None:
        """Take out `seq`, wherever it stands. Nothing, if that was done."""
        self.changed(seq.tenant)
        if self._live.pop(seq.id, None) is not None:
            lane = self._lanes[seq.tenant]
            lane.removed(seq)
            if not lane.size:
                del self._lanes[seq.tenant]
        if seq.tenant not in self._lanes:
            self._turns.forget(seq.tenant)
            self._ages.forget(seq.tenant)

    def _heads(self, tenant: Any) -> list[Sequence]:
        lane = self._lanes.get(tenant)
        return [] if lane is None else lane.heads()

    def _oldest(self, tenant: Any) -> list[Sequence]:
        lane = self._lanes.get(tenant)
        return [] if lane is None else lane.oldest()


def _id(seq: Sequence) -> int:
    return seq.id
