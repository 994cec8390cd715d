"""One step worked out: who feeds which tokens. Nothing is changed until `Step.apply`."""

from __future__ import annotations

from pagepool.config import SchedulerConfig
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.policy import share_tokens, whole_prompts
from pagepool.scheduling.request import Sequence

__all__ = ["Step"]


class Step:
    """A batch and `grow`: by how many tokens the state of each of its sequences grows.

    That is the number of tokens fed, except for a decode that got no new token since it last ran: it feeds its last
    token once more, into the slot that the token has already, and grows by 0.
    """

    __slots__ = ("batch", "grow")

    def __init__(self, decodes: list[Sequence], prefills: list[Sequence], config: SchedulerConfig) -> None:
        unfed = [len(seq.prompt_tokens) + len(seq.output_tokens) - seq._fed for seq in decodes]
        to_fill = [seq._prefill_end - seq._fed for seq in prefills]
        if prefills and config.schedule == "prefill-first":
            counts = whole_prompts(to_fill, config)
            prefills = prefills[: len(counts)]
        else:
            counts = share_tokens(unfed, to_fill, config)
        sequences = decodes + prefills
        if not prefills and unfed.count(1) == len(unfed):
            tokens = [[seq.output_tokens[-1]] for seq in decodes]
            wants = [True] * len(decodes)
            self.grow = counts
        else:
            self.grow = [min(count, new) for count, new in zip(counts, unfed)] + counts[len(unfed) :]
            tokens = [_next_tokens(seq, count) for seq, count in zip(sequences, self.grow)]
            wants = [seq._fed + count == seq.total_tokens for seq, count in zip(sequences, self.grow)]
        self.batch = ScheduledBatch(
            sequences=sequences,
            seq_ids=[seq.id for seq in sequences],
            tokens=tokens,
            num_tokens=counts.copy(),
            num_decodes=len(decodes),
            wants_token=wants,
            states=[seq.kv for seq in sequences if seq.kv is not None],
            total_tokens=sum(counts),
        )

    def apply(self) -> list[Sequence]:
        """Count the tokens as fed; returns the prefills whose last chunk this is."""
        for seq, count in zip(self.batch._sequences, self.grow):
            seq._fed += count
        return [seq for seq in self.batch._sequences[self.batch.num_decodes :] if seq._fed == seq._prefill_end]


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
