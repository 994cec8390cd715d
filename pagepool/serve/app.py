"""The ASGI app: OpenAI's completions and chat completions over an engine. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic, time
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagepool._version import __version__
from pagepool.engine.generation import Generation
from pagepool.engine.grammar_check import FINAL
from pagepool.engine.intake import check_length
from pagepool.engine.protocol import TextEngine
from pagepool.engine.sampling import SamplingParams
from pagepool.engine.structured import MAX_COMPILING, Structured
from pagepool.engine.token_texts import TokenTexts
from pagepool.engine.tokenizing import MAX_TOKENIZERS
from pagepool.errors import EngineClosed, RequestRejected
from pagepool.serve.access import Access, Keys, salt_of
from pagepool.serve.channels import Channels, has_channels, stop_tokens, with_thinking
from pagepool.serve.errors import RequestError, quoted
from pagepool.serve.fields import PATHS
from pagepool.serve.http import Bodies, Observer, log_name, on_disconnect, on_http_error, on_refusal, read_id
from pagepool.serve.message_parts import MessageParts, Tags
from pagepool.serve.messages import MessagesAnswer, read_count, read_messages
from pagepool.serve.metrics import Metrics
from pagepool.serve.places import Places, Waiting
from pagepool.serve.protocol import (
    MAX_ECHOED,
    Answer,
    ChatAnswer,
    Request,
    TokenizeRequest,
    read_body,
    read_detokenize,
    read_request,
    read_tokenize,
)
from pagepool.serve.reasoning import CLOSE, Reasoning, begins_open, thinks
from pagepool.serve.responses import ResponsesAnswer, read_response
from pagepool.serve.runs import STOPPED, EventStream, Run, events
from pagepool.serve.tools import Form, ToolCalls, form_of, grammar_of, schema_error

__all__ = ["create_app"]

LARGE_BODY_BYTES = 64 << 10  # a larger body is parsed outside the event loop, and a larger answer written there
MAX_PROMPT_REPORTED = 1 << 18  # prompt log probabilities per HTTP request: about 100 MiB
Found = TypeVar("Found")


def create_app(
    engine: TextEngine,
    model: str,
    *,
    max_prompt_tokens: int | None = None,
    max_requests: int = 256,
    timeout: float = 600.0,
    api_keys: Mapping[str, str] | None = None,
    admin_key: str | None = None,
    allowed_hosts: Iterable[str] | None = None,
    allowed_origins: Iterable[str] | None = None,
    priorities: tuple[int, int] = (0, 0),
    shows_cached_tokens: bool = False,
    shows_misses: bool = False,
    special_tokens_in_texts: bool = False,
) -> Starlette:
    """Return an ASGI app that serves an engine. The caller closes the engine.

    Parameters
    ----------
    engine : TextEngine
        Runs the requests, usually an `Engine`.
    model : str
        Name of the model in requests and answers.
    max_prompt_tokens : int, optional
        Maximum number of tokens of a prompt. Longer prompts get status 400. Default: the limit of model and pool.
    max_requests : int
        Maximum number of choices that run, wait or are being tokenized. Requests for more get status 429.
    timeout : float
        Seconds that a request may take. After that it is cancelled and gets status 503.
    api_keys : mapping of str to str, optional
        The tenant of each API key. The scheduler gets the tenant, and tenants do not share prefixes. Default: requests
        need no key.
    admin_key : str, optional
        The key for `POST /reset_prefix_cache`. Default: clients on this machine may use that path.
    allowed_hosts : iterable of str, optional
        Accepted names in the Host header, in addition to "localhost" and IP addresses. Default: all.
    allowed_origins : iterable of str, optional
        Accepted values of the Origin header; their answers have CORS headers. Default: all, without CORS headers.
    priorities : tuple of two ints
        The lowest and the highest priority that a request may have.
    shows_cached_tokens : bool
        Report in the usage how many tokens of the prompt were in the prefix cache. This tells a client something about
        the prompts of other clients.
    shows_misses : bool
        Report also why the other tokens of the prompt were not cached, if the engine has
        `SchedulerConfig.explain_misses`. A client then sees up to 6 tokens of another prompt with the same salt.
    special_tokens_in_texts : bool
        As in `Encoder.encode_chat`.

    Returns
    -------
    Starlette
        The app. `app.state.drain()` refuses new requests with status 503, and `/ready` answers 503 from then on.
        `app.state.stop()` ends all requests with status 503 and all streams with an error as their last event. Both
        must be called in the event loop. `app.state.set_api_keys(api_keys)` replaces the keys.

    Raises
    ------
    ImportError
        If starlette or prometheus_client is missing.
    ValueError
        If `SamplingParams` refuses the sampling defaults of the engine.

    Notes
    -----
    A request is cancelled when its client disconnects. The header `X-Request-Id` becomes the `request_id` of the
    generation. A request for several choices appends "/" and the number of the choice. While the engine drains,
    requests get status 503.

    Errors are JSON objects in OpenAI's format. Clients never see the text of an unexpected exception. It is logged with
    the request id (from the header, or a new one), and the error names this id.
    """
    shown = {"shows_cached_tokens": shows_cached_tokens, "shows_misses": shows_misses}
    server = Server(engine, model, max_prompt_tokens, max_requests, timeout, priorities, shown)
    if special_tokens_in_texts:
        server.encode_chat = partial(engine.encoder.encode_chat, special_tokens_in_texts=True)
    routes = [Route(path, getattr(server, one.handler), methods=[one.method]) for path, one in PATHS.items()]
    handlers: dict[Any, Any] = {
        RequestError: on_refusal,
        HTTPException: on_http_error,
        ClientDisconnect: on_disconnect,
    }
    layers = [Middleware(Observer, server.metrics)]
    if allowed_origins:
        cross = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["x-request-id"]}
        layers.append(Middleware(CORSMiddleware, allow_origins=list(allowed_origins), **cross))
    keys = Keys(api_keys or {}, admin_key)
    layers.append(Middleware(Access, keys, allowed_hosts, allowed_origins))
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=layers)
    app.state.stop, app.state.drain, app.state.set_api_keys = server.stop, server.drain, keys.set
    return app


async def answered(build: Callable[[], dict[str, Any]], size: int) -> Response:
    """Return a response with the object of `build`, which has about `size` values or characters.

    A large one is built and written as JSON outside the event loop.
    """
    if size <= LARGE_BODY_BYTES:
        return JSONResponse(build())
    return await asyncio.to_thread(lambda: JSONResponse(build()))


def refusal_of(error: RequestRejected, prompt: str, structured: str | None = None) -> RequestError:
    """Return the response to a request that the engine refuses. The arguments are fields with prompt and grammar."""
    param = structured if error.param == "structured" else error.param
    return RequestError(400, str(error), error.code, param or prompt)


class Server:
    """The endpoints, over one engine."""

    def __init__(
        self,
        engine: TextEngine,
        model: str,
        max_prompt_tokens: int | None,
        max_requests: int,
        timeout: float,
        priorities: tuple[int, int],
        shown: dict[str, bool],
    ) -> None:
        self._engine, self._model = engine, model
        try:
            SamplingParams(**engine.sampling_defaults)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the model's generation_config: {error}") from error
        self._max_prompt_tokens, self._timeout = max_prompt_tokens, timeout
        self._priorities, self._shown = priorities, shown
        self.metrics = Metrics(engine)
        self._texts = TokenTexts(engine.tokenizer)
        self._has_channels = has_channels(engine.tokenizer)
        self._thinks = thinks(engine.tokenizer) and not self._has_channels
        try:
            self._form: Form | str = form_of(engine.tokenizer)
        except ValueError as error:
            self._form = str(error)
        with suppress(RequestRejected):  # later it would hold up the steps of all requests
            engine.grammars.open()
        self._encoding = ThreadPoolExecutor(MAX_TOKENIZERS, "pagepool-encode")
        self._submitting = ThreadPoolExecutor(1, "pagepool-submit")
        self._compiling = ThreadPoolExecutor(MAX_COMPILING, "pagepool-compile")
        self.encode_chat: Callable[..., list[int]] = engine.encoder.encode_chat
        self._places = Places(engine, max_requests)
        self._bodies = Bodies()
        self._stopping = asyncio.Event()
        self._is_draining = False
        self._runs: set[Run] = set()  # runs that have not ended
        self._created = int(time())

    def drain(self) -> None:
        """Refuse new requests. Must be called in the event loop."""
        self._is_draining = True

    def stop(self) -> None:
        """End all requests. Must be called in the event loop."""
        self._stopping.set()
        for run in list(self._runs):
            run.cancel()

    async def completions(self, http: HttpRequest) -> Response:
        """POST /v1/completions"""
        return await self._answer(http, partial(read_request, is_chat=False), Answer)

    async def chat(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions"""
        return await self._answer(http, partial(read_request, is_chat=True), ChatAnswer)

    async def messages(self, http: HttpRequest) -> Response:
        """POST /v1/messages, as in Anthropic's API."""
        return await self._answer(http, read_messages, MessagesAnswer)

    async def responses(self, http: HttpRequest) -> Response:
        """POST /v1/responses, as in OpenAI's API with `store: false`."""
        return await self._answer(http, read_response, ResponsesAnswer)

    async def models(self, http: HttpRequest) -> Response:
        """GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def one_model(self, http: HttpRequest) -> Response:
        """GET /v1/models/NAME"""
        self._check_model(http.path_params["model"])
        return JSONResponse(self._model_object())

    async def health(self, http: HttpRequest) -> Response:
        """GET /health: status 503 if the engine has failed."""
        if self._engine.failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed"}, 503)

    async def ready(self, http: HttpRequest) -> Response:
        """GET /ready: status 503 if no requests are accepted."""
        if self._accepts:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "failed" if self._engine.failure is not None else "draining"}, 503)

    @property
    def _accepts(self) -> bool:
        return self._engine.is_accepting and not self._is_draining

    async def reset_prefix_cache(self, http: HttpRequest) -> Response:
        """POST /reset_prefix_cache: forget all cached prefixes."""
        try:
            await asyncio.to_thread(self._engine.reset_prefix_cache)
        except EngineClosed as error:
            raise RequestError(503, str(error)) from error
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, http: HttpRequest) -> Response:
        """GET /metrics"""
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, http: HttpRequest) -> Response:
        """GET /version"""
        return JSONResponse({"version": __version__})

    async def tokenize(self, http: HttpRequest) -> Response:
        """POST /tokenize: the token ids of a prompt or a chat, as in vLLM."""
        limit = self._engine.max_model_len
        return await self._tokenized(
            http, read_tokenize, lambda tokens: {"count": len(tokens), "max_model_len": limit, "tokens": tokens}
        )

    async def count_tokens(self, http: HttpRequest) -> Response:
        """POST /v1/messages/count_tokens, as in Anthropic's API."""
        return await self._tokenized(http, read_count, lambda tokens: {"input_tokens": len(tokens)})

    async def _tokenized(
        self,
        http: HttpRequest,
        reading: Callable[[dict[str, Any]], TokenizeRequest],
        build: Callable[[list[int]], dict[str, Any]],
    ) -> Response:
        """Tokenize the prompt of a request and return the response with `build(tokens)`."""
        request = await self._read(http, reading)
        self._check_model(request.model)
        encode: Callable[..., list[int]] = partial(
            self._engine.encoder.encode, add_special_tokens=request.add_special_tokens
        )
        if request.is_chat:
            encode = self._chat_encoder(request)

        async def work() -> Response:
            try:
                tokens = await self._encode(encode, request.prompt)
            except RequestRejected as error:
                raise refusal_of(error, "messages" if request.is_chat else "prompt") from error
            return await answered(lambda: build(tokens), len(tokens))

        return await self._in_place(http, work())

    async def detokenize(self, http: HttpRequest) -> Response:
        """POST /detokenize: the text of token ids, as in vLLM."""
        model, tokens = await self._read(http, read_detokenize)
        self._check_model(model)
        vocab_size, tokenizer = self._engine.encoder.vocab_size, self._engine.tokenizer
        if tokenizer is None:
            raise RequestError(400, "the model has no tokenizer")
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < vocab_size:
                raise RequestError(400, f"tokens must be from 0 to {vocab_size - 1}, not {token}", param="tokens")
        loop = asyncio.get_running_loop()

        async def work() -> Response:
            def decode() -> Response:
                return JSONResponse({"prompt": tokenizer.decode(tokens)})

            return await loop.run_in_executor(self._encoding, decode)

        return await self._in_place(http, work())

    async def _read(self, http: HttpRequest, reading: Callable[[dict[str, Any]], Found]) -> Found:
        """Read the body of a request and return `reading(object)`. A large body is parsed outside the event loop."""
        async with self._bodies.reading(http) as body:
            if len(body) > LARGE_BODY_BYTES:
                return await asyncio.to_thread(lambda: reading(read_body(body)))
            return reading(read_body(body))

    async def _in_place(self, http: HttpRequest, work: Coroutine[Any, Any, Response]) -> Response:
        """Return the result of `work`, which counts as one request."""
        try:
            waiting = self._places.take(1)
        except BaseException:
            work.close()
            raise
        try:
            return await self._finish(http, work)
        finally:
            waiting.end()

    def _model_object(self) -> dict[str, Any]:
        named = {"id": self._model, "object": "model", "created": self._created, "owned_by": "pagepool"}
        return {**named, "max_model_len": self._engine.max_model_len}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            sentence = f"model {quoted(name)!r} does not exist: this server has {self._model!r}"
            raise RequestError(404, sentence, "model_not_found", "model")

    def _check_priority(self, priority: int) -> None:
        low, high = self._priorities
        if not low <= priority <= high:
            allowed = f"from {low} to {high}" if low < high else f"{low} on this server"
            raise RequestError(400, f"priority must be {allowed}, not {priority}", param="priority")

    async def _answer(self, http: HttpRequest, reading: Callable[..., Request], kind: type[Answer]) -> Response:
        began = monotonic()
        request = await self._read(http, partial(reading, defaults=self._engine.sampling_defaults))
        self._check_model(request.model)
        self._check_priority(request.options.get("priority", 0))
        tenant = http.scope["state"]["tenant"]
        if tenant is not None:
            salt = salt_of(tenant, request.options.get("cache_salt"))
            request.options |= {"tenant": tenant, "cache_salt": salt}
        request_id = read_id(http)
        generations = await self._finish(http, self._start(request, request_id))
        texts = await self._prompt_texts(request) if request.echo else ()
        answer = kind(self._model, self._texts, request, texts, **self._shown)
        run = Run(log_name(http), generations, began, self._timeout, self.metrics, self._runs, request.structured_field)
        if self._stopping.is_set():
            run.cancel()
        if request.stream:
            return EventStream(run, events(run, answer, request.include_usage))
        try:
            tokens = await self._finish(http, run.all_tokens())
        finally:
            run.cancel()
        size = sum(map(len, texts)) * request.n + sum(map(len, tokens))
        if answer.has_logprobs or request.shows_prompt_logprobs:
            size = LARGE_BODY_BYTES + 1
        return await answered(lambda: answer.all(generations, tokens), size)

    async def _finish(self, http: HttpRequest, work: Coroutine[Any, Any, Found]) -> Found:
        """Return the result of `work`.

        If the client disconnects or the server stops first, `work` is cancelled, and `ClientDisconnect` or
        `RequestError` is raised.
        """

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

    @property
    def _most_tokens(self) -> int | None:
        """Maximum number of tokens of a prompt: the lower of the limits of the server and the engine."""
        limits = [self._max_prompt_tokens, self._engine.max_prompt_tokens]
        return min((limit for limit in limits if limit is not None), default=None)

    async def _encode(self, encode: Any, prompt: Any) -> list[int]:
        """Tokenize a prompt in one of the tokenizer threads. Raises `RequestRejected`."""
        loop, most = asyncio.get_running_loop(), self._most_tokens
        tokens: list[int] = await loop.run_in_executor(self._encoding, encode, prompt, most)
        return tokens

    def _chat_encoder(self, request: Request | TokenizeRequest) -> Callable[..., list[int]]:
        """Return the function that writes messages with the chat template."""
        encode = partial(self.encode_chat, template_options=request.template_options, tools=request.tools)
        return (lambda messages, most: encode(with_thinking(messages), most)) if self._has_channels else encode

    async def _prompt_texts(self, request: Request) -> list[str]:
        """Return the texts of the prompts. Token ids are decoded in one of the tokenizer threads."""
        loop, tokenizer = asyncio.get_running_loop(), self._engine.tokenizer
        found = []
        for prompt in request.prompts:
            if not isinstance(prompt, str):
                decode = (lambda _: "") if tokenizer is None else tokenizer.decode
                prompt = await loop.run_in_executor(self._encoding, decode, prompt)
            found.append(prompt)
        return found

    async def _start(self, request: Request, request_id: str | None) -> list[Generation]:
        """Submit all choices of all prompts to the engine. If this raises `RequestError`, no choice runs."""
        if not self._accepts:
            reason = "it is shutting down" if self._engine.failure is None else "the engine has failed"
            raise RequestError(503, f"the server accepts no requests: {reason}")
        loop = asyncio.get_running_loop()
        encode: Callable[..., list[int]] = self._engine.encoder.encode
        if request.is_chat:
            encode = self._chat_encoder(request)
        waiting = self._places.take(len(request.prompts) * request.n)
        try:
            prompts = []
            for prompt in request.prompts:
                limit = self._most_tokens
                if request.is_chat or isinstance(prompt, str):
                    prompt, limit = await self._encode(encode, prompt), self._max_prompt_tokens
                check_length(len(prompt), 0, "the server", limit)
                prompts.append(prompt)
            if request.echo and sum(map(len, prompts)) * request.n > MAX_ECHOED:
                sentence = f"echo: prompt tokens times n must be at most {MAX_ECHOED}"
                raise RequestError(400, f"{sentence}, not {sum(map(len, prompts)) * request.n}", param="echo")
            if request.params.prompt_logprobs is not None:
                reported = sum(map(len, prompts)) * request.n * (request.params.prompt_logprobs + 1)
                if reported > MAX_PROMPT_REPORTED:
                    sentence = "prompt_logprobs: prompt tokens times n times (prompt_logprobs + 1) must be at most"
                    sentence = f"{sentence} {MAX_PROMPT_REPORTED}, not {reported}"
                    raise RequestError(400, sentence, param="prompt_logprobs")
            if words := request.params.bad_words:
                ids = await loop.run_in_executor(self._encoding, self._engine.bad_word_ids, words)
                request.params = request.params.changed(bad_words=ids)
            if request.is_chat:
                self._prepare(request, prompts[0])
            structured, grammars = request.params.structured, self._engine.grammars
            if structured is not None and grammars.kept(structured) is None:
                await loop.run_in_executor(self._compiling, grammars.compiled, structured)
            return await loop.run_in_executor(self._submitting, self._submit, request, prompts, request_id, waiting)
        except RequestRejected as error:
            if request.structured_field == "tools" and error.param == "structured":
                sentence = f"tools: {schema_error(str(error), request.tools)}"
                raise RequestError(400, sentence, error.code, "tools") from error
            raise refusal_of(error, request.prompt_field, request.structured_field) from error
        except EngineClosed as error:
            raise RequestError(503, str(error)) from error
        finally:
            waiting.end()

    def _prepare(self, request: Request, prompt: list[int]) -> None:
        """Set the grammar of a chat and how its text is split. Raises `RequestError`."""
        params, form, has_calls = request.params, self._form, request.tool_choice != "none"
        if has_calls and not isinstance(form, Form):
            raise RequestError(400, f"tools is not supported: {form}", "unsupported_parameter", "tools")
        structured, is_open = params.structured, self._thinks and begins_open(self._engine.tokenizer, prompt)
        has_thoughts = self._thinks and (structured is None or is_open)
        # In channels, "none" needs a grammar too: the call that a model writes instead of a text would be lost.
        needs_grammar = has_calls or (self._has_channels and structured is None and bool(request.tools))
        after = FINAL if self._has_channels and structured is not None else CLOSE if is_open else ""
        new_calls: Callable[[], ToolCalls] | None = None
        skips = params.skip_special_tokens and not self._has_channels
        if isinstance(form, Form) and needs_grammar:
            new_calls = partial(ToolCalls, form) if has_calls else None
            skips = skips and not form.has_special
            may_think = self._thinks and not is_open
            try:
                tools = request.tools if has_calls else ()  # a schema that is not used is not checked either
                structured = Structured(
                    grammar=grammar_of(form, tools, request.tool_choice, request.parallel_tool_calls, may_think)
                )
            except (TypeError, ValueError) as error:
                raise RequestError(400, f"tools: {error}", param="tools") from None
        structured = None if structured is None else replace(structured, after=after)
        changed = {"structured": structured, "skip_special_tokens": skips}
        if self._has_channels and not params.ignore_eos:
            changed["stop_token_ids"] = params.stop_token_ids | stop_tokens(self._engine.tokenizer)
        request.params = params.changed(**changed)

        def new_parts() -> MessageParts:
            if self._has_channels:
                return MessageParts(Channels(has_calls), request.include_reasoning)
            calls = None if new_calls is None else new_calls()
            return MessageParts(Tags(Reasoning(is_open) if has_thoughts else None, calls), request.include_reasoning)

        request.new_parts = new_parts

    def _submit(
        self, request: Request, prompts: list[list[int]], request_id: str | None, waiting: Waiting
    ) -> list[Generation]:
        seed, name = request.params.seed, request_id
        generations: list[Generation] = []
        try:
            for tokens in prompts:
                params = request.params
                if request.cuts_length and params.max_new_tokens is not None:
                    room = self._engine.max_new_tokens(len(tokens))
                    params = params.changed(max_new_tokens=min(params.max_new_tokens, room))
                checked = self._engine.read(tokens, params)  # once for all choices
                for number in range(request.n):
                    # Without different seeds, all choices of a prompt would be equal.
                    choice = checked.choice(seed=None if seed is None else seed + number)
                    if request_id is not None and len(prompts) * request.n > 1:
                        name = f"{request_id}/{len(generations)}"
                    with waiting.hand_over():
                        generations.append(self._engine.submit(choice, request_id=name, **request.options))
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        return generations
