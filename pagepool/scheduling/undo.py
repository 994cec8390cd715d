"""What a call of the scheduler takes back when it does not end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.request import Sequence

__all__ = ["Undo"]


class Undo:
    """Of one call; noted before it is changed, and forgotten when the call has ended.

    added    the request that it brought
    drained  the finished ones that it gave away
    step     of the step that it worked out: how many steps the cohort had taken, and what all others had been fed
    served   the counters of tenants before that was charged
    tokens   of the results that it took: the batch, how many of its rows are of the cohort, which had fed all tokens
             that it had, and what all others had: number of outputs, fed
    """

    __slots__ = ("added", "drained", "served", "step", "tokens")

    def __init__(self) -> None:
        self.added: Sequence | None = None
        self.drained: dict[int, Sequence] = {}
        self.step: tuple[int, list[tuple[Sequence, int]]] | None = None
        self.served: dict[Any, float] = {}
        self.tokens: tuple[ScheduledBatch | None, int, list[tuple[Sequence, int, int]]] | None = None

    def note_step(self, sequences: Iterable[Sequence], steps: int = 0) -> None:
        """A step of `sequences` and a cohort that has taken `steps`."""
        self.step = steps, [(seq, seq._fed) for seq in sequences]

    def note_tokens(self, batch: ScheduledBatch | None, first: int, sequences: Iterable[Sequence]) -> None:
        """Results for the first `first` rows of `batch`, which are of a cohort, and for `sequences`."""
        self.tokens = batch, first, [(seq, len(seq.output_tokens), seq._fed) for seq in sequences]
