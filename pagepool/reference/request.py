"""Requests and batches of the plain scheduler, and the orders in which requests wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["WINDOW", "Batch", "Request", "pick", "rank"]

WINDOW = {"lpm": 32}  # number of waiting requests per tenant that a policy compares; default 1


@dataclass(eq=False)
class Request:
    """A request. `state` is waiting, prefilling, decoding, preempted or finished.

    With blocks, `kv.len` is `fed` plus the slots for drafts.
    """

    id: int
    prompt_tokens: list[int]
    max_tokens: int
    priority: int = 0
    tenant: Any = None
    keys: dict[str, Any] = field(default_factory=dict)  # salt and extra keys for the prefix cache
    reads_cache: bool = True
    arrived: int = 0
    output_tokens: list[int] = field(default_factory=list)
    state: str = "waiting"
    stop_token_ids: tuple[int, ...] = ()
    request_id: Any = None
    stopped_by: str | None = None
    kv: Any = None
    fed: int = 0
    published: int = 0
    epoch: int = 0  # `PrefixCache.epoch` when it began
    prefill_end: int = 0
    awaits: tuple[Request, int] | None = None  # while deferred: its leader, and the tokens that the leader must process
    stops: list[tuple[int, str]] = field(default_factory=list)  # positions at which its state is saved, with reasons
    counted: bool = False
    num_cached: int = 0
    num_preemptions: int = 0
    rank: tuple[int, int, int] = (0, 0, 0)

    @property
    def all_tokens(self) -> list[int]:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens

    @property
    def total_tokens(self) -> int:
        """The number of prompt and output tokens."""
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def at_limit(self) -> bool:
        """True if the request has reached its token limit."""
        return self.total_tokens >= self.max_tokens

    @property
    def at_stop_token(self) -> bool:
        """True if the last output token is a stop token."""
        return self.output_tokens[-1:] != [] and self.output_tokens[-1] in self.stop_token_ids

    @property
    def has_ended(self) -> bool:
        """True if the request gets no more tokens."""
        return self.at_limit or self.at_stop_token or self.stopped_by is not None

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "abort", or None before the end."""
        if self.state != "finished":
            return None
        return "stop" if self.at_stop_token else "length" if self.at_limit else self.stopped_by

    def next_tokens(self, count: int) -> list[int]:
        """Return the next tokens to feed. A count of 0 returns the last token again."""
        return self.all_tokens[self.fed : self.fed + count] if count else self.all_tokens[-1:]


@dataclass
class Batch:
    """The batch of one step, a row for each sequence: decodes, then prefills. See `ScheduledBatch` for the lists."""

    requests: list[Request] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    lookahead: list[int] = field(default_factory=list)
    wants_token: list[bool] = field(default_factory=list)
    grow: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)  # tokens of each request when it was scheduled
    num_decodes: int = 0
    forked: list[tuple[Request, int]] = field(default_factory=list)  # forks, and their tokens in this step

    def add(self, request: Request, fed: int, grow: int, drafts: int, wants: bool) -> None:
        """Add a row of `fed` tokens. The state grows by `grow`, including slots for `drafts`."""
        self.requests.append(request)
        self.tokens.append(request.next_tokens(fed))
        self.grow.append(grow)
        self.known.append(request.total_tokens)
        self.lookahead.append(drafts)
        self.wants_token.append(wants)

    @property
    def seq_ids(self) -> list[int]:
        """The ids of its requests."""
        return [request.id for request in self.requests]

    @property
    def is_prefill(self) -> list[bool]:
        """True for rows with prompt chunks."""
        return [row >= self.num_decodes for row in range(len(self.requests))]

    @property
    def is_empty(self) -> bool:
        """True if the batch has no rows."""
        return not self.requests

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all rows, including slots for drafts."""
        return sum(self.num_tokens)

    @property
    def states(self) -> list[Any]:
        """The block tables of the requests, empty without a pool."""
        return [request.kv for request in self.requests if request.kv is not None]

    def __len__(self) -> int:
        return len(self.requests)


def rank(policy: str, request: Request) -> tuple[int, int, int]:
    """Return the sort key of a tenant's waiting requests. Active requests with a lower key keep blocks longer."""
    return (1, request.priority if policy == "priority" else 0, request.id)


def pick(
    policy: str, heads: list[Request], cached: Callable[[Request], int], served: Callable[[Any], float]
) -> Request:
    """Choose the next request among the heads of all tenants."""
    if policy == "lpm":
        return min(heads, key=lambda request: (-cached(request), request.id))
    if policy == "fair":
        return min(heads, key=lambda request: (served(request.tenant), request.id))
    return min(heads, key=lambda request: request.rank)
