"""The replay loop: the scheduler runs the requests of a trace with a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from pagepool.config import SchedulerConfig
from pagepool.replay.attend import Attention
from pagepool.replay.clock import Arrivals, CostModel, OpenLoop
from pagepool.replay.latency import LatencyLog
from pagepool.replay.prompts import TraceTokens
from pagepool.replay.ptrace import Trace
from pagepool.scheduling import ScheduledBatch, Scheduler
from pagepool.scheduling.block_manager import BlockManager

__all__ = ["MeteredBlockManager", "MeteredCache", "Replay", "ReplayFailed", "Totals"]

TOKEN = 0  # used for all tokens if the trace has only lengths


class ReplayFailed(RuntimeError):
    """The replay could not continue, or blocks were still in use at its end."""


@dataclass
class Totals:
    """The counts so far. Times are virtual microseconds, except `*_ns`, which is wall time."""

    refused: int = 0
    finished: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    schedule_ns: int = 0
    wall_ns: int = 0
    time_us: int = 0
    occupied_us: int = 0
    utilization_us: float = 0.0
    latency: LatencyLog = field(default_factory=LatencyLog)


class Replay:
    """A replay of a trace. Observers may read `totals`, `block_manager` and `scheduler`.

    Parameters
    ----------
    trace : Trace
        The requests. A request that can never fit the pool is counted as refused.
    config : SchedulerConfig
        The configuration of the scheduler.
    block_manager : MeteredBlockManager
        Over the allocator of the pool.
    cost : CostModel
        The virtual clock.
    attention : Attention, optional
        Stores K and V and decodes on real memory.
    arrivals : Arrivals, optional
        Default: the recorded arrival times.
    cache : MeteredCache, optional
        A prefix cache over the same allocator.
    tokens : TraceTokens, optional
        Token ids that the cache compares. Required with a cache.
    """

    def __init__(
        self,
        trace: Trace,
        config: SchedulerConfig,
        block_manager: MeteredBlockManager,
        cost: CostModel,
        attention: Attention | None = None,
        arrivals: Arrivals | None = None,
        cache: MeteredCache | None = None,
        tokens: TraceTokens | None = None,
    ) -> None:
        self.trace = trace
        self._arrivals: Arrivals = OpenLoop(trace) if arrivals is None else arrivals
        self._requests: dict[int, int] = {}  # sequence -> request of the trace
        self.block_manager = block_manager
        self.attention = attention
        self.totals = Totals()
        self.cache = cache
        self.scheduler: Any = Scheduler(config, block_manager, cache)
        self._tokens = tokens
        self._outputs: dict[int, Iterator[int]] = {}  # sequence -> its output tokens, with a cache
        self._cost = cost
        # A request is submitted only while fewer than this many wait in the scheduler, to save memory. With the policy
        # fcfs this changes no result.
        self._most_waiting = config.max_sequences
        self._submitted = 0
        self.last_step_us = 0  # virtual duration of the last step

    @property
    def submitted(self) -> int:
        """Number of requests that were submitted to the scheduler or refused."""
        return self._submitted

    def run(self, *observers: Callable[[Replay], Any]) -> None:
        """Replay the whole trace. Calls each of `observers` with the replay after each step. Raises `ReplayFailed`."""
        start = perf_counter_ns()
        totals = self.totals
        while True:
            if self.advance():
                for observe in observers:
                    observe(self)
                continue
            following = self._arrivals.next_time()
            if following is None:
                break
            totals.time_us = max(totals.time_us, following)
        totals.wall_ns = perf_counter_ns() - start
        self.check_end()
        ended = totals.finished + totals.refused
        if ended != len(self.trace):
            raise ReplayFailed(f"{ended} of {len(self.trace)} requests have ended")

    def advance(self) -> bool:
        """Submit the requests that have arrived and run a step. Returns False, and no time passes, without work."""
        self._submit()
        if not self.scheduler.has_work:
            return False
        self._step()
        return True

    def _submit(self) -> None:
        """Submit the requests that have arrived, while few requests wait in the scheduler."""
        trace, scheduler, arrivals, now = self.trace, self.scheduler, self._arrivals, self.totals.time_us
        while scheduler.waiting_count < self._most_waiting:
            following = arrivals.next_time()
            if following is None or following > now:
                return
            index, time = arrivals.take()
            self._submitted += 1
            # The prefill of a prompt also gives the first token. So a request for 0 tokens gets one.
            prompt, limit = trace.prompt[index], trace.prompt[index] + max(1, trace.output[index])
            if self.block_manager.refusal(limit) is None:
                seq_id = self._add(index, prompt, limit)
                self._requests[seq_id] = index
                self.totals.latency.arrive(seq_id, time)
            else:
                self.totals.refused += 1
                arrivals.ended(index, now)

    def _add(self, index: int, prompt: int, limit: int) -> int:
        if self._tokens is None:
            return int(self.scheduler.add_request([TOKEN] * prompt, limit))
        tokens, output = self._tokens.of(index)
        seq_id: int = self.scheduler.add_request(tokens, limit, cache_salt=self._tokens.salt(index))
        self._outputs[seq_id] = output
        return seq_id

    def _sampled(self, batch: ScheduledBatch) -> list[int]:
        """Return the model's token for each row of the batch. Rows without `wants_token` do not use it."""
        if self._tokens is None:
            return [TOKEN] * len(batch.seq_ids)
        rows = zip(batch.seq_ids, batch.wants_token, strict=True)
        return [next(self._outputs[seq_id]) if wanted else TOKEN for seq_id, wanted in rows]

    def _step(self) -> None:
        totals, scheduler = self.totals, self.scheduler
        start = perf_counter_ns()
        batch = scheduler.schedule()
        totals.schedule_ns += perf_counter_ns() - start
        if batch.is_empty:
            raise ReplayFailed(
                f"stuck at step {totals.steps}: {scheduler.waiting_count} requests wait, but none can be scheduled"
            )
        self._count(batch)
        if self.attention is not None:
            self.attention.run(batch)
        sampled = self._sampled(batch)
        start = perf_counter_ns()
        scheduler.commit(batch, sampled)
        totals.schedule_ns += perf_counter_ns() - start
        for seq in scheduler.drain_finished():
            totals.finished += 1
            totals.latency.finish(seq.id)
            self._arrivals.ended(self._requests.pop(seq.id), totals.time_us)
            self._outputs.pop(seq.id, None)

    def _count(self, batch: ScheduledBatch) -> None:
        """Advance the virtual time by the step, and count its tokens and blocks."""
        totals, block_manager = self.totals, self.block_manager
        prefill_tokens = batch.total_tokens - batch.num_decodes
        duration = self._cost.of(prefill_tokens, batch.num_decodes)
        self.last_step_us = duration
        totals.steps += 1
        totals.prefill_tokens += prefill_tokens
        totals.decode_tokens += batch.num_decodes
        totals.time_us += duration
        totals.occupied_us += duration
        places = block_manager.allocator.in_use * block_manager.block_size
        totals.utilization_us += duration * block_manager.num_tokens / places
        # Every decode and the last chunk of a prompt get a token.
        ids, first = batch.seq_ids, batch.num_decodes
        if prefill_tokens:
            ids = ids[:first] + [ids[row] for row in range(first, len(ids)) if batch.wants_token[row]]
        totals.latency.tokens(ids, totals.time_us)

    def check_end(self) -> None:
        """Reset the cache. Raises `ReplayFailed` if a block is still in use after that."""
        allocator = self.block_manager.allocator
        allocator.check()
        if self.cache is not None:
            self.cache.check()
            self.cache.reset_prefix_cache()
        if allocator.in_use:
            raise ReplayFailed(f"{allocator.in_use} of {allocator.capacity} blocks are still in use at the end")


class MeteredBlockManager(BlockManager):
    """Counts allocated and freed blocks, and measures the wall time of this work.

    It measures the calls of `append_batch` and `release_batch`: taking and freeing ids, filling the block tables, and
    appends that find room in their last block. It excludes the loop that adds up the lengths of released states.
    """

    def __init__(self, allocator: Any, block_size: int) -> None:
        super().__init__(allocator, block_size)
        self.block_allocs = 0
        self.block_frees = 0
        self.nanoseconds = 0

    def _append_batch(self, states: list[Any], counts: list[int]) -> None:
        before = self.allocator.in_use
        start = perf_counter_ns()
        try:
            super()._append_batch(states, counts)
        finally:
            self.nanoseconds += perf_counter_ns() - start
        self.block_allocs += self.allocator.in_use - before

    def _release_batch(self, states: list[Any], close: bool) -> None:
        before = self.allocator.in_use
        start = perf_counter_ns()
        super()._release_batch(states, close)
        self.nanoseconds += perf_counter_ns() - start
        self.block_frees += before - self.allocator.in_use

    def truncate(self, seq: Any, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of `seq`."""
        before = self.allocator.in_use
        start = perf_counter_ns()
        super().truncate(seq, num_tokens)
        self.nanoseconds += perf_counter_ns() - start
        self.block_frees += before - self.allocator.in_use


class MeteredCache:
    """A `PrefixCache` that measures the wall time of the scheduler's calls."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.nanoseconds = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        if name not in ("match_held", "match_prefix", "cached_tokens", "cache_blocks", "evict"):
            return found

        def timed(*arguments: Any, **names: Any) -> Any:
            start = perf_counter_ns()
            try:
                return found(*arguments, **names)
            finally:
                self.nanoseconds += perf_counter_ns() - start

        return timed
