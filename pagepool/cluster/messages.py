"""Messages between the front end and the workers: plain data that can be pickled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagepool.engine.sampling import SamplingParams
from pagepool.prefix.events import NameSnapshot, PrefixEvent, PrefixSnapshot
from pagepool.transfer import PeerDescription, Ticket

__all__ = ["Begun", "Call", "Ended", "Limits", "News", "Offer", "Waiting", "WorkerLost", "Workers"]


class WorkerLost(Exception):
    """The process of a worker is gone. A transport raises it, see `Workers`."""


@dataclass(frozen=True)
class Limits:
    """Limits of a worker, which are the same for all workers of a cluster.

    Attributes
    ----------
    max_model_len
        Tokens of prompt and output, or None.
    pool_tokens
        Tokens that its pool has room for, or None for a model without pages.
    vocab_size
        How many tokens the model knows.
    block_size
        Tokens per block.
    stop_token_ids
        The tokens that end every text of the model.
    sampling_defaults
        The model's own defaults of fields of `SamplingParams`.
    """

    max_model_len: int | None
    pool_tokens: int | None
    vocab_size: int
    block_size: int
    stop_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Offer:
    """Pages of a prompt that a worker holds for another one.

    Attributes
    ----------
    number
        Of the lease, for `Worker.release`.
    worker
        Name of the worker that holds them.
    """

    ticket: Ticket
    peer: PeerDescription
    number: int
    worker: str


@dataclass(frozen=True)
class Call:
    """A call of a worker: generate the tokens that follow these.

    Attributes
    ----------
    tokens
        The prompt, and behind it what earlier runs of the request have generated.
    num_generated
        How many of the tokens that are.
    params
        How this worker goes on; strings that end the text are left to the front end.
    options
        `priority`, `tenant` and `cache_salt` of `Engine.submit`.
    offer
        Pages that may be read instead of computed, or None.
    wants_offer
        Whether the worker is to offer the pages of the prompt when it has ended.
    front_end
        The epoch of the front end that asks.
    """

    tokens: list[int]
    num_generated: int
    params: SamplingParams
    options: dict[str, Any]
    offer: Offer | None
    wants_offer: bool
    front_end: int


@dataclass(frozen=True)
class Waiting:
    """Comes first, and every second in which nothing else does: the process of the worker is alive."""


@dataclass(frozen=True)
class Begun:
    """Comes before the first token.

    Attributes
    ----------
    worker
        Name of the worker that runs the request.
    found_tokens
        Tokens found in its prefix cache.
    moved_tokens
        Tokens whose pages were read from another worker.
    error
        Why pages of the offer could not be read, or "".
    """

    worker: str
    found_tokens: int
    moved_tokens: int
    error: str


@dataclass(frozen=True)
class Ended:
    """Comes last: a `finish_reason`, one sentence about an error, and the offer that was asked for."""

    reason: str
    error: str = ""
    offer: Offer | None = None


@dataclass(frozen=True)
class News:
    """State of a worker, sent several times a second. `Router.update` explains the first fields.

    Attributes
    ----------
    is_prefill
        On which side it works.
    snapshot
        Instead of events, when the front end has asked for it.
    stats
        Of its engine.
    """

    worker: str
    is_prefill: bool
    epoch: int
    events: list[PrefixEvent]
    snapshot: NameSnapshot | PrefixSnapshot | None
    load: int
    room: int
    stats: dict[str, Any] = field(default_factory=dict)


class Workers(Protocol):
    """How the front end reaches the workers of one side."""

    def generate(self, worker: str, call: Call) -> AsyncGenerator[Any, None]:
        """Yield the messages of `Worker.generate`: a `Begun`, tokens and an `Ended`, with a `Waiting` between them.

        Raises `WorkerLost` when the process of the worker is gone. Any other exception: only this call has failed.
        """

    async def release(self, worker: str, number: int) -> None:
        """Calls `Worker.release`."""
