"""The generations of one HTTP request, and its stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from pagepool.engine.generation import Generation, Token
from pagepool.errors import EngineClosed, RequestRejected
from pagepool.serve.errors import RequestError
from pagepool.serve.protocol import Answer

if TYPE_CHECKING:
    from pagepool.serve.metrics import Metrics

__all__ = ["STOPPED", "EventStream", "Run", "events"]

logger = logging.getLogger("pagepool")

MAX_QUEUED = 64  # maximum number of events of a stream that its client has not read
STOPPED = "the request was aborted: the server is shutting down"


class Run:
    """The generations of one HTTP request. A timeout or a disconnect cancels all of them.

    Parameters
    ----------
    name : str
        The request id, for the log.
    generations : list of Generation
        One for each choice.
    began : float
        Time of the request, by `monotonic()`.
    timeout : float
        Seconds from `began` until the generations are cancelled.
    metrics : Metrics
        Counts each generation that ends.
    running : set of Run
        Holds this object until it is cancelled.
    structured_field : str or None
        The field with the grammar of the request.
    """

    def __init__(
        self,
        name: str,
        generations: list[Generation],
        began: float,
        timeout: float,
        metrics: Metrics,
        running: set[Run],
        structured_field: str | None = None,
    ) -> None:
        self.generations, self._structured_field = generations, structured_field
        self.name, self._running = name, running
        running.add(self)
        self._began, self._timeout, self._metrics = began, timeout, metrics
        self._is_late = False
        self._timer = asyncio.get_running_loop().call_later(began + timeout - monotonic(), self._expire)

    def cancel(self) -> None:
        """Cancel the generations that have not ended."""
        self._timer.cancel()
        self._running.discard(self)
        for generation in self.generations:
            generation.cancel()

    async def tokens_of(self, generation: Generation) -> AsyncIterator[Token]:
        """Yield the tokens of a generation. Raises `RequestError` if it fails, times out or is aborted."""
        try:
            async for token in generation:
                yield token
        except RuntimeError as error:
            if isinstance(error.__cause__, EngineClosed):
                raise RequestError(503, str(error.__cause__)) from error
            if isinstance(error.__cause__, RequestRejected):
                cause = error.__cause__
                param = self._structured_field if cause.param == "structured" else cause.param
                raise RequestError(400, str(cause), cause.code, param) from error
            # The engine has logged the traceback, with its own number of the request.
            logger.error("the request %s failed: %s: %s", self.name, type(error.__cause__).__name__, error.__cause__)
            sentence = f"the generation failed: see request {self.name} in the server's log"
            raise RequestError(500, sentence) from error
        self._metrics.ended(generation, self._began)
        if generation.miss is not None:
            logger.info("the request %s: %s", self.name, generation.miss)
        if generation.finish_reason == "abort":
            late = f"the request took more than {self._timeout:g} s"
            raise RequestError(503, late if self._is_late else STOPPED, may_retry=not self._is_late)

    async def all_tokens(self) -> list[list[Token]]:
        """Wait for all generations and return the tokens of each one."""
        found = []
        for generation in self.generations:
            found.append([token async for token in self.tokens_of(generation)])
        return found

    def _expire(self) -> None:
        self._is_late = True
        self.cancel()


class EventStream(StreamingResponse):
    """Server-sent events. When the stream ends for any reason, generations that still run are cancelled."""

    def __init__(self, run: Run, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._run = run

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with suppress(ClientDisconnect):  # the response has begun, so no error response can be sent
                await super().__call__(scope, receive, send)
        finally:
            self._run.cancel()


async def events(run: Run, answer: Answer, include_usage: bool) -> AsyncIterator[str]:
    """Yield the events of a stream: the chunks of all choices, the usage if requested, and the end mark.

    A failure is logged, and its error is the last event.
    """
    queue: asyncio.Queue[str | Exception | None] = asyncio.Queue(MAX_QUEUED)
    usage = {"usage": None} if include_usage else {}

    def chunk(data: dict[str, Any]) -> str:
        return answer.event({**data, **usage})

    async def pump(index: int, generation: Generation) -> None:
        offset, has_begun = len(answer.prompt_of(index)), False

        async def begin() -> None:
            nonlocal has_begun
            if not has_begun and answer.begins_with_prompt:
                # A prompt may have many log probabilities: the event loop does not wait for their JSON.
                await queue.put(await asyncio.to_thread(lambda: chunk(answer.echo(index, generation))))
            has_begun = True

        try:
            async for token in run.tokens_of(generation):
                await begin()
                if token.text or answer.has_logprobs:
                    piece = answer.piece(index, token, offset)
                    if piece is not None:
                        await queue.put(chunk(piece))
                offset += len(token.text)
            await begin()
            await queue.put(chunk(answer.last(index, generation.finish_reason)))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(*numbered)) for numbered in enumerate(run.generations)]
    running = len(tasks)
    try:
        for index in range(running):
            if (first := answer.first(index, run.generations[index])) is not None:
                yield chunk(first)
        while running:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
        if include_usage:
            yield answer.event(answer.total(run.generations))
        yield answer.end
    except RequestError as error:
        yield answer.event_of(error)
    except Exception as error:
        logger.error("the stream of the request %s failed", run.name, exc_info=error)
        sentence = f"internal error: see request {run.name} in the server's log"
        yield answer.event_of(RequestError(500, sentence))
    finally:
        for task in tasks:
            task.cancel()
