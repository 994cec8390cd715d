"""Generation: the tokens of a request as they come, for any thread or event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Event
from time import monotonic

__all__ = ["Generation", "PromptToken", "Token"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes
    ----------
    token_id
        Its id.
    text
        The text that is certain since the token before; empty while a character or, perhaps, a stop string is not
        complete. The texts of all tokens, one after another, are the text of the generation.
    logprob
        The natural logarithm of the model's probability of it, or None where none was asked for.
    top_logprobs
        The same of the most likely tokens, by id.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt.

    Attributes
    ----------
    token_id : int
        The token.
    logprob : float
        Natural logarithm of the model's probability of this token after the tokens before it.
    rank : int
        Position among all tokens by probability: 1 for the most likely one.
    top_logprobs : dict of int to float
        Log probabilities of the most likely tokens, by id.
    """

    token_id: int
    logprob: float
    rank: int
    top_logprobs: dict[int, float]


class Generation:
    """The tokens of one request: an iterator and an async iterator of `Token`. `Engine.submit` makes it.

    A generation is cancelled when no reference to it is left. Each token is handed out once; `token_ids` and `text`
    have all of them. Iteration raises RuntimeError, with `error` as its cause, if the model has failed.

    Attributes
    ----------
    token_ids : list of int
        All tokens so far.
    text : str
        The text of these tokens.
    prompt_token_ids : list of int
        The tokens of the prompt.
    num_prompt_tokens : int
        The number of prompt tokens.
    prompt_logprobs : list or None
        If `SamplingParams.prompt_logprobs` asks for them: None for the first token of the prompt, and a `PromptToken`
        for each further one. The list is complete before the first token comes. Otherwise None.
    num_cached : int
        Tokens of the prompt that the prefix cache had, once a token has come.
    submitted_at, scheduled_at, first_token_at, ended_at : float or None
        Times of `time.monotonic()`: the call of `submit`, the first step, the first token and the end. None before.
    time_to_first_token : float or None
        Seconds from `submit` to the first token.
    finish_reason : str or None
        "stop" at a stop token or stop string, "length" at the limit, "abort" after a cancel, "error" if the model
        failed. None while it runs.
    error : BaseException or None
        The exception of a failed model.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        cancel: Callable[[], None],
        prompt_logprobs: list[PromptToken | None] | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.prompt_token_ids, self.prompt_logprobs = prompt_token_ids, prompt_logprobs
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_cached = 0
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self._cancel = cancel
        self.submitted_at = monotonic()
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self._texts: list[str] = []
        self._pending: deque[Token] = deque()
        self._changed = Condition()
        self._ended = Event()  # for threads that wait for the end only: a token does not wake them
        self._futures: list[asyncio.Future[None]] = []  # of coroutines that wait for a change

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return "".join(self._texts)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from `submit` to the first token, or None."""
        return None if self.first_token_at is None else self.first_token_at - self.submitted_at

    def cancel(self) -> None:
        """Stop it: it ends before the next step with the reason "abort". Nothing happens when it has ended."""
        if self.finish_reason is None:
            self._cancel()

    close = cancel

    def result(self, timeout: float | None = None) -> Generation:
        """Wait until it has ended and return it. Raises TimeoutError after `timeout` seconds; it goes on then."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{len(self.token_ids)} tokens came within {timeout} s, and it has not ended")
        return self

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Token:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self.finish_reason is not None)
            token = self._take()
        if token is None:
            raise StopIteration
        return token

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Token:
        while True:
            with self._changed:
                if self._pending or self.finish_reason is not None:
                    token = self._take()
                    break
                future = asyncio.get_running_loop().create_future()
                self._futures.append(future)
            await future
        if token is None:
            raise StopAsyncIteration
        return token

    def _take(self) -> Token | None:
        """The next token, or None at the end."""
        if self._pending:
            return self._pending.popleft()
        if self.error is not None:
            raise RuntimeError(f"the generation failed: {self.error}") from self.error
        return None

    # For the engine, which calls them on its own thread.

    def _put(self, token: Token, num_cached: int) -> None:
        with self._changed:
            if self.first_token_at is None:
                self.first_token_at = monotonic()
                self.num_cached = num_cached
            self.token_ids.append(token.token_id)
            self._texts.append(token.text)
            self._pending.append(token)
            self._notify()

    def _end(self, reason: str, error: BaseException | None = None) -> None:
        with self._changed:
            self.finish_reason, self.error, self.ended_at = reason, error, monotonic()
            self._notify()
        self._ended.set()

    def _notify(self) -> None:
        self._changed.notify_all()
        futures, self._futures = self._futures, []
        for future in futures:
            with suppress(RuntimeError):  # its event loop is closed: no coroutine waits there
                future.get_loop().call_soon_threadsafe(_wake, future)

    def __repr__(self) -> str:
        return f"<Generation: {len(self.token_ids)} tokens, {self.finish_reason or 'running'}>"


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():  # a coroutine that was cancelled waits no more
        future.set_result(None)
