"""A request and the sequence that it becomes: what the scheduler knows of it."""

from __future__ import annotations

import enum
from typing import Any

__all__ = ["Rank", "SeqState", "Sequence"]

Rank = tuple[int, int, int]  # the last number is the id: no two are equal


class SeqState(enum.Enum):
    """Where a sequence stands.

        WAITING ---> PREFILLING ---> DECODING ---> FINISHED
                      ^      |           |
                      |      v           v
                     PREEMPTED (waits again, at the front)

    Every state may go to FINISHED directly: by `finish_sequence`, or by reaching the limit.
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """One sequence. The scheduler makes and changes it; callers read it.

    id              1, 2, ... in the order of `add_request`
    state           a `SeqState`
    prompt_tokens   list of int
    output_tokens   list of int, in the order of arrival
    max_tokens      limit of prompt + output
    priority        lower goes first
    stopped         True after `finish_sequence` or `remove_sequence`
    tenant          whose it is: anything hashable, None for nobody's
    cache_salt, extra_keys  apart from what prompts its blocks are cached
    cache_priority, cache_ttl  with which, and for how long
    kv              its `PagedSeqState` while it is active and the scheduler has a pool, else None; one that was
                    preempted in part keeps the blocks that it was left
    num_cached      tokens that it did not have to read when it was last admitted: cached, kept or swapped
    fed             tokens in the pages or on their way there: cached ones found at admission, those kept or swapped at
                    preemption, and all handed out in batches since; equals `kv.len` but for slots out for drafts
    num_preemptions how often its blocks were taken away

    Invariant while active: `fed <= total_tokens`; the tokens from `fed` to the end are still to be fed.
    """

    __slots__ = (
        "_arrived",
        "_barred",
        "_cohort",
        "_counted",
        "_fed",
        "_forgotten",
        "_group",
        "_joined",
        "_kept",
        "_max_output",
        "_own",
        "_prefill_end",
        "_rank",
        "_row",
        "_row_end",
        "_summed",
        "_swapped",
        "_twins",
        "_watch",
        "cache_priority",
        "cache_salt",
        "cache_ttl",
        "extra_keys",
        "id",
        "kv",
        "max_tokens",
        "num_cached",
        "num_preemptions",
        "output_tokens",
        "priority",
        "prompt_tokens",
        "state",
        "stopped",
        "tenant",
    )

    def __init__(
        self,
        seq_id: int,
        prompt_tokens: list[int],
        max_tokens: int,
        priority: int = 0,
        tenant: Any = None,
        cache_salt: Any = None,
        extra_keys: tuple[Any, ...] = (),
        cache_priority: int = 0,
        cache_ttl: float | None = None,
    ) -> None:
        self.id = seq_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens: list[int] = []
        self.max_tokens = max_tokens
        self.priority = priority
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.extra_keys = extra_keys
        self.cache_priority = cache_priority
        self.cache_ttl = cache_ttl
        self.state = SeqState.WAITING
        self.stopped = False
        self.kv: Any = None
        self.num_cached = 0
        self.num_preemptions = 0
        self._fed = 0
        # The tokens that count as its prompt since it was admitted: outputs too, when it is recomputed.
        self._prefill_end = len(prompt_tokens)
        self._max_output = max_tokens - len(prompt_tokens)
        # Set by the scheduler when it takes the request in: its place in every order, and the step that it came in.
        self._rank: Rank = (1, 0, seq_id)
        self._arrived = 0
        # Its first `_row_end` tokens as the prefix cache reads them, None without a cache, and how many of its leading
        # blocks the cache was given or has given; whether it has had others for the tokens of some of these, and then
        # how many are its own. Whether it was made to forget one of them, when it had been made to forget so many.
        self._row: Any = None
        self._row_end = len(prompt_tokens)
        self._kept = 0
        self._twins = False
        self._own = 0
        self._barred = False
        self._forgotten = 0
        # How many of its blocks `Watches` has summed up, with the sum; and what it watches for (see watches.py).
        self._summed = (0, 0)
        self._watch: tuple[int, int, int | None] | None = None
        # Whether the quota of its tenant counts it, the tenant's number in the cache, and its pages in the swap file.
        self._counted = False
        self._group = 0
        self._swapped: Any = None
        # The cohort that it is a member of, and what it was fed when that had taken no step: `_fed` does not count
        # meanwhile (see cohort.py).
        self._cohort: Any = None
        self._joined = 0

    @property
    def fed(self) -> int:
        """Tokens in the pages or on their way there: found, kept or swapped at admission, or handed out since."""
        return self._fed if self._cohort is None else self._joined + self._cohort.steps

    @property
    def prompt_pos(self) -> int:
        """Prompt tokens scheduled so far; after a preemption those of what was kept, 0 if nothing was."""
        return min(self.fed, len(self.prompt_tokens))

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def at_limit(self) -> bool:
        """True when `total_tokens` has reached `max_tokens`; such a sequence counts as finished."""
        return len(self.output_tokens) >= self._max_output

    @property
    def all_tokens(self) -> list[int]:
        """Prompt and output tokens, as a new list."""
        return self.prompt_tokens + self.output_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence(id={self.id}, state={self.state.name}, prompt={len(self.prompt_tokens)}, "
            f"output={len(self.output_tokens)}, max_tokens={self.max_tokens})"
        )
