"""The interface of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from pagepool.scheduling.request import Rank, Sequence

__all__ = ["Facts", "Policy", "View", "by_rank"]


class Facts(Protocol):
    """What a policy may ask about the world. Nothing changes by being asked."""

    def cached(self, seq: Sequence) -> int:
        """Tokens of `seq` whose blocks are in the prefix cache."""

    def served(self, tenant: Any) -> float:
        """Tokens that a tenant has been served, weighted, over its share. It never falls while one of them waits."""


class View(Facts, Protocol):
    """Facts, and what is known of them without a look."""

    @property
    def bounds(self) -> Facts:
        """The same, but for `cached`, which is no less than it is."""

    def grown(self) -> Iterable[Any] | None:
        """The tenants of those whose `cached` may have grown since the last call; None: all."""


def by_rank(seq: Sequence, view: Facts) -> Rank:
    """The one with the least rank."""
    return seq._rank


@dataclass(frozen=True)
class Policy:
    """Two pure functions, neither with a clock nor with a state of its own.

    rank    the order in which requests of one tenant wait; it stays the same for a request's life. When blocks run out,
            the active sequence with the greatest rank gives way first. Unique, since it ends with the id
    key     of the heads, the first `window` of every tenant's line and the first one that its quota counts already, the
            one with the least key goes next. Unique, and while a request waits it only grows, so that not all are asked
            in every step
    by_cache  the key falls when `cached` has grown, and then only
    """

    rank: Callable[[Sequence], Rank]
    key: Callable[[Sequence, Facts], Any] = by_rank
    window: int = 1
    by_cache: bool = False
