"""Intake: checks and counts requests. Base class of `Engine` and of the cluster's front end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

from pagepool._arguments import wrong
from pagepool.engine.generation import Generation
from pagepool.engine.sampling import SamplingParams
from pagepool.engine.structured import Grammar, Grammars
from pagepool.engine.tokenizing import TOO_LONG, Detokenizer, Encoder
from pagepool.errors import RequestRejected

__all__ = ["Intake", "Request", "check_length"]

UNBOUNDED = 4096  # default length in tokens for a model without a maximum length
ENDINGS = ("stop", "length", "abort", "error")


@dataclass(eq=False, slots=True)
class Request:
    """A checked request.

    `params` is complete: `max_new_tokens` is a number, `bad_words` are token ids, and `stop_token_ids` includes the
    stop tokens of the model unless `ignore_eos` is set without `structured`. `grammar` is the compiled `structured`.
    """

    prompt: list[int]
    params: SamplingParams
    detokenizer: Detokenizer
    grammar: Grammar | None = None
    num_tokens: int = 0  # generated tokens that were passed to `text_of`

    def choice(self, **fields: Any) -> Request:
        """Return a request for the same prompt, with other values in some fields of `params`. They are not checked."""
        params = self.params.changed(**fields)
        tokenizer = self.detokenizer.tokenizer
        detokenizer = Detokenizer(tokenizer, self.prompt, params.stop, params.skip_special_tokens)
        return Request(self.prompt, params, detokenizer, self.grammar)

    def text_of(self, token: int, reason: str | None) -> tuple[str, str | None]:
        """Return the text of the next token and its finish reason.

        `reason` is the scheduler's finish reason, or None. A stop string in the text changes it to "stop".
        """
        self.num_tokens += 1
        self.detokenizer.may_stop = self.num_tokens > self.params.min_tokens
        text = "" if reason == "stop" else self.detokenizer.add(token)  # a stop token has no text
        if reason is not None:
            text += self.detokenizer.flush()
        return text, "stop" if self.detokenizer.stopped else reason


class Intake(ABC):
    """Checks requests and counts them. Subclasses run them.

    Parameters
    ----------
    tokenizer : object or None
        A tokenizer of transformers. None: prompts are token ids, and generations have no text.
    vocab_size : int
        Number of tokens in the model's vocabulary.
    stop_token_ids : frozenset of int
        Tokens that end every text of the model.
    max_model_len : int or None
        Maximum number of tokens of prompt and output that the model accepts.
    pool_tokens : int or None
        Maximum number of tokens of one sequence that fit the pools.
    is_exact : bool
        True if a sequence of more than `pool_tokens` can never run. False for a model with sliding windows: their
        blocks are freed while the sequence runs.
    sampling_defaults : dict or None
        The model's own defaults of `SamplingParams`, for a server. `submit` does not read them.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        stop_token_ids: frozenset[int],
        max_model_len: int | None,
        pool_tokens: int | None,
        is_exact: bool = True,
        sampling_defaults: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer, vocab_size)
        self.grammars = Grammars(tokenizer, vocab_size, stop_token_ids)
        self.stop_token_ids = stop_token_ids
        self.max_model_len = max_model_len
        self.sampling_defaults = sampling_defaults or {}
        self.is_accepting = True
        self.failure: BaseException | None = None  # the exception that ended all work
        self._pool_tokens, self._is_exact = pool_tokens, is_exact
        self._counts: Counter[str] = Counter()

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
        """Queue a prompt and return its `Generation`. Dropping the last reference to the generation cancels it.

        Parameters
        ----------
        prompt : str, iterable of int, or Request
            A text, token ids, or a request that `read` has checked; that one has its own `params`.
        params : SamplingParams or None
            Sampling parameters and stop conditions. None: `SamplingParams()`.
        request_id, priority, tenant, cache_salt
            As in `Scheduler.add_request`.

        Returns
        -------
        Generation
            The token stream of the request.

        Raises
        ------
        RequestRejected
            If the request can never run: its prompt is too long or empty or has unknown tokens, or its grammar is not
            supported. A ValueError.
        EngineClosed
            If the engine accepts no more requests. A RuntimeError.
        TypeError, ValueError
            If an argument has a wrong type or value. A failed call changes nothing.
        """
        most, least = (params.max_new_tokens, params.min_tokens) if isinstance(params, SamplingParams) else (None, 0)
        if most is not None and least > most:  # a request that goes on elsewhere has fewer new tokens left
            raise ValueError(f"min_tokens must be at most max_new_tokens, which is {most}, not {least}")
        options = {"request_id": request_id, "priority": priority, "tenant": tenant, "cache_salt": cache_salt}
        request = prompt if isinstance(prompt, Request) else self.read(prompt, params)
        return self._submit(request, **options)

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Number of requests that wait or run."""

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Return the maximum number of new tokens for a prompt of this length in this model and pool.

        The result is at least 1, even if the prompt itself is too long.
        """
        longest = UNBOUNDED if self.max_model_len is None else self.max_model_len
        room = longest if self._pool_tokens is None else self._pool_tokens
        return max(1, min(longest, room) - num_prompt_tokens)

    @property
    def max_prompt_tokens(self) -> int | None:
        """Maximum number of tokens of a prompt, or None without a limit.

        The pool needs room for one new token. A prompt of the model's full length is allowed, for `max_new_tokens=0`.
        """
        room = self._pool_tokens - 1 if self._pool_tokens is not None and self._is_exact else None
        return min((limit for limit in (self.max_model_len, room) if limit is not None), default=None)

    @abstractmethod
    def _submit(self, request: Request, **options: Any) -> Generation:
        """Queue a checked request."""

    def read(self, prompt: str | Iterable[int], params: SamplingParams | None = None) -> Request:
        """Check a request for `submit`. `Request.choice` makes further ones for the same prompt.

        Raises the exceptions of `submit`.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise wrong("params", "SamplingParams or None", params)
        if isinstance(prompt, Sized) and not isinstance(prompt, str):
            self._check_length(len(prompt), params)  # cheap, so it comes before the check of each token
        tokens = self.encoder.encode(prompt, self.max_prompt_tokens)
        most = self._check_length(len(tokens), params)
        ends = params.stop_token_ids
        if not params.ignore_eos or params.structured is not None:
            ends |= self.stop_token_ids
        self._check_token("logit_bias", max((token for token, _ in params.logit_bias), default=0))
        self._check_token("stop_token_ids", max(params.stop_token_ids - self.stop_token_ids, default=0))
        words = self.bad_word_ids(params.bad_words)
        grammar = None if params.structured is None else self.grammars.compiled(params.structured)
        params = params.changed(max_new_tokens=most, stop_token_ids=ends, bad_words=words)
        detokenizer = Detokenizer(self.tokenizer, tokens, params.stop, params.skip_special_tokens)
        return Request(tokens, params, detokenizer, grammar)

    def _check_length(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the number of new tokens. Raises `RequestRejected` if they do not fit the model or the pool."""
        most = params.max_new_tokens
        most = self.max_new_tokens(num_prompt_tokens) if most is None else most
        check_length(num_prompt_tokens, most, "the model", self.max_model_len)
        check_length(num_prompt_tokens, max(most, 1), "the pool", self._pool_tokens if self._is_exact else None)
        return most

    def bad_word_ids(self, words: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of bad words, as in vLLM.

        A word gets a second entry for its form after a space, if that form begins with another token.

        Parameters
        ----------
        words : tuple
            Texts or token ids, as in `SamplingParams`.

        Returns
        -------
        tuple of tuple of int
            Token ids of each form of each word.

        Raises
        ------
        RequestRejected
            If a token is not in the model's vocabulary, or a text is not valid Unicode.
        TypeError
            If a word is a text and the engine has no tokenizer.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            if not isinstance(word, str):
                self._check_token("bad_words", max(word))
                found.append(word)
                continue
            if self.tokenizer is None:
                raise TypeError(f"bad_words must be token ids without a tokenizer, not text: {word!r}")
            try:
                alone, behind = (
                    tuple(self.encoder.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
                )
            except RequestRejected as error:
                raise RequestRejected(f"bad_words: {error}", param="bad_words") from error
            found.append(alone)
            if behind[0] != alone[0] and len(behind) == len(alone):
                found.append(behind)
        return tuple(found)

    def _check_token(self, name: str, token: int) -> None:
        if token >= self.encoder.vocab_size:
            raise RequestRejected(f"a token of {name} must be below {self.encoder.vocab_size}, not {token}", param=name)

    def _stats(self, *names: str) -> dict[str, Any]:
        """Return the counters of requests and tokens, and the counters with these names."""
        ended = {reason: self._counts[reason] for reason in ENDINGS}
        tokens = ("prompt_tokens", "cached_tokens", "generated_tokens", *names)
        return {"requests": self.num_requests, "ended": ended, **{name: self._counts[name] for name in tokens}}


def check_length(num_prompt_tokens: int, max_new_tokens: int, whose: str, limit: int | None) -> None:
    """Raise `RequestRejected` if prompt and output have more tokens than `limit`.

    `whose` names the owner of the limit.

    Examples
    --------

    >>> check_length(90, 20, "the model", 100)
    Traceback (most recent call last):
    pagepool.errors.RequestRejected: the prompt is too long: 90 tokens and 20 new ones, the limit of the model is 100
    """
    if limit is not None and num_prompt_tokens + max_new_tokens > limit:
        new = f" and {max_new_tokens} new ones" if max_new_tokens else ""
        # Clients such as litellm find "prompt is too long" in the text.
        sentence = f"the prompt is too long: {num_prompt_tokens} tokens{new}, the limit of {whose} is {limit}"
        raise RequestRejected(sentence, TOO_LONG)
