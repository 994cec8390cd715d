"""FrontEnd: accepts requests with the interface of an engine, and distributes them over several workers.

Each request is one run. Several workers may compute parts of it, and several callers may wait for it:

    front_end                     prefill worker            decode worker
    choose ── tokens ──────▶ first token
             first token ◀── offer of pages
    choose ── tokens, offer ────────────────────────▶ reads pages, goes on
             tokens ◀────────────────────────────────
                                                       dies
    choose ── prompt and received tokens ───────────▶ another worker continues

The front end counts tokens, ends requests and detokenizes. So another worker can take over from a lost worker, and no
token is delivered twice.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from sys import getsizeof
from threading import Lock
from time import monotonic, time_ns
from typing import Any

import numpy as np

from pagepool._arguments import integer, real
from pagepool.cluster.messages import Begun, Call, Drafted, Ended, Limits, News, Offer, Waiting, WorkerLost, Workers
from pagepool.cluster.router import Choice, Router
from pagepool.engine.generation import Generation, Token
from pagepool.engine.intake import Intake, Request
from pagepool.errors import EngineClosed, PoolError, RequestRejected

__all__ = ["FrontEnd"]

MAX_WORKERS = 256  # workers per side in the router, including lost workers until SILENCE has passed
MAX_RECORD_BYTES = 256 << 20  # total size of prompts and answers in the records
PROMPT_TOKEN_BYTES = 40  # per prompt token: a Python integer and a list entry
LOGPROB_BYTES = 100  # per entry of `top_logprobs`: two numbers and a dict entry
RECORD_TOKEN_BYTES = 200  # per output token, without its text and its logprobs
NO_WORKER_PAUSE = 0.05  # seconds between attempts to find a worker
PREFILL_SILENCE = 3.0  # seconds without news from prefill workers until decode workers compute the prompts
AVOIDED = 30.0  # seconds for which a worker without progress gets no new requests
SILENCE = 30.0  # seconds without news until a worker is forgotten
COUNTS = ("moved_tokens", "lost_workers", "repeated_requests")


@dataclass
class _Side:
    """The workers that do one kind of work."""

    workers: Workers
    router: Router
    heard: dict[str, float] = field(default_factory=dict)  # by worker: time of its last news
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)  # by worker: counters in its last news
    avoided: dict[str, float] = field(default_factory=dict)  # by worker without progress: end of its avoidance


@dataclass(eq=False)
class _Run:
    """One request. Each caller that waits for it holds one entry of `generations`, which receives all tokens."""

    request_id: int | str | None
    request: Request
    options: dict[str, Any]  # `priority`, `tenant` and `cache_salt` of `Engine.submit`
    tokens: list[Token] = field(default_factory=list)
    generations: list[weakref.ref[Generation]] = field(default_factory=list)
    num_cached: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    offer: Offer | None = None  # offered pages, until a worker has read them
    reason: str | None = None
    error: BaseException | None = None
    task: Any = None  # the concurrent future of `_follow`

    @property
    def num_bytes(self) -> int:
        """Approximate size of the record of this request in bytes."""
        tokens = sum(getsizeof(token.text) + LOGPROB_BYTES * len(token.top_logprobs) for token in self.tokens)
        return PROMPT_TOKEN_BYTES * len(self.request.prompt) + RECORD_TOKEN_BYTES * len(self.tokens) + tokens

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of output tokens."""
        return int(self.request.params.max_new_tokens or 0)

    @property
    def key(self) -> Any:
        """Key (tenant, request_id), so ids of different tenants never collide. None without a `request_id`."""
        return None if self.request_id is None else (self.options["tenant"], self.request_id)

    @property
    def asks_for(self) -> Any:
        """The values that must be equal in two requests with the same id."""
        return self.request.prompt, self.request.params, self.options

    def put(self, token: Token, generation: Generation) -> None:
        """Pass a token and the counts so far to a caller."""
        generation.num_accepted, generation.num_rejected = self.num_accepted, self.num_rejected
        generation._put(token, self.num_cached)


class WorkerFailed(Exception):
    """The request has failed in a way that would be the same on any other worker."""


class FrontEnd(Intake):
    """Accepts requests like an `Engine`, and calls workers to run them. Each worker is an `Engine`.

    When a worker is lost, another worker continues the request after the last delivered token. It recomputes the prompt
    and the delivered tokens, except for the part in its prefix cache. A request with a `request_id` is computed once
    while it runs and while its record is kept, however often it is submitted. `epoch` distinguishes this front end from
    its predecessor. `news` updates the routers. The other names are described in `Engine`.

    Parameters
    ----------
    limits : Limits
        Limits of the workers.
    tokenizer : object or None
        A tokenizer of transformers. None: prompts are token ids, and generations have no text.
    workers : Workers
        Connection to the decode workers.
    prefill : Workers or None
        Connection to the prefill workers. None: each decode worker computes its own prompts.
    loop : asyncio.AbstractEventLoop
        The running event loop. Requests are processed on it.
    max_attempts : int
        Number of workers that a request may lose before it fails.
    max_records : int
        Number of finished requests to keep. Their answers are repeated for the same `request_id`.
    max_silence : float
        Seconds without any message from a worker until another worker continues its request. A live worker sends a
        message each second.
    max_wait : float
        Seconds without any worker until a request fails with `EngineClosed`, which is HTTP status 503.

    Examples
    --------
    >>> from pagepool.engine import SamplingParams
    >>> from pagepool.prefix.events import PrefixSnapshot
    >>> class Counting:
    ...     async def generate(self, worker, call):
    ...         yield Begun(worker, 0, 0, "")
    ...         for number in range(call.params.max_new_tokens):
    ...             yield Token(number, "")
    >>> async def main():
    ...     limits = Limits(None, None, vocab_size=100, block_size=16, stop_token_ids=frozenset())
    ...     cluster = FrontEnd(limits, None, Counting(), loop=asyncio.get_running_loop())
    ...     is_behind = cluster.news(News("one", False, 1, [], PrefixSnapshot(1, [], 0), load=0, room=8))
    ...     return [token.token_id async for token in cluster.submit([5, 6], SamplingParams(3))]
    >>> asyncio.run(main())
    [0, 1, 2]
    """

    def __init__(
        self,
        limits: Limits,
        tokenizer: Any,
        workers: Workers,
        prefill: Workers | None = None,
        *,
        loop: asyncio.AbstractEventLoop,
        max_attempts: int = 4,
        max_records: int = 1024,
        max_silence: float = 5.0,
        max_wait: float = 10.0,
    ) -> None:
        super().__init__(
            tokenizer,
            limits.vocab_size,
            limits.stop_token_ids,
            limits.max_model_len,
            limits.pool_tokens,
            sampling_defaults=limits.sampling_defaults,
        )
        self.limits = limits
        self.max_attempts = integer("max_attempts", max_attempts, 1)
        self.max_records = integer("max_records", max_records, 0)
        self.max_silence = real("max_silence", max_silence, 0.0)
        self.max_wait = real("max_wait", max_wait, 0.0)
        self.epoch = time_ns()
        self._sides = {"decode": _Side(workers, Router(limits.block_size, MAX_WORKERS))}
        if prefill is not None:
            self._sides["prefill"] = _Side(prefill, Router(limits.block_size, MAX_WORKERS))
        self._loop = loop
        self._lock = Lock()  # guards the fields below
        self._active: set[_Run] = set()
        self._running: dict[Any, _Run] = {}  # by their `key`
        self._records: OrderedDict[Any, _Run] = OrderedDict()  # finished requests, by their `key`
        self._record_bytes = 0  # sum of their num_bytes
        self._background: set[Any] = set()

    # The interface of an engine.

    def _submit(self, request: Request, **options: Any) -> Generation:
        """Queue a parsed request, or join the earlier request with the same `request_id`.

        Raises `RequestRejected` if the earlier request differs, or if the request asks for `prompt_logprobs`.
        """
        if request.params.prompt_logprobs is not None:  # another worker may compute the prompt, or have computed it
            raise RequestRejected("log probabilities of prompts are not supported by a cluster")
        request_id = options.pop("request_id")
        run = _Run(request_id, request, options)
        with self._lock:
            known = None
            if run.key is not None:
                known = self._running.get(run.key) or self._records.get(run.key)
            if known is not None and known.asks_for != run.asks_for:
                raise RequestRejected(f"request_id {request_id!r} was another request: give each request its own id")
            if known is not None:
                self._counts["repeated_requests"] += 1
                return self._join(known)
            if not self.is_accepting:
                raise EngineClosed("the cluster accepts no more requests")
            run.task = asyncio.run_coroutine_threadsafe(self._follow(run), self._loop)
            self._active.add(run)
            if run.key is not None:
                self._running[run.key] = run
            self._counts["prompt_tokens"] += len(request.prompt)
            return self._join(run)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    def stats(self) -> dict[str, Any]:
        """The counters of the front end, like `Engine.stats`, with the counters of workers and routers.

        `workers` has the last `stats` of each worker by name, with its `side` and `load`; `routers` has `Router.stats`
        by side.
        """
        with self._lock:
            counts = self._stats(*COUNTS)
            workers = {name: found for side in self._sides.values() for name, found in side.stats.items()}
        routers = {kind: side.router.stats() for kind, side in self._sides.items()}
        return {**counts, "workers": workers, "routers": routers}

    def observed(self) -> dict[str, Any]:
        """Return the objects to monitor, as keyword arguments of `PagepoolCollector`."""
        return {"routers": {kind: side.router for kind, side in self._sides.items()}}

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes of all workers. Waits until this is done. Do not call it on the event loop.

        Raises
        ------
        EngineClosed
            If a worker fails, or has not answered after `max_wait` seconds. Other workers may have been reset.
        """
        asyncio.run_coroutine_threadsafe(self._reset_workers(), self._loop).result()

    def close(self) -> None:
        """Accept no more requests, and end all running requests with the reason "abort"."""
        with self._lock:
            self.is_accepting = False
            running = [*self._active]
        for run in running:
            run.task.cancel()

    # The interface for workers.

    def news(self, news: News) -> bool:
        """Process the news of a worker. Return whether the worker must send a snapshot next.

        A worker that is new to this front end gets no requests before it has sent a snapshot. Until then, requests of
        the previous front end may still change its cache.
        """
        kind = "prefill" if news.is_prefill else "decode"
        side = self._sides[kind]
        with self._lock:
            if news.worker not in side.heard and news.snapshot is None:
                return True
            now = monotonic()
            side.heard[news.worker] = now
            side.stats[news.worker] = {"side": kind, "load": news.load, **news.stats}
            silent = [
                (other, name)
                for other in self._sides.values()
                for name, heard in other.heard.items()
                if heard < now - SILENCE
            ]
        for other, name in silent:
            self._forget(other, name)
        try:
            if news.snapshot is not None:
                side.router.restore(news.worker, news.epoch, news.snapshot, load=news.load, room=news.room)
            else:
                side.router.update(news.worker, news.epoch, news.events, load=news.load, room=news.room)
        except PoolError:
            return True
        return False

    # On the event loop.

    async def _reset_workers(self) -> None:
        with self._lock:
            named = [(name, side.workers) for side in self._sides.values() for name in side.heard]
        calls = [asyncio.wait_for(workers.reset_prefix_cache(name), self.max_wait) for name, workers in named]
        for (name, _), error in zip(named, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if error is not None and not isinstance(error, WorkerLost):  # a lost worker has no cache
                why = f"no answer in {self.max_wait:g} s" if isinstance(error, asyncio.TimeoutError) else error
                raise EngineClosed(f"the prefix cache of worker {name!r} was not reset: {why}") from error

    async def _follow(self, run: _Run) -> None:
        reason, error = "abort", None
        try:
            reason = await self._generate(run)
        except Exception as failure:
            reason, error = "error", failure
        finally:
            self._end(run, reason, error)

    async def _generate(self, run: _Run) -> str:
        """Run a request on one worker after another until it ends. Returns its finish_reason."""
        lost, failed = 0, set[str]()
        while True:
            is_prefill = not run.tokens and self._can_prefill(run)
            side = self._sides["prefill" if is_prefill else "decode"]
            tokens = run.request.prompt + [token.token_id for token in run.tokens]
            movable = 0 if run.offer is None else len(run.offer.ticket.blocks) * self.limits.block_size
            choice = await self._choose(side, tokens, run.options["cache_salt"], movable, failed)
            most = 1 if is_prefill else run.max_new_tokens - len(run.tokens)
            params = replace(run.request.params, max_new_tokens=most, stop=())
            call = Call(tokens, len(run.tokens), params, run.options, run.offer, is_prefill, self.epoch)
            try:
                ended = await self._run_on(side, choice, call, run)
            except (WorkerFailed, RequestRejected):
                raise
            except Exception as error:
                lost += 1
                self._failed(side, choice.worker, error)
                failed.add(choice.worker)
                if lost == self.max_attempts:
                    why = next(iter(str(error).splitlines()), type(error).__name__)
                    raise RuntimeError(f"the request failed on {lost} workers; the last error: {why}") from error
                continue
            if run.reason is not None:
                return run.reason
            run.offer = ended.offer

    async def _run_on(self, side: _Side, choice: Choice, call: Call, run: _Run) -> Ended:
        """Run a call on one worker.

        Raises `WorkerFailed` or `RequestRejected` if the request failed, any other exception if it was lost.
        """
        async with aclosing(side.workers.generate(choice.worker, call)) as messages:
            while True:
                message = await asyncio.wait_for(anext(messages, None), self.max_silence)
                if message is None:
                    break
                side.avoided.pop(choice.worker, None)
                if isinstance(message, Waiting):
                    continue
                if isinstance(message, Begun):
                    self._begin(side, choice, call, message, run)
                elif isinstance(message, Drafted):
                    run.num_accepted += message.accepted
                    run.num_rejected += message.rejected
                elif isinstance(message, Token):
                    try:
                        self._deliver(run, message)
                    except Exception as error:  # the tokenizer failed: another worker would not help
                        raise WorkerFailed(f"token {message.token_id} cannot be detokenized: {error}") from error
                    if run.reason is not None:
                        return Ended(run.reason)
                elif message.reason == "error":
                    raise message.error if isinstance(message.error, RequestRejected) else WorkerFailed(message.error)
                elif message.reason == "abort":
                    raise RuntimeError(f"worker {choice.worker!r} has aborted the request")
                elif isinstance(message, Ended) and call.wants_offer:
                    return message
        raise RuntimeError(f"worker {choice.worker!r} ended its messages before the request had ended")

    def _begin(self, side: _Side, choice: Choice, call: Call, begun: Begun, run: _Run) -> None:
        if begun.worker == choice.worker:
            side.router.report(choice, begun.found_tokens)
        else:  # the transport did not find the chosen worker
            self._forget(side, choice.worker)
        if not run.tokens:
            run.num_cached = begun.found_tokens
            with self._lock:
                self._counts["cached_tokens"] += begun.found_tokens
        with self._lock:
            self._counts["moved_tokens"] += begun.moved_tokens
        if call.offer is not None:
            run.offer = None  # its lease ends: the next worker computes tokens missing in its cache
            releasing = self._loop.create_task(self._release(call.offer))
            self._background.add(releasing)
            releasing.add_done_callback(self._background.discard)

    async def _release(self, offer: Offer) -> None:
        with suppress(Exception):  # a lost worker holds no pages; otherwise the offer expires
            await self._sides["prefill"].workers.release(offer.worker, offer.number)

    def _failed(self, side: _Side, worker: str, error: BaseException) -> None:
        """Record a failed call. Forget a worker that has exited, or avoid a worker without progress for AVOIDED s."""
        if isinstance(error, WorkerLost):
            self._forget(side, worker)
            with self._lock:
                self._counts["lost_workers"] += 1
        elif isinstance(error, asyncio.TimeoutError):
            side.avoided[worker] = monotonic() + AVOIDED

    async def _choose(
        self, side: _Side, tokens: list[int], cache_salt: Any, movable_tokens: int, failed: set[str]
    ) -> Choice:
        """Choose the worker for a prompt, and wait until one is known. Raises `EngineClosed` after `max_wait`.

        `failed` names the workers that have failed this request. They are chosen only if no other worker is known.
        """
        end = monotonic() + self.max_wait
        row = np.array(tokens, np.int32)
        move_cost = self._move_cost(side) if movable_tokens else 1.0
        while True:
            try:
                now = monotonic()
                avoided = {*failed, *(worker for worker, until in [*side.avoided.items()] if until > now)}
                return side.router.choose(
                    row, cache_salt=cache_salt, movable_tokens=movable_tokens, move_cost=move_cost, avoid=avoided
                )
            except PoolError as error:
                if monotonic() >= end:
                    raise EngineClosed(f"there was no worker for {self.max_wait:g} s: try again later") from error
                await asyncio.sleep(NO_WORKER_PAUSE)

    def _move_cost(self, side: _Side) -> float:
        """Return the time to move one token's KV divided by the time to compute one token, as measured by workers."""
        with self._lock:
            stats = [*side.stats.values()]
        moved = sum(one.get("moved_tokens", 0) for one in stats)
        computed = sum(one.get("prompt_tokens", 0) - one.get("cached_tokens", 0) for one in stats)
        computed += sum(one.get("generated_tokens", 0) for one in stats)
        seconds = sum(one.get("step_seconds", 0.0) for one in stats)
        if not moved or not computed or not seconds:
            return 0.0  # without measurements, assume that moving costs nothing
        return float(sum(one.get("move_seconds", 0.0) for one in stats) / moved / (seconds / computed))

    def _can_prefill(self, run: _Run) -> bool:
        """Return whether a prefill worker has sent news recently and the prompt has a full block to move."""
        side = self._sides.get("prefill")
        if side is None or len(run.request.prompt) <= self.limits.block_size:
            return False
        with self._lock:
            return max(side.heard.values(), default=0.0) > monotonic() - PREFILL_SILENCE

    def _forget(self, side: _Side, worker: str) -> None:
        with self._lock:
            side.heard.pop(worker, None)
            side.stats.pop(worker, None)
            side.avoided.pop(worker, None)
        with suppress(KeyError):  # unknown, or already removed by another request
            side.router.remove_worker(worker)

    def _deliver(self, run: _Run, token: Token) -> None:
        """Deliver a token to all generations of the request. Set the finish reason if it is the last token."""
        reason = None
        if token.token_id in run.request.params.stop_token_ids:
            reason = "stop"
        elif len(run.tokens) + 1 == run.max_new_tokens:
            reason = "length"
        text, reason = run.request.text_of(token.token_id, reason)
        found = Token(token.token_id, text, token.logprob, token.top_logprobs)
        with self._lock:
            run.tokens.append(found)
            self._counts["generated_tokens"] += 1
            for generation in _living(run):
                run.put(found, generation)
        run.reason = reason

    def _end(self, run: _Run, reason: str, error: BaseException | None) -> None:
        with self._lock:
            run.reason, run.error = reason, error
            self._active.discard(run)
            self._counts[reason] += 1
            name = self._forget_id(run)
            if name is not None and reason in ("stop", "length"):
                self._records[name] = run
                self._record_bytes += run.num_bytes
                while len(self._records) > self.max_records or self._record_bytes > MAX_RECORD_BYTES:
                    self._record_bytes -= self._records.popitem(last=False)[1].num_bytes
            for generation in _living(run):
                generation._end(reason, error, run.request.detokenizer.stop_string)
            run.generations.clear()

    def _forget_id(self, run: _Run) -> Any:
        """Stop callers from joining a request. Return its key, or None without a key or if another request uses it."""
        if run.key is None or self._running.get(run.key) is not run:
            return None
        del self._running[run.key]
        return run.key

    # Callers that wait for a request.

    def _join(self, run: _Run) -> Generation:
        """Return a generation for one more caller. It receives all tokens of the request, past and future."""
        generation = Generation(run.request.prompt, lambda: self._call_soon(self._leave, run, reference))
        # A finalizer can run this callback at any point of any thread, so the callback must not take a lock.
        reference = weakref.ref(generation, lambda reference: self._call_soon(self._leave, run, reference))
        for token in run.tokens:
            run.put(token, generation)
        if run in self._active:
            run.generations.append(reference)
        else:
            generation._end(str(run.reason), run.error, run.request.detokenizer.stop_string)
        return generation

    def _leave(self, run: _Run, reference: weakref.ref[Generation]) -> None:
        """Remove a caller that has cancelled. Cancel the request if no caller is left."""
        with self._lock:
            if reference not in run.generations:
                return
            run.generations.remove(reference)
            generation = reference()
            if generation is not None:
                generation._end("abort")
            if not run.generations:
                self._forget_id(run)  # a new caller must not join a cancelled request
                run.task.cancel()

    def _call_soon(self, function: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed, and no request runs
            self._loop.call_soon_threadsafe(function, *arguments)


def _living(run: _Run) -> list[Generation]:
    return [generation for reference in run.generations if (generation := reference()) is not None]
