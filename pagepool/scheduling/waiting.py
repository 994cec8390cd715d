"""The waiting queue: a line of requests for each tenant. The policy chooses among the heads of all lines."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from pagepool.scheduling.policies import Facts, Policy
from pagepool.scheduling.request import Rank, SeqState, Sequence, by_rank

__all__ = ["WaitingQueue"]

# Sweep a heap only if it has at least this number of dead entries.
SWEEP_FROM = 64


class Line:
    """The requests of one tenant, `live`, by id. `counted` has the requests that the tenant's quota already counts.

    `_ranks` is a heap of all ranks. A request that leaves is removed from it when it comes to its top. A push costs
    O(log n), a removal O(1) amortised.
    """

    def __init__(self) -> None:
        self.live: dict[int, Sequence] = {}
        self.counted: dict[int, Sequence] = {}
        self._ranks: list[Rank] = []

    def push(self, seq: Sequence) -> None:
        self.live[seq.id] = seq
        if seq._counted:
            self.counted[seq.id] = seq
        heappush(self._ranks, seq._rank)

    def remove(self, seq: Sequence) -> None:
        del self.live[seq.id]
        self.counted.pop(seq.id, None)
        if len(self._ranks) > 2 * len(self.live) + SWEEP_FROM:
            self._ranks = sorted(seq._rank for seq in self.live.values())

    def heads(self) -> list[Sequence]:
        """Return the first request by rank, and the first counted request.

        The quota never blocks a counted request, but may block all other requests until that one starts.
        """
        while (first := self.live.get(self._ranks[0][-1])) is None:
            heappop(self._ranks)
        found = [first]
        if self.counted and first.id not in self.counted:
            found.append(min(self.counted.values(), key=by_rank))
        return found

    def ranks(self) -> set[Rank]:
        """Return the ranks of the live requests with an entry."""
        return {*self._ranks} & {seq._rank for seq in self.live.values()}


class Followers:
    """The requests that are deferred until `leader` has processed the tokens that they share with it, by id.

    Each one shares at least `least` tokens.
    """

    def __init__(self, leader: Sequence) -> None:
        self.leader = leader
        self.members: dict[int, Sequence] = {}
        self.least = 0

    def add(self, seq: Sequence, until: int) -> None:
        self.least = min(self.least, until) if self.members else until
        self.members[seq.id] = seq


class TenantHeap:
    """A heap of the best candidate of every tenant. Only changed tenants are evaluated again.

    Keys never fall, but they can grow at any time, like the counter of a tenant. An entry with an old key is updated
    when it reaches the top. A tenant without changes costs nothing.

    Invariant: for every tenant that is not in `_changed`, the candidate with the least key that may start has its entry
    in `_entries` and in `_heap`. An entry of `_heap` that is not in `_entries` is dead.
    """

    def __init__(self, candidates: Callable[[Any], list[Sequence]]) -> None:
        self._candidates = candidates
        self._heap: list[tuple[Any, Sequence]] = []
        self._entries: dict[Any, tuple[Any, Sequence]] = {}
        self._changed: dict[Any, None] = {}

    def change(self, tenant: Any) -> None:
        """Mark a tenant as changed: its line has changed, or other requests of it may start."""
        self._changed[tenant] = None

    def forget(self, tenant: Any) -> None:
        """Drop a tenant without requests."""
        self._entries.pop(tenant, None)
        self._changed.pop(tenant, None)
        self._sweep()

    def first(self, key: Callable[[Sequence], Any], may_start: Callable[[Sequence], bool]) -> Sequence | None:
        """Return the candidate with the least key that may start, or None."""
        while True:
            for tenant in self._changed:
                self._ask(tenant, key, may_start)
            self._changed.clear()
            self._sweep()
            if not self._heap:
                return None
            entry = self._heap[0]
            seq = entry[1]
            if self._entries.get(seq.tenant) is not entry:
                heappop(self._heap)
            elif key(seq) == entry[0]:
                return seq
            else:
                self.change(seq.tenant)

    def _ask(self, tenant: Any, key: Callable[[Sequence], Any], may_start: Callable[[Sequence], bool]) -> None:
        entries = [(key(seq), seq) for seq in self._candidates(tenant) if may_start(seq)]
        if entries:
            self._entries[tenant] = entry = min(entries)
            heappush(self._heap, entry)
        else:
            self._entries.pop(tenant, None)

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + SWEEP_FROM:
            self._heap = list(self._entries.values())
            heapify(self._heap)


class WaitingQueue:
    """All waiting requests, including preempted requests (`preempted`, by id) and deferred requests.

    Invariant: each request is in the line of its tenant, or, while it `_awaits` a leader, among the leader's followers.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[Any, Line] = {}
        self._followers: dict[int, Followers] = {}  # by the id of their leader
        self._size = 0
        self._best = TenantHeap(self._heads)
        self.preempted: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return self._size

    def push(self, seq: Sequence) -> None:
        """Add `seq`, which is not in the queue."""
        self._size += 1
        if seq.state is SeqState.PREEMPTED:
            self.preempted[seq.id] = seq
        if seq._awaits is None:
            self._line_up(seq)
        else:
            self._follow(seq, *seq._awaits)

    def remove(self, seq: Sequence) -> None:
        """Remove `seq`, deferred or not."""
        self._size -= 1
        self.preempted.pop(seq.id, None)
        if seq._awaits is None:
            self._step_out(seq)
        else:
            leader = seq._awaits[0]
            followers = self._followers[leader.id]
            del followers.members[seq.id]
            if not followers.members:
                del self._followers[leader.id]
            seq._awaits = None

    def defer(self, seq: Sequence, leader: Sequence, until: int) -> None:
        """Let other requests pass `seq` until `leader` has processed `until` tokens, which `resume` checks."""
        self._step_out(seq)
        seq._awaits = leader, until
        self._follow(seq, leader, until)

    def resume(self, will_publish: Callable[[Sequence], bool]) -> None:
        """Return deferred requests to their lines.

        This happens if the leader has processed the shared tokens, or will not publish them. O(leaders) if no request
        returns.
        """
        if not self._followers:
            return
        for group in list(self._followers.values()):
            leader, goes_on = group.leader, will_publish(group.leader)
            if goes_on and leader.fed < group.least:
                continue
            del self._followers[leader.id]
            for seq in group.members.values():
                until = seq._awaits[1] if seq._awaits is not None else 0
                if goes_on and leader.fed < until:
                    self._follow(seq, leader, until)
                else:
                    seq._awaits = None
                    self._line_up(seq)

    def change(self, tenant: Any) -> None:
        """Note that different requests of the tenant may start now."""
        if tenant in self._lines:
            self._best.change(tenant)

    def peek(self, facts: Facts, may_start: Callable[[Sequence], bool]) -> Sequence | None:
        """Return the next request that may start, or None."""
        return self._best.first(lambda seq: self._policy.key(seq, facts), may_start)

    def summary(self) -> dict[str, Any]:
        """Return the values that `Scheduler.check` compares with a queue rebuilt from the sequences."""
        lines = self._lines.items()
        return {
            "waiting requests": {tenant: sorted(line.live) for tenant, line in lines},
            "their ranks": {tenant: sorted(line.ranks()) for tenant, line in lines},
            "requests counted by quotas": {tenant: sorted(line.counted) for tenant, line in lines},
            "preempted requests": sorted(self.preempted),
            "deferred requests": {leader: sorted(group.members) for leader, group in self._followers.items()},
            "number of waiting requests": self._size,
        }

    def _line_up(self, seq: Sequence) -> None:
        line = self._lines.get(seq.tenant)
        if line is None:
            line = self._lines[seq.tenant] = Line()
        line.push(seq)
        self.change(seq.tenant)

    def _step_out(self, seq: Sequence) -> None:
        line = self._lines[seq.tenant]
        line.remove(seq)
        if line.live:
            self.change(seq.tenant)
        else:
            del self._lines[seq.tenant]
            self._best.forget(seq.tenant)

    def _follow(self, seq: Sequence, leader: Sequence, until: int) -> None:
        group = self._followers.get(leader.id)
        if group is None:
            group = self._followers[leader.id] = Followers(leader)
        group.add(seq, until)

    def _heads(self, tenant: Any) -> list[Sequence]:
        return self._lines[tenant].heads() if tenant in self._lines else []
