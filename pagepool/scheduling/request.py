"""A request and the sequence that it becomes: what the scheduler knows of it."""

from __future__ import annotations

import enum
from typing import Any

__all__ = ["SeqState", "Sequence"]


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
    kv              its `PagedSeqState` while it is active and the scheduler has a pool, else None
    fed             tokens handed out in batches since it was last admitted; equals `kv.len`
    num_preemptions how often its blocks were taken away

    Invariant while active: `fed <= total_tokens`; the tokens from `fed` to the end are still to be fed.
    """

    __slots__ = (
        "_cohort",
        "_fed",
        "_max_output",
        "_prefill_end",
        "id",
        "kv",
        "max_tokens",
        "num_preemptions",
        "output_tokens",
        "priority",
        "prompt_tokens",
        "state",
        "stopped",
    )

    def __init__(self, seq_id: int, prompt_tokens: list[int], max_tokens: int, priority: int = 0) -> None:
        self.id = seq_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens: list[int] = []
        self.max_tokens = max_tokens
        self.priority = priority
        self.state = SeqState.WAITING
        self.stopped = False
        self.kv: Any = None
        self.num_preemptions = 0
        self._fed = 0
        # The tokens that count as its prompt since it was admitted: outputs too, when it is recomputed.
        self._prefill_end = len(prompt_tokens)
        self._max_output = max_tokens - len(prompt_tokens)
        # The cohort that it is a member of: it counts the steps that `_fed` lags behind (see cohort.py).
        self._cohort: Any = None

    @property
    def fed(self) -> int:
        """Tokens handed out in batches since the sequence was last admitted."""
        return self._fed if self._cohort is None else self._fed + self._cohort.steps

    @property
    def prompt_pos(self) -> int:
        """Prompt tokens scheduled so far; 0 again after a preemption."""
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
