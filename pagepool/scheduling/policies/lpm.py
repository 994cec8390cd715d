"""Longest prefix match: of those that wait longest, the one that finds most of its tokens in the prefix cache."""

from __future__ import annotations

from pagepool.scheduling.policies.base import Policy, View
from pagepool.scheduling.policies.fcfs import arrival
from pagepool.scheduling.request import Sequence

__all__ = ["LPM"]

# Each admission looks all of them up.
WINDOW = 32


def longest_match(seq: Sequence, view: View) -> tuple[int, int]:
    """The greatest share of cached tokens in absolute numbers; equals in the order of arrival."""
    return -view.cached(seq), seq.id


LPM = Policy(rank=arrival, key=longest_match, window=WINDOW, by_cache=True)
