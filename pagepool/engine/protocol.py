"""TextEngine: what `pagepool.serve` needs of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from pagepool.engine.generation import Generation
from pagepool.engine.sampling import SamplingParams
from pagepool.engine.tokenizing import Encoder

__all__ = ["TextEngine"]


class TextEngine(Protocol):
    """Serves requests behind `pagepool.serve.app`: an `Engine`, or the front end of a cluster.

    encoder, tokenizer  for prompts, and for the texts of single tokens
    max_model_len       most tokens of prompt and output, or None
    sampling_defaults   the model's own defaults of fields of `SamplingParams`
    is_accepting        whether requests are taken
    failure             the exception that has ended all work, or None
    """

    encoder: Encoder
    tokenizer: Any
    max_model_len: int | None
    sampling_defaults: dict[str, Any]
    is_accepting: bool
    failure: BaseException | None

    @property
    def max_prompt_tokens(self) -> int | None:
        """The most tokens of a prompt; None: no limit."""

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """The most tokens that a prompt of this many can get, at least 1."""

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""

    def bad_word_ids(self, words: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
        """The token ids of `SamplingParams.bad_words`. Raises `RequestRejected` or TypeError."""

    def submit(
        self,
        prompt: str | Iterable[int],
        params: SamplingParams | None = None,
        *,
        request_id: int | str | None = None,
        priority: int = 0,
        tenant: Any = None,
        cache_salt: str | bytes | int | None = None,
    ) -> Generation:
        """Queue a prompt. Raises `RequestRejected` or `EngineClosed`."""

    def stats(self) -> dict[str, Any]:
        """Counters, `ended`, `prompt_tokens` and `generated_tokens` among them."""

    def observed(self) -> dict[str, Any]:
        """The objects that `PagepoolCollector` shows, as its arguments."""
