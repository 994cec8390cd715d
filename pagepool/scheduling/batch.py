"""What one step runs."""

from __future__ import annotations

from typing import Any

from pagepool.scheduling.request import SeqState, Sequence

__all__ = ["ScheduledBatch"]


class ScheduledBatch:
    """The sequences of one step, one entry per sequence in each list: decodes first, then prefills.

    seq_ids      list of int
    tokens       list of lists: the tokens to feed
    num_tokens   list of int: how many those are, with the slots for drafts
    lookahead    list of int: how many of them are slots for drafted tokens, which the caller feeds behind `tokens`
    is_prefill   list of bool
    wants_token  list of bool: True where the step feeds the last token known, so that its result is the next token;
                 False for a prompt chunk that is not the last
    states       list of `PagedSeqState`, or empty without a pool; their `len` includes the step's tokens
    num_decodes  how many entries are decodes

    The states are those of the sequences: they stay valid until the next `schedule()`, which may preempt, and for a
    sequence until it finishes.
    """

    __slots__ = (
        "_committed",
        "_sequences",
        "is_prefill",
        "lookahead",
        "num_decodes",
        "num_tokens",
        "seq_ids",
        "states",
        "tokens",
        "total_tokens",
        "wants_token",
    )

    def __init__(
        self,
        sequences: list[Sequence],
        seq_ids: list[int],
        tokens: list[list[int]],
        num_tokens: list[int],
        num_decodes: int,
        wants_token: list[bool],
        states: list[Any],
        total_tokens: int,
        lookahead: list[int] | None = None,
    ) -> None:
        self._sequences = sequences
        self._committed = False
        self.seq_ids = seq_ids
        self.tokens = tokens
        self.num_tokens = num_tokens
        self.lookahead = [0] * len(seq_ids) if lookahead is None else lookahead
        self.num_decodes = num_decodes
        self.is_prefill = [False] * num_decodes + [True] * (len(seq_ids) - num_decodes)
        self.wants_token = wants_token
        self.states = states
        self.total_tokens = total_tokens

    @classmethod
    def empty(cls) -> ScheduledBatch:
        """A step without sequences."""
        return cls([], [], [], [], 0, [], [], 0)

    @property
    def is_empty(self) -> bool:
        """True when nothing is to be run."""
        return not self.seq_ids

    def _append(
        self, results: list[Any], first: int, usable: list[bool], finished: list[Sequence]
    ) -> tuple[list[Sequence], bool]:
        """Append the results from row `first` on, as far as `usable`, to their sequences. Adds those that reach their
        limit to `finished`; returns the others that got a token, and whether a sequence that wants one got none."""
        self._committed = True
        got: list[Sequence] = []
        missed = False
        for row, is_token in enumerate(usable, first):
            seq = self._sequences[row]
            if not self.wants_token[row] or seq.state is SeqState.FINISHED:
                continue
            if not is_token:
                missed = True
                continue
            output = seq.output_tokens
            output.append(results[row])
            if len(output) < seq._max_output:
                got.append(seq)
            else:
                finished.append(seq)
        return got, missed

    def tokens_of(self, seq: Sequence) -> int:
        """How many tokens `seq` feeds in this step."""
        return len(self.tokens[self.seq_ids.index(seq.id)]) if seq.id in self.seq_ids else 0

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __repr__(self) -> str:
        prefills = len(self.seq_ids) - self.num_decodes
        return f"ScheduledBatch({self.num_decodes} decodes, {prefills} prefills, {self.total_tokens} tokens)"
