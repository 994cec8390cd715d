"""The lower priority number first, then first come."""

from __future__ import annotations

from pagepool.scheduling.policies.base import Policy
from pagepool.scheduling.request import Rank, Sequence

__all__ = ["PRIORITY"]


def by_priority(seq: Sequence) -> Rank:
    """By priority, equals in the order of arrival."""
    return (1, seq.priority, seq.id)


PRIORITY = Policy(rank=by_priority)
