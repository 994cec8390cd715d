"""A request, and the sequence that it becomes."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from pagepool.prefix.explain import Explanation

__all__ = ["Rank", "SeqState", "Sequence", "by_id", "by_rank"]

Rank = tuple[int, int]  # the last number is the id: no two are equal
by_id, by_rank = attrgetter("id"), attrgetter("_rank")  # keys to sort sequences


class SeqState(enum.Enum):
    """The state of a sequence::

        WAITING ---> PREFILLING ---> DECODING ---> FINISHED
                      ^      |           |
                      |      v           v
                     PREEMPTED (waits again, at the front)

    Every state may change to FINISHED directly: by `finish_sequence`, at the limit or at a stop token.
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One sequence. The scheduler makes and changes it; callers read it.

    Invariant while active: `fed <= total_tokens`; the tokens from `fed` to the end have yet to be fed.

    Attributes
    ----------
    id : int
        1, 2, ... in the order of `add_request`.
    state : SeqState
        Waiting, prefilling, decoding or finished.
    prompt_tokens : list of int
        The prompt.
    output_tokens : list of int
        The output so far, in the order of arrival.
    max_tokens : int
        Limit of prompt and output together.
    priority : int
        Lower numbers go first.
    stop_token_ids : frozenset of int
        Output tokens that end the sequence.
    request_id : int, str or None
        The caller's own id.
    tenant : hashable
        The name of the tenant.
    cache_salt, extra_keys
        Two prompts share cached blocks only if both are equal.
    reads_cache : bool
        The sequence begins with cached blocks.
    kv : PagedSeqState, HybridSequence or None
        The blocks of an active sequence, if the scheduler has a pool; a `HybridSequence` if it has groups or states.
        After a partial preemption the state with the remaining blocks.
    num_cached : int
        Tokens that were in its blocks when it was last admitted: cached, or kept by a preemption.
    fed : int
        Tokens with K and V in the pages, including the current batch. Equals `kv.len` minus the slots for drafts.
    num_preemptions : int
        Number of preemptions.
    """

    id: int
    prompt_tokens: list[int]
    max_tokens: int
    priority: int = 0
    tenant: Any = None
    cache_salt: Any = None
    extra_keys: tuple[Any, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    request_id: int | str | None = None
    reads_cache: bool = True
    state: SeqState = field(default=SeqState.WAITING, init=False)
    output_tokens: list[int] = field(default_factory=list, init=False)
    kv: Any = field(default=None, init=False)
    fed: int = field(default=0, init=False)
    num_cached: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    # The arguments of `Explanation.of`, from `PrefixAdapter.note_miss`.
    _miss: Any = field(default=None, init=False)
    # Rising positions in its prompt at which its recurrent state is saved, with the reason.
    _stops: list[tuple[int, str]] = field(default_factory=list, init=False)
    # "stop" or "abort" after a call has stopped it.
    _stopped_by: str | None = field(default=None, init=False)
    # Its rank under the policy, set by the scheduler.
    _rank: Rank = field(default=(0, 0), init=False)
    # While it is deferred: the leader, which computes its next blocks, and the tokens that it must process first.
    _awaits: tuple[Sequence, int] | None = field(default=None, init=False)
    # Maximum number of output tokens. Then the end of the prefill, which includes outputs that are recomputed after a
    # preemption.
    _max_output: int = field(init=False)
    _prefill_end: int = field(init=False)
    # True while its tenant's quota counts it.
    _counted: bool = field(default=False, init=False)
    # The `SequencePrefix` of the prefix adapter.
    _prefix: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._max_output = self.max_tokens - len(self.prompt_tokens)
        self._prefill_end = len(self.prompt_tokens)

    @property
    def prompt_pos(self) -> int:
        """Number of scheduled prompt tokens. After a preemption: prompt tokens that are still in its blocks."""
        return min(self.fed, len(self.prompt_tokens))

    @property
    def total_tokens(self) -> int:
        """Number of prompt and output tokens."""
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def at_limit(self) -> bool:
        """True if `total_tokens` has reached `max_tokens`. Such a sequence counts as finished."""
        return len(self.output_tokens) >= self._max_output

    @property
    def stopped(self) -> bool:
        """True after `finish_sequence`, `remove_sequence` or `cancel`."""
        return self._stopped_by is not None

    @property
    def finish_reason(self) -> str | None:
        """The reason of its end, None before it.

        "stop" at a stop token or by `finish_sequence`, "length" at the limit, "abort" by `cancel`, `remove_sequence` or
        `Scheduler.close`.
        """
        if self.state is not SeqState.FINISHED:
            return None
        if self._at_stop_token:
            return "stop"
        return "length" if self.at_limit else self._stopped_by

    @property
    def all_tokens(self) -> list[int]:
        """Prompt and output tokens, as a new list."""
        return self.prompt_tokens + self.output_tokens

    @property
    def miss(self) -> Explanation | None:
        """Why the rest of its prompt was not cached when it was admitted, for `SchedulerConfig.explain_misses`.

        None without it, without a prefix cache, and before it is admitted. The tokens found are `num_cached`.
        """
        return None if self._miss is None else Explanation.of(*self._miss)

    @property
    def _label(self) -> int | str:
        """The label of its blocks."""
        return self.id if self.request_id is None else self.request_id

    @property
    def _at_stop_token(self) -> bool:
        return bool(self.output_tokens) and self.output_tokens[-1] in self.stop_token_ids

    @property
    def _has_ended(self) -> bool:
        """True if it gets no more tokens, even if its state is not FINISHED yet."""
        return self.at_limit or self._at_stop_token or self._stopped_by is not None

    @property
    def _next_end(self) -> int:
        """The position at which its next chunk must end."""
        return self._stops[0][0] if self._stops else self._prefill_end

    @property
    def _is_active(self) -> bool:
        return self.state is SeqState.PREFILLING or self.state is SeqState.DECODING

    def _next_tokens(self, count: int) -> list[int]:
        """Return the next `count` tokens to feed. A count of 0 returns the last token again."""
        start, prompt = self.fed, self.prompt_tokens
        if count == 0:
            return [self.output_tokens[-1] if self.output_tokens else prompt[-1]]
        if start + count <= len(prompt):
            return prompt[start : start + count]
        past = start - len(prompt)
        if past >= 0:
            return self.output_tokens[past : past + count]
        return prompt[start:] + self.output_tokens[: past + count]

    def _fork(self, seq_id: int) -> Sequence:
        """Return a decoding sequence with the same tokens, without blocks."""
        fork = dataclasses.replace(self, id=seq_id)
        fork.state, fork.fed, fork.num_cached = self.state, self.fed, self.fed
        fork.output_tokens = self.output_tokens.copy()
        fork._prefill_end, fork._prefix = self._prefill_end, self._prefix.fork()
        return fork

    def _audit(self, slots: int, has_blocks: bool) -> str | None:
        """Return the first broken invariant, or None. `slots` is the number of its slots for drafts."""
        held = 0 if self.kv is None else self.kv.len
        is_preempted = self.state is SeqState.PREEMPTED
        if self._awaits is not None and self.state is not SeqState.WAITING and not is_preempted:
            return f"it is deferred until sequence {self._awaits[0].id} has read {self._awaits[1]} tokens"
        if self.state is SeqState.FINISHED or self.state is SeqState.WAITING:
            return None if self.kv is None else f"it has {held} tokens in blocks"
        if self._has_ended or not 0 <= self.fed <= self.total_tokens:
            return f"it was fed {self.fed} of {self.total_tokens} tokens, at most {self.max_tokens}"
        if has_blocks and held != self.fed + slots:
            return f"it was fed {self.fed} tokens and has {slots} slots, {held} tokens are in blocks"
        if self._is_active and (self.state is SeqState.DECODING) != (self.fed >= self._prefill_end):
            return f"it was fed {self.fed} of the {self._prefill_end} tokens of its prompt"
        return None

    def __repr__(self) -> str:
        return (
            f"Sequence(id={self.id}, state={self.state.name}, prompt={len(self.prompt_tokens)}, "
            f"output={len(self.output_tokens)}, max_tokens={self.max_tokens})"
        )
