"""Messages between the front end and the workers: plain data that can be pickled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagepool.engine.sampling import SamplingParams
from pagepool.errors import RequestRejected
from pagepool.prefix.events import NameSnapshot, PrefixEvent, PrefixSnapshot
from pagepool.transfer import PeerDescription, Ticket

__all__ = ["Begun", "Call", "Drafted", "Ended", "Limits", "News", "Offer", "Waiting", "WorkerLost", "Workers"]


class WorkerLost(Exception):
    """The process of a worker has exited. Transports raise this exception, see `Workers`."""


@dataclass(frozen=True)
class Limits:
    """Limits of a worker. They are equal for all workers of a cluster.

    Attributes
    ----------
    max_model_len : int or None
        Largest number of tokens of prompt and output together, or None if unlimited.
    pool_tokens : int or None
        Capacity of the pool in tokens, or None for a model without pages.
    vocab_size : int
        Size of the vocabulary.
    block_size : int
        Tokens per block.
    stop_token_ids : frozenset of int
        The tokens that end every output of the model.
    sampling_defaults : dict
        The model's defaults for fields of `SamplingParams`.
    """

    max_model_len: int | None
    pool_tokens: int | None
    vocab_size: int
    block_size: int
    stop_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Offer:
    """Pages of a prompt that one worker holds for another worker.

    Attributes
    ----------
    ticket : Ticket
        The blocks, for `Transfer.read`.
    peer : PeerDescription
        The transfer that holds the blocks, for `Transfer.meet`.
    number : int
        Number of the lease, for `Worker.release`.
    worker : str
        Name of the worker that holds the pages.
    """

    ticket: Ticket
    peer: PeerDescription
    number: int
    worker: str


@dataclass(frozen=True)
class Call:
    """A call of a worker: generate the tokens that follow `tokens`.

    Attributes
    ----------
    tokens : list of int
        The prompt, followed by the tokens that earlier workers have generated for this request.
    num_generated : int
        Number of generated tokens at the end of `tokens`.
    params : SamplingParams
        Sampling parameters of this call. It has no stop strings: the front end checks them.
    options : dict
        `priority`, `tenant` and `cache_salt` of `Engine.submit`.
    offer : Offer or None
        Pages that the worker can read instead of computing them.
    wants_offer : bool
        Whether the worker offers the pages of the prompt at the end of the call.
    front_end : int
        Epoch of the calling front end.
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
    """The first message, and one in each second without another message. Shows that the worker's process is alive."""


@dataclass(frozen=True)
class Begun:
    """The message before the first token.

    Attributes
    ----------
    worker : str
        Name of the worker that runs the request.
    found_tokens : int
        Number of tokens found in its prefix cache.
    moved_tokens : int
        Number of tokens with pages that were read from another worker.
    error : str
        Reason why offered pages could not be read, or "".
    """

    worker: str
    found_tokens: int
    moved_tokens: int
    error: str


@dataclass(frozen=True)
class Drafted:
    """The message before the tokens of a step with drafts: how many of them became output, and how many did not."""

    accepted: int
    rejected: int


@dataclass(frozen=True)
class Ended:
    """The last message: the `finish_reason`, and the offer if `wants_offer` was set.

    With the reason "error" it has the error in one sentence, or the exception if the request itself is wrong.
    """

    reason: str
    error: str | RequestRejected = ""
    offer: Offer | None = None


@dataclass(frozen=True)
class News:
    """State of a worker, sent several times per second. `Router.update` explains the fields that are not listed here.

    Attributes
    ----------
    is_prefill : bool
        Whether it is a prefill worker. If false, it is a decode worker.
    snapshot : NameSnapshot or PrefixSnapshot or None
        The whole prefix cache, if the front end has requested it. `events` is empty then.
    stats : dict
        Counters of the worker and its engine.
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
    """Interface through which the front end calls the prefill workers or the decode workers."""

    def generate(self, worker: str, call: Call) -> AsyncGenerator[Any, None]:
        """Yield the messages of `Worker.generate`: a `Begun`, tokens and an `Ended`, with a `Waiting` between them.

        Raises `WorkerLost` if the process of the worker has exited. Any other exception means that only this call has
        failed.
        """

    async def release(self, worker: str, number: int) -> None:
        """Call `Worker.release`."""

    async def reset_prefix_cache(self, worker: str) -> None:
        """Call `Worker.reset_prefix_cache`. Raises `WorkerLost` if the process of the worker has exited."""
