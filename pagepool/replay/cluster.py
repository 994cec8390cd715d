"""Several engines with one virtual clock. Each has a scheduler and a pool; a route chooses the engine of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeAlias

from pagepool.cluster.router import RULES, Choice, Router
from pagepool.config import SchedulerConfig
from pagepool.errors import PoolError
from pagepool.memory.allocator import BlockAllocator
from pagepool.prefix.cache import PrefixCache
from pagepool.prefix.events import PrefixEvent
from pagepool.replay.clock import Arrivals, CostModel
from pagepool.replay.driver import MeteredBlockManager, MeteredCache, Replay, ReplayFailed
from pagepool.replay.prompts import TraceTokens
from pagepool.replay.ptrace import Trace
from pagepool.scheduling import ScheduledBatch

__all__ = ["ROUTES", "Cluster", "ClusterOptions", "Link"]

ROUTES = (*RULES, "least-loaded", "round-robin", "random")
MAX_EVENTS = 4096  # of a step; when there are more, the router takes a snapshot
SIGN_OF_LIFE = 5_000_000  # microseconds
EPOCH = 1  # epoch of every worker: none restarts

# When it can be used, a running number, the request, when it arrived, tokens of it that are moved here first.
_Item: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Link:
    """Cost of moving pages between workers: `latency` microseconds per transfer, and `gb_per_s` GB per second."""

    gb_per_s: float
    latency: int
    token_bytes: int = 32 << 10  # bytes of a token of llama-3.2-1b in 16 bits

    def cost(self, tokens: int) -> int:
        """Return the microseconds to move the pages of `tokens` tokens."""
        return self.latency + round(tokens * self.token_bytes / (1e3 * self.gb_per_s))


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a run.

    Attributes
    ----------
    workers : int
        Number of workers.
    route : str
        How the worker of a request is chosen, one of `ROUTES`.
    staleness : int
        Microseconds from the end of a step until the router gets its changes.
    link : Link or None
        The link between workers.
    """

    workers: int
    route: str
    staleness: int = 0
    link: Link | None = None


class Inbox:
    """The requests that were sent to a worker, as its arrivals."""

    def __init__(self, cluster: Cluster, worker: Worker) -> None:
        self._items: list[_Item] = []
        self._cluster = cluster
        self._worker = worker

    def push(self, item: _Item) -> None:
        heappush(self._items, item)

    def next_time(self) -> int | None:
        """Return the time from which the next request can run, or None if the inbox is empty."""
        return self._items[0][0] if self._items else None

    def take(self) -> tuple[int, int]:
        """Take the next request and return its index and arrival time. Caches the pages that were moved for it."""
        _, _, index, arrival, moved = heappop(self._items)
        if moved:
            self._worker.take_pages(index, moved)
        return index, arrival

    def ended(self, index: int, time: int) -> None:
        """Note that request `index` was answered or refused at `time`."""
        self._worker.began(index, 0)
        self._cluster.arrivals.ended(index, time)


class Worker(Replay):
    """An engine of the cluster: a replay with an inbox as its arrivals.

    Attributes
    ----------
    received : int
        Number of requests that were sent to it.
    load : int
        Number of prompt tokens to compute, plus 1 for each decoding sequence. The cached tokens of a prompt are
        estimated when the prompt is sent.
    """

    def __init__(self, cluster: Cluster, config: SchedulerConfig, cost: CostModel, blocks: int, policy: str) -> None:
        allocator = BlockAllocator(blocks)
        self.prefixes = PrefixCache(allocator, config.block_size, policy, max_events=MAX_EVENTS)
        self.inbox = Inbox(cluster, self)
        self._cluster = cluster
        self.received = 0
        self._unread = 0
        self._expected: dict[int, int] = {}  # request that has not begun -> its share of _unread
        self._decoding = 0
        self._new: set[int] = set()  # sequences that have not begun
        super().__init__(
            cluster.trace,
            config,
            MeteredBlockManager(allocator, self.prefixes.block_size),
            cost,
            arrivals=self.inbox,
            cache=MeteredCache(self.prefixes),
            tokens=cluster.tokens,
        )

    @property
    def load(self) -> int:
        return max(0, self._unread) + self._decoding

    def send(self, item: _Item) -> None:
        """Put a request into the inbox."""
        _, _, index, _, moved = item
        self.received += 1
        self._expected[index] = self.trace.prompt[index] - max(moved, self.cached(index))
        self._unread += self._expected[index]
        self.inbox.push(item)

    def began(self, index: int, computed: int) -> None:
        """Record that a request has `computed` tokens to compute, 0 if it was refused. Only the first call for a
        request counts."""
        expected = self._expected.pop(index, None)
        if expected is not None:
            self._unread += computed - expected

    def cached(self, index: int) -> int:
        """Return the number of cached prompt tokens of a request, in full blocks, without the last token."""
        prompt, salt = self._cluster.prompt(index), self._cluster.tokens.salt(index)
        tokens = self.prefixes.cached_tokens(prompt[:-1], cache_salt=salt)
        return tokens - tokens % self.prefixes.block_size

    def take_pages(self, index: int, tokens: int) -> None:
        """Record that the first `tokens` tokens of a request's prompt were moved to this worker."""
        self.prefixes.touch(self._cluster.prompt(index)[:tokens], cache_salt=self._cluster.tokens.salt(index))

    def _add(self, index: int, prompt: int, limit: int) -> int:
        seq_id = super()._add(index, prompt, limit)
        self._new.add(seq_id)
        return seq_id

    def _count(self, batch: ScheduledBatch) -> None:
        super()._count(batch)
        self._decoding = batch.num_decodes
        self._unread -= batch.total_tokens - batch.num_decodes
        for seq_id in batch.seq_ids[batch.num_decodes :]:
            if seq_id in self._new:
                self._new.remove(seq_id)
                index, found = self._requests[seq_id], self.scheduler.get_sequence(seq_id).num_cached
                self.began(index, self.trace.prompt[index] - found)
                self._cluster.began(index, found)


class Cluster:
    """A replay of a trace by several workers.

    Attributes
    ----------
    prompt_tokens : int
        Prompt tokens of all requests that have begun.
    found_tokens : int
        Prompt tokens that were in the worker's cache.
    moved_tokens : int
        Tokens that were moved to the worker's cache. They are found unless they were evicted before.
    moved_us : int
        Microseconds that the links needed for the moved tokens.
    """

    def __init__(
        self,
        trace: Trace,
        config: SchedulerConfig,
        cost: CostModel,
        arrivals: Arrivals,
        blocks: int,
        policy: str,
        options: ClusterOptions,
    ) -> None:
        self.trace, self.arrivals, self.options = trace, arrivals, options
        self.tokens = TraceTokens(trace)
        self.workers = [Worker(self, config, cost, blocks, policy) for _ in range(options.workers)]
        self.now = 0
        self.prompt_tokens = self.found_tokens = self.moved_tokens = self.moved_us = 0
        self.router: Router | None = None
        if options.route in RULES or options.link is not None:
            rule = options.route if options.route in RULES else "cost"
            size = self.workers[0].prefixes.block_size
            self.router = Router(size, options.workers, rule=rule, clock=lambda: self.now / 1e6)
            for number in range(options.workers):
                self.router.update(number, EPOCH, [], load=0, room=blocks)
        self._cost = cost
        self._random = Random(0)
        self._choices: dict[int, Choice] = {}  # choice of each request that has not begun
        # A heap of (time at which a worker ends a step or can begin one, its number). _next has valid entries.
        self._ready: list[tuple[int, int]] = []
        self._next: list[int | None] = [None] * options.workers
        self._messages: list[tuple[int, int, int, list[PrefixEvent], dict[str, int]]] = []  # a heap: see _tell
        self._link_free = [0] * options.workers  # when the link of a worker has sent everything
        self._sent = self._told = 0
        self._last_sent = [0] * options.workers
        self._signed = 0  # when idle workers last gave a sign of life

    def run(self, *observers: Callable[[Cluster], Any]) -> None:
        """Replay the whole trace. Calls each of `observers` with the cluster after each request that was sent."""
        while True:
            arrival = self.arrivals.next_time()
            if arrival is not None and (not self._ready or arrival <= self._ready[0][0]):
                self.now = max(self.now, arrival)
                self._route(*self.arrivals.take())
                for observe in observers:
                    observe(self)
            elif self._ready:
                self.now, number = heappop(self._ready)
                if self._next[number] == self.now:
                    self._step(number)
            else:
                break
        for worker in self.workers:
            worker.check_end()
        ended = sum(worker.totals.finished + worker.totals.refused for worker in self.workers)
        if ended != len(self.trace):
            raise ReplayFailed(f"{ended} of {len(self.trace)} requests have ended")

    def prompt(self, index: int) -> list[int]:
        """Return the prompt tokens of a request."""
        return self.tokens.of(index)[0]

    def began(self, index: int, found: int) -> None:
        """Note that request `index` has begun at its worker, with `found` cached tokens."""
        self.prompt_tokens += self.trace.prompt[index]
        self.found_tokens += found
        choice = self._choices.pop(index, None)
        if choice is not None and self.router is not None:
            self.router.report(choice, found)

    @property
    def submitted(self) -> int:
        """Number of requests that were sent to workers so far."""
        return self._sent

    def _route(self, index: int, arrival: int) -> None:
        self._sent += 1
        number = self._choose(index)
        worker, moved, ready = self.workers[number], 0, arrival
        if self.options.link is not None:
            moved, ready = self._move(index, number, arrival, self.options.link)
        self._last_sent[number] = self._sent
        worker.send((ready, self._sent, index, arrival, moved))
        if not worker.scheduler.has_work:
            self._wake(number, max(ready, worker.totals.time_us))

    def _choose(self, index: int) -> int:
        route, workers = self.options.route, self.workers
        self._deliver()
        if route in RULES and self.router is not None:
            choice = self._ask_router(self.router, index)
            self._choices[index] = choice
            return int(choice.worker)
        if route == "round-robin":
            return (self._sent - 1) % len(workers)
        if route == "random":
            return self._random.randrange(len(workers))
        return min(range(len(workers)), key=lambda number: (workers[number].load, self._last_sent[number]))

    def _ask_router(self, router: Router, index: int) -> Choice:
        prompt, salt, link = self.prompt(index), self.tokens.salt(index), self.options.link
        if link is None:
            return router.choose(prompt, cache_salt=salt)
        movable = max(router.forecast(prompt, cache_salt=salt).values(), default=0)
        cost = link.cost(movable) / max(1, movable * self._cost.prefill)
        return router.choose(prompt, cache_salt=salt, movable_tokens=movable, move_cost=cost)

    def _move(self, index: int, number: int, arrival: int, link: Link) -> tuple[int, int]:
        """Move pages for a request if this takes less time than computing them.

        Returns the number of moved tokens, and the time at which they arrive. The link of a worker sends one transfer
        after the other.
        """
        if self.router is None:
            return 0, arrival
        forecast = self.router.forecast(self.prompt(index), cache_salt=self.tokens.salt(index))
        source = max(forecast, key=lambda worker: forecast[worker], default=number)
        there = self.workers[source].cached(index)  # the forecast may be stale, so ask the source itself
        missing = there - self.workers[number].cached(index)
        if missing <= 0:
            return 0, arrival
        start, takes = max(arrival, self._link_free[source]), link.cost(missing)
        if start + takes - arrival >= self._cost.prefill * missing:
            return 0, arrival
        self._link_free[source] = start + takes
        self.moved_tokens += missing
        self.moved_us += takes
        return there, start + takes

    def _step(self, number: int) -> None:
        """Advance a worker that has ended a step or can begin one."""
        worker = self.workers[number]
        self._next[number] = None
        worker.totals.time_us = max(worker.totals.time_us, self.now)
        self._tell(number)
        if worker.advance():
            self._wake(number, worker.totals.time_us)
        elif (following := worker.inbox.next_time()) is not None:
            self._wake(number, following)

    def _wake(self, number: int, time: int) -> None:
        following = self._next[number]
        if following is None or time < following:
            self._next[number] = time
            heappush(self._ready, (time, number))

    def _tell(self, number: int) -> None:
        """Send the changes of a worker's cache, load and free blocks to the router."""
        if self.router is not None:
            worker = self.workers[number]
            state = {"load": worker.load, "room": worker.prefixes.allocator.free_count, "received": worker.received}
            events, time = worker.prefixes.drain_events(), self.now + self.options.staleness
            self._told += 1
            heappush(self._messages, (time, self._told, number, events, state))

    def _deliver(self) -> None:
        """Deliver all messages that have arrived to the router, and signs of life of idle workers."""
        if self.now >= self._signed + SIGN_OF_LIFE:
            self._signed = self.now
            for number, following in enumerate(self._next):
                if following is None:
                    self._tell(number)
        while self.router is not None and self._messages and self._messages[0][0] <= self.now:
            _, _, number, events, state = heappop(self._messages)
            try:
                self.router.update(number, EPOCH, events, **state)
            except PoolError:  # the log of events was too short for a step
                snapshot = self.workers[number].prefixes.name_snapshot()
                self.router.restore(number, EPOCH, snapshot, **state)
