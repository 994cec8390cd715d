"""The metrics of `/metrics`: requests, tokens, latencies and the memory metrics of `PagepoolCollector`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily

from pagepool.engine.generation import Generation
from pagepool.engine.protocol import TextEngine
from pagepool.integrations.prometheus import PagepoolCollector

__all__ = ["Metrics"]

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The metrics of one app, in a Prometheus registry of its own."""

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(PagepoolCollector(**engine.observed()))
        self._registry.register(self)
        self.responses = Counter("pagepool:http_responses", "Responses.", ["status"], registry=self._registry)
        text = "Tokens of prompts that were not in the prefix cache, by reason: with explain_misses."
        self._missed = Counter("pagepool:prompt_tokens_missed", text, ["reason"], registry=self._registry)
        self._first = self._histogram("time_to_first_token_seconds", "From a request to its first token.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request to its last token.")
        self._queue = self._histogram("request_queue_time_seconds", "From the engine's queue to the first step.")
        self._between = self._histogram("time_per_output_token_seconds", "Mean time between the tokens of a request.")

    def ended(self, generation: Generation, began: float) -> None:
        """Count a generation that has ended. `began` is the time of its HTTP request, by `monotonic()`."""
        first, ended = generation.first_token_at, generation.ended_at
        for part in generation.miss.parts if generation.miss is not None else ():
            self._missed.labels(part.reason).inc(part.num_tokens)
        if generation.scheduled_at is not None:
            self._queue.observe(generation.scheduled_at - generation.submitted_at)
        if first is not None:
            self._first.observe(first - began)
        if ended is not None:
            self._whole.observe(ended - began)
            if first is not None and len(generation.token_ids) > 1:
                self._between.observe((ended - first) / (len(generation.token_ids) - 1))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        found: bytes = generate_latest(self._registry)
        return found

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of the engine's counters. prometheus_client calls this at each scrape."""
        stats = self._engine.stats()
        requests = CounterMetricFamily("pagepool:requests", "Requests that have ended, by reason.", labels=["reason"])
        for reason, count in stats["ended"].items():
            requests.add_metric([reason], count)
        yield requests
        yield CounterMetricFamily("pagepool:prompt_tokens", "Tokens of prompts.", value=stats["prompt_tokens"])
        yield CounterMetricFamily("pagepool:generation_tokens", "Generated tokens.", value=stats["generated_tokens"])
        text = "Tokens of prompts that were in the prefix cache."
        yield CounterMetricFamily("pagepool:prompt_tokens_cached", text, value=stats["cached_tokens"])
        if "drafted_tokens" in stats:
            text = "Drafts that the model verified."
            yield CounterMetricFamily("pagepool:spec_decode_num_draft_tokens", text, value=stats["drafted_tokens"])
            text = "Drafts that became output."
            yield CounterMetricFamily("pagepool:spec_decode_num_accepted_tokens", text, value=stats["accepted_tokens"])

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"pagepool:{name}", meaning, buckets=SECONDS, registry=self._registry)
