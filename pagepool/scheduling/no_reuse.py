"""A scheduler without a prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagepool.prefix.keys import root_key
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.cohort import Cohort
from pagepool.scheduling.request import Sequence

__all__ = ["NoReuse"]


class NoReuse:
    """No cache: nothing is found and nothing is kept."""

    keeps = False
    block_size = 0
    inserted = 0

    def row(self, seq: Sequence) -> None:
        if seq.cache_salt is not None or seq.extra_keys:
            root_key(seq.cache_salt, seq.extra_keys)  # raises as it would with a cache

    def cached(self, seq: Sequence) -> int:
        return 0

    def found(self, seq: Sequence) -> int:
        return 0

    def grown(self) -> Iterable[Any] | None:
        return ()

    def starts(self, seq: Sequence) -> None:
        return None

    def rebuild(self) -> None:
        return None

    def begins(self, seq: Sequence) -> None:
        return None

    def recount(self, seq: Sequence) -> None:
        return None

    def adopt(self, seq: Sequence) -> bool:
        return False

    def tell(self, now: float) -> None:
        return None

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        return None

    def publish_filled(self, batch: ScheduledBatch, cohort: Cohort | None) -> None:
        return None
