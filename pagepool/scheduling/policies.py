"""Policies: the order in which requests are admitted and sequences are preempted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pagepool.scheduling.request import Rank, Sequence

__all__ = ["POLICIES", "Facts", "Policy"]


class Facts(Protocol):
    """The facts that a policy can use. These methods change nothing."""

    def served(self, tenant: Any) -> float:
        """Return the weighted tokens served to a tenant over its share. Never falls while a request of it waits."""


def by_arrival(seq: Sequence) -> Rank:
    """Rank by arrival. A preempted sequence waits before all requests that arrived later."""
    return (0, seq.id)


def by_priority(seq: Sequence) -> Rank:
    """Rank by priority, then by arrival."""
    return (seq.priority, seq.id)


def least_rank(seq: Sequence, facts: Facts) -> Rank:
    """Choose the request with the least rank."""
    return seq._rank


def least_served(seq: Sequence, facts: Facts) -> tuple[float, int]:
    """Choose the first request of the tenant that was served least, then by arrival."""
    return facts.served(seq.tenant), seq.id


@dataclass(frozen=True)
class Policy:
    """A scheduling policy: two pure functions.

    Attributes
    ----------
    rank : callable
        The sort key of the waiting requests of one tenant. It never changes for a request. If blocks run out, the
        running sequence with the greatest rank is preempted first. Ranks are unique, because they end with the id.
    key : callable
        The queue's heads are the first request of every tenant, and the first request that the tenant's quota already
        counts. The head with the least key is admitted next. Keys are unique. They can grow while a request waits.
    """

    rank: Callable[[Sequence], Rank]
    key: Callable[[Sequence, Facts], Any] = least_rank


POLICIES = {
    # Lower priority numbers first, then by arrival.
    "priority": Policy(rank=by_priority),
    # First come, first served. Priorities are ignored.
    "fcfs": Policy(rank=by_arrival),
    # The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant
    # has a counter of the tokens served to it, prompt tokens once and output tokens twice, over its weight. When an
    # idle tenant becomes busy, its counter is raised to the least counter of the busy tenants. While two tenants have
    # waiting requests, their counters differ at most by the tokens of the requests that are active together.
    "fair": Policy(rank=by_arrival, key=least_served),
}
