"""Longest prefix match: of those that wait longest, the one that finds most of its tokens in the prefix cache."""

from __future__ import annotations

from pagepool.scheduling.policies.base import Facts, Policy
from pagepool.scheduling.policies.fcfs import arrival
from pagepool.scheduling.request import Sequence

__all__ = ["LPM"]

# Each is looked up when it comes to stand among them, and when more of it may be cached.
WINDOW = 32


def longest_match(seq: Sequence, view: Facts) -> tuple[int, int]:
    """The greatest share of cached tokens in absolute numbers; equals in the order of arrival."""
    return -view.cached(seq), seq.id


LPM = Policy(rank=arrival, key=longest_match, window=WINDOW, by_cache=True)
