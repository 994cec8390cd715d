"""The interface of a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pagepool.scheduling.request import Rank, Sequence

__all__ = ["Policy", "View", "first"]


class View(Protocol):
    """What a policy may ask about the world. Nothing changes by being asked."""

    def cached(self, seq: Sequence) -> int:
        """Tokens of `seq` whose blocks are in the prefix cache."""

    def served(self, tenant: Any) -> float:
        """Tokens that a tenant has been served, weighted, over its share."""


def first(heads: list[Sequence], view: View) -> Sequence:
    """The one with the least rank."""
    return heads[0] if len(heads) == 1 else min(heads, key=lambda seq: seq._rank)


@dataclass(frozen=True)
class Policy:
    """Two pure functions, neither with a clock nor with a state of its own.

    rank    the order in which requests of one tenant wait; it stays the same for a request's life. When blocks run out,
            the active sequence with the greatest rank gives way first. Unique, since it ends with the id
    pick    which of the heads, the first `window` of every tenant's line, goes next
    """

    rank: Callable[[Sequence], Rank]
    pick: Callable[[list[Sequence], View], Sequence] = first
    window: int = 1
