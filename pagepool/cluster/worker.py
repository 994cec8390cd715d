"""Worker: an engine of a cluster. It runs calls of the front end, reports its prefix cache and moves prompt pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter, time_ns
from typing import Any

from pagepool.cluster.messages import Begun, Call, Drafted, Ended, Limits, News, Waiting
from pagepool.cluster.pages import Fetched, PageMover
from pagepool.engine import Engine
from pagepool.engine.generation import Generation
from pagepool.engine.memory import pool_tokens
from pagepool.errors import PoolError, RequestRejected
from pagepool.prefix.events import NameSnapshot
from pagepool.transfer import Transfer

__all__ = ["Worker"]

WAITING_SECONDS = 1.0
MAX_FETCHES = 16  # concurrent reads of pages


@dataclass(eq=False)
class _Running:
    """A running request: its front end, and the number of tokens to compute before its first new one."""

    generation: Generation
    front_end: int
    num_tokens: int


class Worker:
    """An engine that runs calls of a front end. It is independent of the messaging layer, such as Ray.

    Parameters
    ----------
    engine : Engine
        An `Engine` with `prefix_events`. This object closes it.
    name : str
        Name of this worker. It must change with each restart.
    is_prefill : bool
        Whether it computes prompts for decode workers.
    transfer : Transfer or None
        A `Transfer` without a registered pool. This object closes it. None: pages are not moved.
    model : str
        Name of the model and its weights, for the transfer.
    stop_token_ids : frozenset of int
        Tokens that end every output, in addition to the stop tokens of the engine.

    Raises
    ------
    ValueError
        `transfer` is given, but the engine has no prefix cache, or the model does not have exactly one block table with
        full attention.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        is_prefill: bool = False,
        transfer: Transfer | None = None,
        model: str = "",
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.engine, self.name, self.is_prefill = engine, name, is_prefill
        self.stop_token_ids = engine.stop_token_ids | stop_token_ids
        self.epoch = time_ns()
        self._pages: PageMover | None = None
        if transfer is not None:
            pool, cache = engine.runner.pool, engine.prefix_cache
            if cache is None:
                raise ValueError("pages of an engine without a prefix cache cannot move")
            if pool is None or engine.runner.groups is not None or engine.runner.states is not None:
                raise ValueError("pages of this model cannot move: it has windows, recurrent states or no attention")
            self._pages = PageMover(transfer, pool, cache, model)
        self._moved: dict[str, float] = {"moved_tokens": 0, "move_seconds": 0.0}  # the router of the front end reads it
        self._running: set[_Running] = set()
        # Reads can wait for a peer. They run in separate threads, so that they do not delay other requests.
        self._fetching = ThreadPoolExecutor(MAX_FETCHES, "pagepool-fetch")

    def limits(self) -> Limits:
        """Return the limits of this worker."""
        runner, cache = self.engine.runner, self.engine.prefix_cache
        return Limits(
            runner.max_model_len,
            pool_tokens(runner),
            runner.vocab_size,
            1 if cache is None else cache.block_size,
            self.stop_token_ids,
            self.engine.sampling_defaults,
        )

    async def generate(self, call: Call) -> AsyncGenerator[Any, None]:
        """Run a call: yield a `Begun`, a `Token` for each token, and an `Ended`. Closing the generator cancels it.

        With drafts, a `Drafted` comes before the tokens that they became. The first message is a `Waiting`. One more is
        sent in each second without another message. Raises `EngineClosed` if the engine accepts no more requests.
        """
        messages = self._generate(call)
        following: asyncio.Future[Any] | None = None
        try:
            yield Waiting()
            while True:
                if following is None:
                    following = asyncio.ensure_future(anext(messages, None))
                done, _ = await asyncio.wait([following], timeout=WAITING_SECONDS)
                message = following.result() if done else Waiting()
                if done:
                    following = None
                if message is None:
                    return
                yield message
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait([following])
            await messages.aclose()

    async def _generate(self, call: Call) -> AsyncGenerator[Any, None]:
        fetched, began = None, perf_counter()
        if call.offer is not None and self._pages is not None:
            salt = call.options.get("cache_salt")
            fetch = partial(self._pages.fetch, call.offer, call.tokens, salt)
            fetched = await asyncio.get_running_loop().run_in_executor(self._fetching, fetch)
            if fetched.moved_tokens:
                self._moved["moved_tokens"] += fetched.moved_tokens
                self._moved["move_seconds"] += perf_counter() - began
        try:
            generation, cached = await asyncio.to_thread(self._submit, call)
        except RequestRejected as error:
            yield Ended("error", error)
            return
        running = _Running(generation, call.front_end, len(call.tokens) - cached)
        self._running.add(running)
        try:
            is_first, accepted, rejected = True, 0, 0
            async for token in generation:
                if is_first:
                    yield self._begun(generation, fetched)
                    is_first = False
                more = Drafted(generation.num_accepted - accepted, generation.num_rejected - rejected)
                if more.accepted or more.rejected:
                    yield more
                    accepted, rejected = accepted + more.accepted, rejected + more.rejected
                yield token
        except RuntimeError as error:  # the model has failed, or no token is left for this request
            cause = error.__cause__
            yield Ended("error", cause if isinstance(cause, RequestRejected) else str(error))
            return
        finally:
            self._running.discard(running)
            generation.cancel()
        offer = None
        if call.wants_offer and self._pages is not None:
            salt = call.options.get("cache_salt")
            offer = await asyncio.to_thread(self._pages.offer, self.name, call.tokens, salt)
        yield Ended(generation.finish_reason or "abort", offer=offer)

    def release(self, number: int) -> None:
        """End an offer, because its pages were read."""
        if self._pages is not None:
            self._pages.release(number)

    async def reset_prefix_cache(self) -> None:
        """Call `Engine.reset_prefix_cache`."""
        await asyncio.to_thread(self.engine.reset_prefix_cache)

    def follow(self, front_end: int) -> None:
        """Cancel requests of other front ends. Those front ends have exited, so no client waits for the tokens."""
        for running in [*self._running]:
            if running.front_end != front_end:
                running.generation.cancel()

    def news(self, wants_snapshot: bool = False) -> News:
        """Return the news since the last call, with a snapshot instead of events if requested. Ends expired offers."""
        engine, cache = self.engine, self.engine.prefix_cache
        if self._pages is not None:
            self._pages.poll()
        snapshot = None
        if wants_snapshot:
            snapshot = NameSnapshot(1, b"", 0) if cache is None else cache.name_snapshot()
        events = cache.drain_events() if cache is not None and not wants_snapshot else []
        pool = engine.runner.pool
        room = 0 if pool is None else pool.allocator.available
        stats = {**engine.stats(), **self._moved}
        return News(self.name, self.is_prefill, self.epoch, events, snapshot, self.load(), room, stats)

    def load(self) -> int:
        """Return the tokens to compute: the uncached tokens of requests in prefill, and 1 per decoding request."""
        return sum(
            running.num_tokens if running.generation.time_to_first_token is None else 1 for running in [*self._running]
        )

    def check_empty(self) -> int:
        """Check the engine, end all offers and clear the prefix cache. Return the number of blocks in use, which is 0.

        Raises `PoolError` if an invariant does not hold, or if a request is running.
        """
        if self._running:
            raise PoolError(f"{len(self._running)} requests run: the worker is not empty")
        if self._pages is not None:
            self._pages.release_all()
        self.engine.check()
        allocators = {pool.allocator for pool in self.engine.runner.pools}
        if self.engine.prefix_cache is not None:
            self.engine.prefix_cache.reset_prefix_cache()
            allocators.add(self.engine.prefix_cache.allocator)
        for allocator in allocators:
            allocator.check(others=0)
        return sum(allocator.in_use for allocator in allocators)

    def close(self) -> None:
        """End all requests and offers and free the memory."""
        self._fetching.shutdown(wait=False, cancel_futures=True)
        if self._pages is not None:
            self._pages.close()
        self.engine.close()

    def _submit(self, call: Call) -> tuple[Generation, int]:
        """Submit a call to the engine. Return its generation and the number of its tokens that were cached before."""
        request, cache = self.engine.read(call.tokens, call.params), self.engine.prefix_cache
        salt = call.options.get("cache_salt")
        cached = 0 if cache is None else cache.cached_tokens(call.tokens, cache_salt=salt)
        return self.engine._submit(request, call.num_generated, **call.options), min(cached, len(call.tokens) - 1)

    def _begun(self, generation: Generation, fetched: Fetched | None) -> Begun:
        if fetched is None:
            return Begun(self.name, generation.num_cached, 0, "")
        return Begun(self.name, fetched.found_tokens, fetched.moved_tokens, fetched.error)
