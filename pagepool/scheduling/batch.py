"""The batch of one step, and how its token budget is shared out."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from itertools import accumulate
from operator import add, ge
from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.scheduling.request import Sequence

__all__ = ["Decodes", "ScheduledBatch", "build_batch", "share_tokens"]


class ScheduledBatch:
    """The sequences of one step, one entry per sequence in each list: decodes first, then prefills.

    The states belong to the sequences. They are valid until the batch is committed or given up, and until their
    sequence finishes.

    Attributes
    ----------
    seq_ids : list of int
        Ids of the sequences.
    tokens : list of lists
        The tokens to feed.
    num_tokens : list of int
        The length of each list of tokens, plus the slots for drafted tokens.
    lookahead : list of int
        Number of slots for drafted tokens. The caller feeds drafts after `tokens`.
    is_prefill : list of bool
        True for a prompt chunk, False for a decode.
    wants_token : list of bool
        True if the result of the step is the sequence's next token. False for a prompt chunk that is not the last.
    states : list of PagedSeqState or HybridSequence
        Empty without a pool. Their `len` includes the tokens of the step. `BlockTables.fill` takes the tables of group
        i as `[state.kv[i] for state in batch.states]`.
    num_decodes : int
        Number of decodes.
    """

    __slots__ = (
        "_fed",
        "_fed_before",
        "_forks",
        "_grow",
        "_may_stop",
        "_outputs",
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
        states: list[Any],
        outputs: list[list[int]],
        tokens: list[list[int]],
        num_tokens: list[int],
        num_decodes: int,
        wants_token: list[bool],
        grow: list[int],
        fed: list[int],
        may_stop: bool = False,
    ) -> None:
        """Make a batch.

        `grow` is the growth of each sequence's state in tokens, including slots for drafts; `fed` is without them. Both
        are 0 for a decode without a new token since its last step: it feeds its last token again, into the same slot.
        `may_stop` is true if any sequence has stop tokens.
        """
        size = len(sequences)
        self.seq_ids = seq_ids
        self.tokens = tokens
        self.num_tokens = num_tokens
        self.lookahead = [0] * size if fed is grow else [a - b for a, b in zip(grow, fed, strict=True)]
        self.num_decodes = num_decodes
        self.is_prefill = [False] * num_decodes + [True] * (size - num_decodes)
        self.wants_token = wants_token
        self.states = states
        self.total_tokens = sum(num_tokens)
        self._sequences = sequences
        self._outputs = outputs
        self._grow = grow
        self._fed = fed
        self._fed_before = [seq.fed for seq in sequences]
        self._forks: list[tuple[Sequence, int]] = []  # forks made after `schedule`, with their tokens of this step
        self._may_stop = may_stop

    @classmethod
    def empty(cls) -> ScheduledBatch:
        """Return a batch without sequences."""
        return cls([], [], [], [], [], [], 0, [], [], [])

    @property
    def is_empty(self) -> bool:
        """True if the batch has no sequences."""
        return not self.seq_ids

    def fed_of(self, seq: Sequence) -> int:
        """Return the number of tokens of `seq` in this step. A fork has the number of its original."""
        rows = zip(self._sequences, self._fed, strict=True)
        return next((fed for other, fed in [*rows, *self._forks] if other is seq), 0)

    def fed_before(self) -> list[tuple[Sequence, int]]:
        """Return each sequence, and each fork made after `schedule`, with its number of fed tokens before this step."""
        rows = zip(self._sequences, self._fed_before, strict=True)
        return [*rows, *((fork, fork.fed - fed) for fork, fed in self._forks)]

    def add_fork(self, seq: Sequence, fork: Sequence) -> None:
        """Note that `fork` starts with the tokens of `seq` in this step."""
        self._forks.append((fork, self.fed_of(seq)))

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __repr__(self) -> str:
        prefills = len(self.seq_ids) - self.num_decodes
        return f"ScheduledBatch({self.num_decodes} decodes, {prefills} prefills, {self.total_tokens} tokens)"


class Decodes:
    """Decoding sequences as columns. They are reused in every step until a sequence joins or leaves."""

    __slots__ = ("may_stop", "outputs", "seq_ids", "sequences", "states")

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.seq_ids = [seq.id for seq in sequences]
        self.states = [seq.kv for seq in sequences if seq.kv is not None]
        self.outputs = [seq.output_tokens for seq in sequences]
        self.may_stop = any(seq.stop_token_ids for seq in sequences)


def build_batch(
    decodes: Decodes,
    prefills: list[Sequence],
    config: SchedulerConfig,
    free_slots: int | None = None,
    step: int = 0,
    drafts: Mapping[int, int] | None = None,
) -> ScheduledBatch:
    """The batch of one step. Changes nothing.

    `free_slots`: free slots of recurrent states; None: there are no states. Each draft needs one. Decodes without a new
    token are left out, because a state must not pass over a token twice.
    `step`: maximum number of tokens of a decode; 0: no limit.
    `drafts`: as in `Scheduler.schedule`.
    """
    new = [len(seq.prompt_tokens) + len(seq.output_tokens) - seq.fed for seq in decodes.sequences]
    if free_slots is not None and 0 in new:
        decodes = Decodes([seq for seq, count in zip(decodes.sequences, new, strict=True) if count])
        new = [count for count in new if count]
    size, has_slots = len(decodes.sequences), config.lookahead > 0 and (drafts is None or len(drafts) > 0)
    most = new
    if has_slots:
        rows = zip(decodes.sequences, new, strict=True)
        slots = [_slots(seq, count, config.lookahead, drafts) for seq, count in rows]
        if free_slots is not None:
            ends = accumulate(slots, initial=0)
            slots = [max(0, min(count, free_slots - end)) for count, end in zip(slots, ends, strict=False)]
        most = list(map(add, new, slots))
    if step:
        most = [min(count, step) for count in most]
    unread = [seq._next_end - seq.fed for seq in prefills]
    counts = share_tokens(most, unread, config)
    grow = fed = counts[:size]
    wants = [True] * size
    if grow != new:  # a decode without a new token, with drafts, or over the budget
        grow = fed = list(map(min, grow, most))
        if has_slots:
            fed = list(map(min, grow, new))
        wants = list(map(ge, fed, new))
    if new.count(1) == size:
        tokens = [[output[-1]] for output in decodes.outputs]
    else:
        given = zip(decodes.sequences, map(min, new, fed), strict=True)
        tokens = [seq._next_tokens(count) for seq, count in given]
    sequences, seq_ids = decodes.sequences.copy(), decodes.seq_ids.copy()
    states, outputs = decodes.states.copy(), decodes.outputs.copy()
    for seq, count in zip(prefills, counts[size:], strict=True):
        sequences.append(seq)
        seq_ids.append(seq.id)
        if seq.kv is not None:
            states.append(seq.kv)
        outputs.append(seq.output_tokens)
        tokens.append(seq._next_tokens(count))
        wants.append(seq.fed + count == seq.total_tokens)
        grow.append(count)
        if fed is not grow:
            fed.append(count)
    may_stop = decodes.may_stop or any(seq.stop_token_ids for seq in prefills)
    return ScheduledBatch(sequences, seq_ids, states, outputs, tokens, counts, size, wants, grow, fed, may_stop)


def share_tokens(decodes: Many[int], prefills: Many[int], config: SchedulerConfig) -> list[int]:
    """The tokens of each sequence of a step, given how many each still has to feed; decodes first, then prefills.

    Everyone gets one token. What is left of `max_batch_tokens` goes to decodes with several tokens to feed, then to the
    prefills in order, each up to `max_prefill_tokens`. There are never more sequences than tokens.

    >>> share_tokens([1, 1, 3], [500, 40], SchedulerConfig(max_batch_tokens=100, max_prefill_tokens=64))
    [1, 1, 3, 64, 31]
    """
    counts, left = [1] * len(decodes), config.max_batch_tokens - len(decodes) - len(prefills)
    if decodes.count(1) != len(decodes):
        for row, wanted in enumerate(decodes):
            extra = max(0, min(wanted - 1, left))
            counts[row] += extra
            left -= extra
    for unread in prefills:
        extra = min(unread - 1, config.max_prefill_tokens - 1, left)
        counts.append(1 + extra)
        left -= extra
    return counts


def _slots(seq: Sequence, new: int, lookahead: int, drafts: Mapping[int, int] | None) -> int:
    """The slots for drafts that a decode with `new` tokens to feed can use: one token comes without a draft."""
    wanted = lookahead if drafts is None else min(lookahead, drafts.get(seq.id, 0))
    return min(wanted, seq._max_output - len(seq.output_tokens) - 1) if new == 1 else 0
