"""One step worked out: who feeds which tokens. Nothing is changed by it."""

from __future__ import annotations

from pagepool.config import SchedulerConfig
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.cohort import Cohort
from pagepool.scheduling.lookahead import drafts_of
from pagepool.scheduling.request import Sequence
from pagepool.scheduling.shares import share_tokens, whole_prompts

__all__ = ["LooseDecodes", "Step"]


class LooseDecodes:
    """Decoding sequences of which nothing is known: each may have no, one or several tokens to feed.

    `drafts` are the slots beside, of those that have one; `unfed` counts them in: they are shared out like tokens.
    """

    def __init__(self, sequences: list[Sequence], lookahead: int = 0) -> None:
        self.sequences = sequences
        self.seq_ids = [seq.id for seq in sequences]
        self.states = [seq.kv for seq in sequences if seq.kv is not None]
        self.unfed = [len(seq.prompt_tokens) + len(seq.output_tokens) - seq._fed for seq in sequences]
        self.drafts: list[int] | None = None
        if lookahead:
            pairs = zip(sequences, self.unfed, strict=True)
            self.drafts = [drafts_of(seq, lookahead) if new == 1 else 0 for seq, new in pairs]
            self.unfed = [new + drafts for new, drafts in zip(self.unfed, self.drafts, strict=True)]

    def rows(self, counts: list[int]) -> tuple[list[list[int]], list[int], list[bool]]:
        """The tokens of each sequence, by how many its state grows, and whether they are its last, for `counts` tokens
        each."""
        if self.unfed.count(1) == len(self.unfed):
            return [[seq.output_tokens[-1]] for seq in self.sequences], counts, [True] * len(counts)
        grow = [min(count, new) for count, new in zip(counts, self.unfed, strict=True)]
        if self.drafts is not None:
            own = [new - drafts for new, drafts in zip(self.unfed, self.drafts, strict=True)]
            fed = [min(count, new) for count, new in zip(grow, own, strict=True)]
            self.drafts = [count - tokens for count, tokens in zip(grow, fed, strict=True)]
            wants = [count >= new for count, new in zip(fed, own, strict=True)]
            return [_next_tokens(seq, count) for seq, count in zip(self.sequences, fed, strict=True)], grow, wants
        tokens = [_next_tokens(seq, count) for seq, count in zip(self.sequences, grow, strict=True)]
        return tokens, grow, [count >= new for count, new in zip(counts, self.unfed, strict=True)]


class Step:
    """A batch and `grow`: by how many tokens the state of each of its sequences grows.

    That is the number of tokens fed, except for a decode that got no new token since it last ran: it feeds its last
    token once more, into the slot that the token has already, and grows by 0.
    """

    __slots__ = ("batch", "grow")

    def __init__(self, decodes: LooseDecodes | Cohort, prefills: list[Sequence], config: SchedulerConfig) -> None:
        unread = [seq._prefill_end - seq._fed for seq in prefills]
        if prefills and config.schedule == "prefill-first":
            counts = whole_prompts(unread, config)
        else:
            counts = share_tokens(decodes.unfed, unread, config)
        sequences, seq_ids, states = decodes.sequences.copy(), decodes.seq_ids.copy(), decodes.states.copy()
        size = len(sequences)
        tokens, grow, wants = decodes.rows(counts[:size])
        # Prefills are few: one loop beside the lists of the decodes.
        for seq, count in zip(prefills, counts[size:]):  # noqa: B905 -- `whole_prompts` may leave some out
            sequences.append(seq)
            seq_ids.append(seq.id)
            tokens.append(_next_tokens(seq, count))
            grow.append(count)
            wants.append(seq._fed + count == seq.total_tokens)
            if seq.kv is not None:
                states.append(seq.kv)
        self.grow = grow
        lookahead = None if decodes.drafts is None else decodes.drafts + [0] * (len(sequences) - size)
        self.batch = ScheduledBatch(sequences, seq_ids, tokens, counts, size, wants, states, sum(counts), lookahead)


def _next_tokens(seq: Sequence, count: int) -> list[int]:
    """The next `count` tokens that `seq` has not fed, or, for 0, its last token once more."""
    start, prompt = seq._fed, seq.prompt_tokens
    if count == 0:
        return [seq.output_tokens[-1] if seq.output_tokens else prompt[-1]]
    if start + count <= len(prompt):
        return prompt[start : start + count]
    past = start - len(prompt)
    if past >= 0:
        return seq.output_tokens[past : past + count]
    return prompt[start:] + seq.output_tokens[: past + count]
