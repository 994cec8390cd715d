"""TextEngine: the interface of an engine that `pagepool.serve` uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from pagepool.engine.generation import Generation
from pagepool.engine.intake import Request
from pagepool.engine.sampling import SamplingParams
from pagepool.engine.structured import Grammars
from pagepool.engine.tokenizing import Encoder

__all__ = ["TextEngine"]


class TextEngine(Protocol):
    """Runs the requests of `pagepool.serve.app`: an `Engine`, or the front end of a cluster.

    Attributes
    ----------
    encoder : Encoder
        Turns prompts into token ids.
    grammars : Grammars
        Compiles the grammars of `SamplingParams.structured`.
    tokenizer : object or None
        Gives the texts of single tokens.
    max_model_len : int or None
        Maximum number of tokens of prompt and output.
    sampling_defaults : dict
        The model's own defaults of `SamplingParams`.
    is_accepting : bool
        True while requests are accepted.
    failure : BaseException or None
        The exception that ended all work.
    """

    encoder: Encoder
    grammars: Grammars
    tokenizer: Any
    max_model_len: int | None
    sampling_defaults: dict[str, Any]
    is_accepting: bool
    failure: BaseException | None

    @property
    def max_prompt_tokens(self) -> int | None:
        """Maximum number of tokens of a prompt, or None without a limit."""

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Return the maximum number of new tokens for a prompt of this length, at least 1."""

    @property
    def num_requests(self) -> int:
        """Number of requests that wait or run."""

    def bad_word_ids(self, words: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of `SamplingParams.bad_words`. Raises `RequestRejected` or TypeError."""

    def submit(
        self,
        prompt: str | Iterable[int] | Request,
        params: SamplingParams | None = None,
        *,
        request_id: int | str | None = None,
        priority: int = 0,
        tenant: Any = None,
        cache_salt: str | bytes | int | None = None,
    ) -> Generation:
        """Queue a prompt or a checked request. Raises `RequestRejected` or `EngineClosed`."""

    def read(self, prompt: str | Iterable[int], params: SamplingParams | None = None) -> Request:
        """Check a request for `submit`. Raises `RequestRejected`."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Waits until this is done. Raises `EngineClosed`."""

    def stats(self) -> dict[str, Any]:
        """Return a dict of counters. It has at least `ended`, `prompt_tokens`, `generated_tokens`, `cached_tokens`."""

    def observed(self) -> dict[str, Any]:
        """Return the arguments of `PagepoolCollector` for this engine."""
