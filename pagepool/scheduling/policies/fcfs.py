"""First come, first served; priorities do not count."""

from __future__ import annotations

from pagepool.scheduling.policies.base import Policy
from pagepool.scheduling.request import Rank, Sequence

__all__ = ["FCFS", "arrival"]


def arrival(seq: Sequence) -> Rank:
    """In the order of arrival. A sequence that was preempted waits in front of all that came after it."""
    return (1, 0, seq.id)


FCFS = Policy(rank=arrival)
