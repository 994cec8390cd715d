"""The common case made cheap: everyone who decodes got one token and feeds it next."""

from __future__ import annotations

from typing import Any

from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.request import SeqState, Sequence

__all__ = ["Cohort", "leave"]


def leave(seq: Sequence, steps: int) -> None:
    """End the membership of `seq` in a cohort that has taken `steps` steps."""
    seq._fed = seq._joined + steps
    seq._cohort = None


class Cohort:
    """All decoding sequences, in lockstep: in each step each feeds the one token that `commit` gave it.

    The lists of a step are then those of the step before, and the work per sequence is one small list and one append.
    Two things are not kept per sequence: until `settle` each has been fed `_joined + steps` tokens, and `_room` is how
    many tokens every member may still get before the first one is at its limit. Prefills run beside a cohort and join
    it with their first token. Whatever breaks the step (a token by `append_token`, a finish from outside, a sequence
    without a token, a pool that is out, more sequences than places) settles it, and it is over; the next plain `commit`
    forms a new one.

    With a `block_size` it tells who has filled a block: a member fills one whenever its `_joined`, which stays, and
    `steps` add up to a multiple of that, so that it has its place in one of as many lists.

    Who joins or leaves is a member by its `_cohort` alone, which is set last: in the middle of either, too, it is known
    how much each has been fed.
    """

    drafts = None  # there is no lookahead in a cohort

    def __init__(self, sequences: list[Sequence], block_size: int = 0) -> None:
        self.steps = 0
        self._block_size = block_size
        self._batch: ScheduledBatch | None = None
        self._tokens: list[int] | None = None
        self._clear()
        self.join(sequences)

    @classmethod
    def form(cls, sequences: list[Sequence], block_size: int = 0) -> Cohort | None:
        """A cohort of `sequences`; None unless each decodes and has exactly one token to feed."""
        for seq in sequences:
            if seq.state is not SeqState.DECODING or seq.total_tokens - seq._fed != 1:
                return None
        return cls(sequences, block_size)

    @property
    def ready(self) -> bool:
        """True when every member has its token to feed."""
        return self._tokens is not None

    @property
    def unfed(self) -> list[int]:
        """Tokens to feed, per member."""
        return [1] * len(self.sequences)

    def rows(self, counts: list[int]) -> tuple[list[list[int]], list[int], list[bool]]:
        """As `LooseDecodes.rows`; valid while `ready`."""
        return [[token] for token in self._tokens or ()], counts, [True] * len(counts)

    def scheduled(self, batch: ScheduledBatch) -> None:
        """Note that `batch`, which begins with the members, is out."""
        self._batch, self._tokens = batch, None
        self.steps += 1

    def tokens_of(self, batch: ScheduledBatch, results: list[int | None]) -> list[int] | None:
        """The members' part of `results`; None unless this is the batch that is out and every member gets a token."""
        size = len(self.sequences)
        tokens = results if len(results) == size else results[:size]
        if batch is not self._batch:
            return None
        if size and (None in tokens or min(tokens) < 0):  # type: ignore[type-var, operator]
            return None
        return tokens  # type: ignore[return-value]

    def commit(self, tokens: list[int]) -> list[Sequence]:
        """Append the members' tokens; returns those now at their limit, already out of the cohort."""
        for output, token in zip(self._outputs, tokens, strict=True):
            output.append(token)
        self._batch, self._tokens = None, tokens
        self._room -= 1
        return self._leave_at_limit() if tokens and not self._room else []

    def join(self, sequences: list[Sequence]) -> None:
        """Take in decoding sequences that have exactly one token to feed; only while `ready`."""
        for seq in sequences:
            seq._joined = seq._fed - self.steps
            seq._cohort = self
            if self._block_size:
                self._phases[-seq._joined % self._block_size].append(seq)
        self.sequences += sequences
        self.seq_ids += [seq.id for seq in sequences]
        self.states += [seq.kv for seq in sequences if seq.kv is not None]
        self._outputs += [seq.output_tokens for seq in sequences]
        self._limits += [seq._max_output for seq in sequences]
        self._tokens = (self._tokens or []) + [seq.output_tokens[-1] for seq in sequences]
        self._room = min(self._rooms(), default=0)

    def filled(self) -> list[Sequence]:
        """The members whose last step ended with a block."""
        if not self._block_size:
            return []
        phase = self.steps % self._block_size
        here = [seq for seq in self._phases[phase] if seq._cohort is self]
        self._phases[phase] = here
        return here

    def settle(self) -> None:
        """Write `_fed` of every member and end the cohort: it has no members from then on."""
        for seq in self.sequences:
            leave(seq, self.steps)
        self._clear()
        self._batch = self._tokens = None

    def _leave_at_limit(self) -> list[Sequence]:
        done = [seq for seq, room in zip(self.sequences, self._rooms(), strict=True) if not room]
        for seq in done:
            leave(seq, self.steps)
            index = self.sequences.index(seq)
            columns: tuple[list[Any] | None, ...]
            columns = (self.sequences, self.seq_ids, self.states, self._outputs, self._limits, self._tokens)
            for column in columns:
                if column:  # without a pool there are no states
                    del column[index]
        self._room = min(self._rooms(), default=0)
        return done

    def _rooms(self) -> list[int]:
        return [limit - len(output) for limit, output in zip(self._limits, self._outputs, strict=True)]

    def _clear(self) -> None:
        self.sequences: list[Sequence] = []
        self.seq_ids: list[int] = []
        self.states: list[Any] = []
        self._outputs: list[list[int]] = []
        self._limits: list[int] = []
        self._tokens = []
        self._phases: list[list[Sequence]] = [[] for _ in range(self._block_size)]
        self._room = 0
