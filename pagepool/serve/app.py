"""The ASGI app: OpenAI's completions and chats over an engine. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic, time
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagepool.engine.generation import Generation
from pagepool.engine.intake import check_length
from pagepool.engine.protocol import TextEngine
from pagepool.engine.tokenizing import MAX_TOKENIZERS
from pagepool.errors import EngineClosed, RequestRejected
from pagepool.serve.http import (
    CountResponses,
    log_name,
    on_disconnect,
    on_failure,
    on_http_error,
    on_refusal,
    read_all,
    read_id,
)
from pagepool.serve.metrics import Metrics
from pagepool.serve.places import Places, Waiting
from pagepool.serve.protocol import Answer, ChatAnswer, Request, RequestError, read_body, read_request
from pagepool.serve.runs import STOPPED, EventStream, Run, events
from pagepool.serve.token_texts import TokenTexts

__all__ = ["create_app"]

LARGE_BODY_BYTES = 256 << 10  # a larger body is parsed outside the event loop
Found = TypeVar("Found")


def create_app(
    engine: TextEngine,
    model: str,
    *,
    max_prompt_tokens: int | None = None,
    max_requests: int = 256,
    timeout: float = 600.0,
) -> Starlette:
    """Return an ASGI app that serves an engine. The caller closes the engine.

    model              the name under which clients ask for it
    max_prompt_tokens  longer prompts get status 400; None: what the model and the pool have room for
    max_requests       choices that run, wait or are tokenized; more get status 429
    timeout            seconds after which a request that has not ended gets status 503 and is cancelled

    `app.state.stop()` ends all requests with status 503, and streams with an error as their last event. It is called
    in the event loop.

    A client that disconnects cancels its request. The header `X-Request-Id` is the `request_id` of its choices, with
    "/" and their number behind it where there are several. While the engine drains, requests get status 503. Every
    error is JSON, as OpenAI's clients read it. Clients do not see the text of an exception: it is logged with an id,
    the header's or a new one, and the error names the id.

    Raises ImportError where starlette or prometheus_client is missing.
    """
    server = Server(engine, model, max_prompt_tokens, max_requests, timeout)
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{model:path}", server.one_model),
        Route("/health", server.health),
        Route("/metrics", server.show_metrics),
    ]
    handlers: dict[Any, Any] = {
        RequestError: on_refusal,
        HTTPException: on_http_error,
        ClientDisconnect: on_disconnect,
        Exception: on_failure,
    }
    counting = Middleware(CountResponses, server.metrics)
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=[counting])
    app.state.stop = server.stop
    return app


class Server:
    """The endpoints, over one engine."""

    def __init__(
        self, engine: TextEngine, model: str, max_prompt_tokens: int | None, max_requests: int, timeout: float
    ) -> None:
        self._engine, self._model = engine, model
        self._max_prompt_tokens, self._timeout = max_prompt_tokens, timeout
        self.metrics = Metrics(engine)
        self._texts = TokenTexts(engine.tokenizer)
        self._encoding = ThreadPoolExecutor(MAX_TOKENIZERS, "pagepool-encode")
        self._submitting = ThreadPoolExecutor(1, "pagepool-submit")
        self._places = Places(engine, max_requests)
        self._stopping = asyncio.Event()
        self._runs: set[Run] = set()  # that have not ended
        self._created = int(time())

    def stop(self) -> None:
        """End all requests. Called in the event loop."""
        self._stopping.set()
        for run in list(self._runs):
            run.cancel()

    async def completions(self, http: HttpRequest) -> Response:
        """POST /v1/completions"""
        return await self._answer(http, is_chat=False)

    async def chat(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions"""
        return await self._answer(http, is_chat=True)

    async def models(self, http: HttpRequest) -> Response:
        """GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def one_model(self, http: HttpRequest) -> Response:
        """GET /v1/models/NAME"""
        self._check_model(http.path_params["model"])
        return JSONResponse(self._model_object())

    async def health(self, http: HttpRequest) -> Response:
        """GET /health: status 503 when no requests are taken."""
        if self._engine.is_accepting:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, 503)

    async def show_metrics(self, http: HttpRequest) -> Response:
        """GET /metrics"""
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model_object(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "pagepool"}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            raise RequestError(404, f"there is no model {name!r}, only {self._model!r}", "model_not_found", "model")

    async def _answer(self, http: HttpRequest, is_chat: bool) -> Response:
        began = monotonic()
        body = await read_all(http)
        if len(body) > LARGE_BODY_BYTES:
            request = await asyncio.to_thread(lambda: read_request(read_body(body), is_chat))
        else:
            request = read_request(read_body(body), is_chat)
        self._check_model(request.model)
        request_id = read_id(http)
        generations = await self._finish(http, self._start(request, request_id))
        kind = ChatAnswer if is_chat else Answer
        answer = kind(self._model, self._texts, request.n)
        run = Run(log_name(http), generations, began, self._timeout, self.metrics, self._runs)
        if self._stopping.is_set():
            run.cancel()
        has_logprobs = request.params.logprobs is not None
        if request.stream:
            return EventStream(run, events(run, answer, has_logprobs, request.include_usage))
        try:
            tokens = await self._finish(http, run.all_tokens())
        finally:
            run.cancel()
        if not has_logprobs:
            return JSONResponse(answer.all(generations, tokens, False))
        return await asyncio.to_thread(lambda: JSONResponse(answer.all(generations, tokens, True)))

    async def _finish(self, http: HttpRequest, work: Coroutine[Any, Any, Found]) -> Found:
        """What `work` returns. It is cancelled when the client has left or the server stops, which is raised."""

        async def left() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                await asyncio.sleep(0)

        working, leaving = asyncio.create_task(work), asyncio.create_task(left())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([working, leaving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if leaving.done():
                raise ClientDisconnect
            raise RequestError(503, STOPPED)
        finally:
            for task in (working, leaving, stopping):
                task.cancel()

    async def _start(self, request: Request, request_id: str | None) -> list[Generation]:
        """Hand all choices of all prompts to the engine. Raises `RequestError`; then none of them runs."""
        if not self._engine.is_accepting:
            reason = "it is shutting down" if self._engine.failure is None else "the engine has failed"
            raise RequestError(503, f"the server takes no more requests: {reason}")
        limits = [self._max_prompt_tokens, self._engine.max_prompt_tokens]
        most = min((limit for limit in limits if limit is not None), default=None)
        count, loop = len(request.prompts) * request.n, asyncio.get_running_loop()
        encode = self._engine.encoder.encode_chat if request.is_chat else self._engine.encoder.encode
        waiting = self._places.take(count)
        try:
            prompts = []
            for prompt in request.prompts:
                if isinstance(prompt, list) and not request.is_chat:
                    check_length(len(prompt), 0, "the server", most)  # before each token is looked at
                prompts.append(await loop.run_in_executor(self._encoding, encode, prompt, most))
                check_length(len(prompts[-1]), 0, "the server", self._max_prompt_tokens)
            return await loop.run_in_executor(self._submitting, self._submit, request, prompts, request_id, waiting)
        except RequestRejected as error:
            raise RequestError(400, str(error), error.code) from error
        except EngineClosed as error:
            raise RequestError(503, str(error)) from error
        finally:
            waiting.end()

    def _submit(
        self, request: Request, prompts: list[list[int]], request_id: str | None, waiting: Waiting
    ) -> list[Generation]:
        seed, name = request.params.seed, request_id
        generations: list[Generation] = []
        try:
            for tokens in prompts:
                for number in range(request.n):
                    # Choices of one prompt differ.
                    params = replace(request.params, seed=None if seed is None else seed + number)
                    if request_id is not None and len(prompts) * request.n > 1:
                        name = f"{request_id}/{len(generations)}"
                    with waiting.hand_over():
                        generations.append(self._engine.submit(tokens, params, request_id=name, **request.options))
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        return generations
