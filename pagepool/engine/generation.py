"""Generation: the token stream of a request, for threads and event loops."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Event
from time import monotonic
from typing import Any

from pagepool.errors import EngineClosed
from pagepool.prefix.explain import Explanation

__all__ = ["Generation", "PromptToken", "Token"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes
    ----------
    token_id : int
        Token id.
    text : str
        Text that became final with this token. It is empty while a character is incomplete or while the text may be
        the beginning of a stop string. The concatenated texts of all tokens are the text of the generation.
    logprob : float or None
        Natural log probability of the token under the model. None if the request does not ask for it.
    top_logprobs : dict of int to float
        Natural log probabilities of the most likely tokens, by token id.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt with its log probability.

    Attributes
    ----------
    token_id : int
        Token id.
    logprob : float
        Natural log probability of the token under the model, given the tokens before it.
    rank : int
        Rank of the token by probability; 1 is the most likely token.
    top_logprobs : dict of int to float
        Natural log probabilities of the most likely tokens, by token id.
    """

    token_id: int
    logprob: float
    rank: int
    top_logprobs: dict[int, float]


class Generation:
    """The tokens of one request, made by `Engine.submit`: an iterator and an async iterator of `Token`.

    Iteration returns each token once; `token_ids` and `text` keep all of them. If the model fails, iteration raises
    RuntimeError with `error` as its cause. A generation is cancelled when the last reference to it is dropped.

    Attributes
    ----------
    token_ids : list of int
        All generated tokens so far.
    prompt_token_ids : list of int
        The tokens of the prompt.
    num_prompt_tokens : int
        Number of tokens of the prompt.
    prompt_logprobs : list or None
        A `PromptToken` for each token of the prompt; None for the first one, which has no probability. The list is
        complete before the first token is generated. It is None without `SamplingParams.prompt_logprobs`.
    num_cached : int
        Prompt tokens that were in the prefix cache. Set with the first token.
    num_accepted, num_rejected : int
        Drafts that became output, and all others: the model rejected them, or a stop string came before them.
    submitted_at : float
        Time of `submit`, by `time.monotonic()`.
    scheduled_at, first_token_at, ended_at : float or None
        Times of the first step, the first token and the end, by `time.monotonic()`. None until then.
    finish_reason : str or None
        "stop" at a stop token or stop string, "length" at the limit, "abort" if it was cancelled, "error" if the model
        failed. None while it runs.
    stop_string : str or None
        The string of `SamplingParams.stop` that ended the text.
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
        self.num_cached = self.num_accepted = self.num_rejected = 0
        self._miss: Any = None  # the arguments of `Explanation.of`
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.error: BaseException | None = None
        self._cancel = cancel
        self._pid = os.getpid()
        self.submitted_at = monotonic()
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self._texts: list[str] = []
        self._pending: deque[Token] = deque()
        self._changed = Condition()
        self._ended = Event()  # for `result`: threads in it are not woken by each new token
        self._futures: list[asyncio.Future[None]] = []  # one for each waiting coroutine

    @property
    def text(self) -> str:
        """The text of all tokens so far."""
        return "".join(self._texts)

    @property
    def miss(self) -> Explanation | None:
        """Why the other prompt tokens were not in the prefix cache, for `SchedulerConfig.explain_misses`.

        None before the first token, in a cluster, and if the request does not read the cache.
        """
        return None if self._miss is None else Explanation.of(*self._miss)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from `submit` to the first token, or None."""
        return None if self.first_token_at is None else self.first_token_at - self.submitted_at

    def cancel(self) -> None:
        """End the generation before its next step, with the reason "abort". Does nothing if it has ended."""
        if self.finish_reason is None:
            self._cancel()

    close = cancel

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end.

        Parameters
        ----------
        timeout : float, optional
            Maximum time to wait, in seconds. Default: no limit.

        Returns
        -------
        Generation
            This object.

        Raises
        ------
        TimeoutError
            If it has not ended after `timeout` seconds. The generation continues.
        RuntimeError
            If the model failed. The cause is `error`, and `token_ids` has the tokens until then.
        """
        self._check_process()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the generation did not end within {timeout} s: got {len(self.token_ids)} tokens")
        self._check_error()
        return self

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Token:
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self.finish_reason is not None)
            token = self._take()
        if token is None:
            raise StopIteration
        return token

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Token:
        self._check_process()
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
        """Return the next pending token, or None at the end."""
        if self._pending:
            return self._pending.popleft()
        self._check_error()
        return None

    def _check_error(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"the generation failed: {self.error}") from self.error

    def _check_process(self) -> None:
        """Raise `EngineClosed` in a forked child, in which no thread runs the request. Comes before any lock."""
        if os.getpid() != self._pid:
            raise EngineClosed(f"the generation runs in process {self._pid}, and this is a child of it")

    # Only the engine's stepping thread calls the methods below.

    def _put(self, token: Token, num_cached: int, miss: Any = None) -> None:
        with self._changed:
            if self.first_token_at is None:
                self.first_token_at = monotonic()
                self.num_cached, self._miss = num_cached, miss
            self.token_ids.append(token.token_id)
            self._texts.append(token.text)
            self._pending.append(token)
            self._notify()

    def _end(self, reason: str, error: BaseException | None = None, stop_string: str | None = None) -> None:
        with self._changed:
            self.stop_string = stop_string
            self.finish_reason, self.error, self.ended_at = reason, error, monotonic()
            self._notify()
        self._ended.set()

    def _notify(self) -> None:
        self._changed.notify_all()
        futures, self._futures = self._futures, []
        for future in futures:
            with suppress(RuntimeError):  # the event loop is closed, so its coroutines no longer wait
                future.get_loop().call_soon_threadsafe(_wake, future)

    def __repr__(self) -> str:
        return f"<Generation: {len(self.token_ids)} tokens, {self.finish_reason or 'running'}>"


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():  # it is done if its coroutine was cancelled
        future.set_result(None)
