"""Policies: which waiting request is admitted next, and which running sequence is preempted first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pagepool.scheduling.request import Rank, Sequence

__all__ = ["POLICIES", "Facts", "Policy"]


class Facts(Protocol):
    """The questions of a policy. Asking changes nothing."""

    def cached(self, seq: Sequence) -> int:
        """Tokens of `seq` that are in the prefix cache."""

    def served(self, tenant: Any) -> float:
        """Tokens that a tenant has been served, weighted, over its share. It never falls while one of them waits."""


def by_arrival(seq: Sequence) -> Rank:
    """In the order of arrival. A preempted sequence waits in front of all that came after it."""
    return (1, 0, seq.id)


def by_priority(seq: Sequence) -> Rank:
    """By priority, equals in the order of arrival."""
    return (1, seq.priority, seq.id)


def least_rank(seq: Sequence, facts: Facts) -> Rank:
    """The one with the least rank."""
    return seq._rank


def longest_match(seq: Sequence, facts: Facts) -> tuple[int, int]:
    """The one with the most cached tokens; equals in the order of arrival."""
    return -facts.cached(seq), seq.id


def least_served(seq: Sequence, facts: Facts) -> tuple[float, int]:
    """The first request of the tenant that was served least; equals in the order of arrival."""
    return facts.served(seq.tenant), seq.id


@dataclass(frozen=True)
class Policy:
    """Two pure functions, without a clock or a state of their own.

    rank    the order in which requests of one tenant wait; a request keeps it for its life. When blocks run out, the
            running sequence with the greatest rank is preempted first. Unique, since it ends with the id
    key     the heads of the queue are the first `window` requests of every tenant and the first one that its quota
            counts already; the head with the least key is admitted next. Unique. A key can grow while a request waits
    by_cache  the key depends on the prefix cache, so it can also fall: all heads are asked each time
    """

    rank: Callable[[Sequence], Rank]
    key: Callable[[Sequence, Facts], Any] = least_rank
    window: int = 1
    by_cache: bool = False


POLICIES = {
    # The lower priority number first, then first come.
    "priority": Policy(rank=by_priority),
    # First come, first served; priorities do not count.
    "fcfs": Policy(rank=by_arrival),
    # Longest prefix match: of the requests that wait longest, the one with the most cached tokens.
    "lpm": Policy(rank=by_arrival, key=longest_match, window=32, by_cache=True),
    # The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each tenant
    # has a counter of the tokens served to it, prompt tokens once and output tokens twice, over its weight; a tenant
    # that comes back from idleness begins no lower than the busy tenants. While two tenants have requests waiting,
    # their counters differ by no more than the tokens that are admitted at a time can add.
    "fair": Policy(rank=by_arrival, key=least_served),
}
