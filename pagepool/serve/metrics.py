"""What `/metrics` shows, beside what `PagepoolCollector` reads: requests, tokens and latencies."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily

from pagepool.engine.generation import Generation
from pagepool.engine.protocol import TextEngine
from pagepool.integrations.prometheus import PagepoolCollector

__all__ = ["Metrics"]

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The metrics of one app, in a registry of its own."""

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(PagepoolCollector(**engine.observed()))
        self._registry.register(self)
        self.responses = Counter("pagepool:http_responses", "Responses.", ["status"], registry=self._registry)
        self._first = self._histogram("time_to_first_token_seconds", "From a request to its first token.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request to its last token.")

    def ended(self, generation: Generation, began: float) -> None:
        """A generation has ended that began at this time of `monotonic()`."""
        if generation.time_to_first_token is not None:
            self._first.observe(generation.time_to_first_token)
        self._whole.observe(monotonic() - began)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        found: bytes = generate_latest(self._registry)
        return found

    def collect(self) -> Iterator[Any]:
        """The metric families of the engine's counters; prometheus_client calls this at each scrape."""
        stats = self._engine.stats()
        requests = CounterMetricFamily("pagepool:requests", "Requests that have ended, by reason.", labels=["reason"])
        for reason, count in stats["ended"].items():
            requests.add_metric([reason], count)
        yield requests
        yield CounterMetricFamily("pagepool:prompt_tokens", "Tokens of prompts.", value=stats["prompt_tokens"])
        yield CounterMetricFamily("pagepool:generation_tokens", "Generated tokens.", value=stats["generated_tokens"])

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"pagepool:{name}", meaning, buckets=SECONDS, registry=self._registry)
