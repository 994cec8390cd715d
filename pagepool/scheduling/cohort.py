"""The common case made cheap: the same sequences decode again."""

from __future__ import annotations

from typing import Any

from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.request import SeqState

__all__ = ["Cohort"]


class Cohort:
    """All active sequences, when they all decode, all fit into one step and each got one token from `commit`.

    Then the next step is the same step with the new tokens, and the work per sequence is one small list and one append.
    While that lasts, `_fed` of the members lags by `_steps`; `settle` brings it up to date and ends the cohort. It ends
    with any other event: an admission, a token by `append_token`, a finish, a removal, a pool that is out, a member at
    its limit. `_room` is the number of tokens that every member may still get before the first one is at its limit.
    """

    def __init__(self, batch: ScheduledBatch, tokens: list[int]) -> None:
        self._batch: ScheduledBatch | None = batch
        self._tokens: list[int] | None = tokens
        self._sequences = batch._sequences
        self._states = batch.states
        self._outputs = [seq.output_tokens for seq in self._sequences]
        self._room = min([seq._max_output - len(seq.output_tokens) for seq in self._sequences])
        self._steps = 0
        self._ones = [1] * len(self._sequences)
        for seq in self._sequences:
            seq._settle = self.settle

    @classmethod
    def begin(cls, batch: ScheduledBatch, tokens: list[int]) -> Cohort | None:
        """The cohort of `batch`, to whose sequences `tokens` were just added; None unless each decodes and has exactly
        that one token to feed (it may have more, or have been preempted, when batches overlap)."""
        for seq in batch._sequences:
            if seq.state is not SeqState.DECODING or seq.total_tokens - seq._fed != 1:
                return None
        return cls(batch, tokens)

    def next_batch(self, account: Any) -> ScheduledBatch | None:
        """The next step, its blocks taken; None when the last one was not committed or the pool is out."""
        last, size = self._batch, len(self._ones)
        if last is None or self._tokens is None or not account.take(self._states, self._ones):
            return None
        self._batch = ScheduledBatch(
            self._sequences,
            last.seq_ids.copy(),
            [[token] for token in self._tokens],
            self._ones.copy(),
            size,
            [True] * size,
            self._states.copy(),
            size,
        )
        self._tokens = None
        self._steps += 1
        return self._batch

    def commit(self, batch: ScheduledBatch, tokens: list[int | None]) -> bool:
        """Append `tokens`; False, with nothing changed, when this is not a plain commit of the last batch."""
        if batch is not self._batch or self._tokens is not None or self._room <= 1:
            return False
        if None in tokens or min(tokens) < 0:  # type: ignore[type-var, operator]
            return False
        for output, token in zip(self._outputs, tokens):
            output.append(token)  # type: ignore[arg-type]
        self._tokens = tokens  # type: ignore[assignment]
        self._room -= 1
        return True

    def settle(self) -> None:
        """Write `_fed` of every member and end the cohort: it has nothing to offer from then on."""
        for seq in self._sequences:
            seq._fed += self._steps
            seq._settle = None
        self._sequences = []
        self._batch = self._tokens = None
