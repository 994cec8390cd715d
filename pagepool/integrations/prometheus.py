"""Figures of schedulers, pools and caches for Prometheus, read when it asks; nothing is counted on the way.

Needs the extra `metrics` (prometheus_client).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

__all__ = ["PagepoolCollector"]


class PagepoolCollector:
    """A collector to register: it reads the `stats()` of what it is given at each scrape.

    scheduler  a `Scheduler`, or None
    pools      name -> `KvCachePool`, `BlockAllocator` or `SsmStatePool`
    caches     name -> `PrefixCache`

    Gauges `pagepool:num_requests_running`, `pagepool:num_requests_waiting`, `pagepool:kv_cache_usage_perc` (from 0 to
    1, of blocks in use that cannot be evicted), `pagepool:kv_blocks` (by state: used, evictable, free),
    `pagepool:kv_bytes`, `pagepool:states`, `pagepool:peak`; counters `pagepool:num_preemptions`,
    `pagepool:prefix_cache_queries` and `pagepool:prefix_cache_hits`, in blocks, `pagepool:prefix_cache_evictions`. The
    label `pool` or `cache` is the name.
    Raises `ImportError` when prometheus_client is not installed.

    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> from pagepool import BlockAllocator
    >>> allocator, registry = BlockAllocator(4), CollectorRegistry()
    >>> registry.register(PagepoolCollector(pools={"kv": allocator}))
    >>> block = allocator.allocate()
    >>> registry.get_sample_value("pagepool:kv_cache_usage_perc", {"pool": "kv"})
    0.25
    """

    def __init__(
        self,
        scheduler: Any = None,
        pools: Mapping[str, Any] | None = None,
        caches: Mapping[str, Any] | None = None,
    ) -> None:
        self._families = import_module("prometheus_client.core")
        self._scheduler = scheduler
        self._pools = dict(pools or {})
        self._caches = dict(caches or {})

    def collect(self) -> Iterator[Any]:
        """The families of samples, as prometheus_client asks for them."""
        yield from self._of_scheduler()
        yield from self._of_pools()
        yield from self._of_caches()

    def _of_scheduler(self) -> Iterator[Any]:
        if self._scheduler is None:
            return
        gauge, counter = self._families.GaugeMetricFamily, self._families.CounterMetricFamily
        running, waiting = self._scheduler.active_count, self._scheduler.waiting_count
        yield gauge("pagepool:num_requests_running", "Requests that are active.", value=running)
        yield gauge("pagepool:num_requests_waiting", "Requests that wait.", value=waiting)
        preemptions = self._scheduler.num_preemptions
        yield counter("pagepool:num_preemptions", "How often a request's blocks were taken away.", value=preemptions)

    def _of_pools(self) -> Iterator[Any]:
        gauge = self._families.GaugeMetricFamily
        usage = gauge("pagepool:kv_cache_usage_perc", "Blocks in use and not evictable, from 0 to 1.", labels=["pool"])
        blocks = gauge("pagepool:kv_blocks", "Blocks by state.", labels=["pool", "state"])
        states = gauge("pagepool:states", "Slots of recurrent states by state.", labels=["pool", "state"])
        size = gauge("pagepool:kv_bytes", "Bytes of pages or states in use.", labels=["pool"])
        peak = gauge("pagepool:peak", "The most blocks or slots in use at any one time.", labels=["pool"])
        for name, pool in self._pools.items():
            figures = pool.stats()
            kinds = ("used", "evictable", "free") if "evictable" in figures else ("used", "free")
            family = blocks if "evictable" in figures else states
            for kind in kinds:
                family.add_metric([name, kind], figures[kind])
            if family is blocks:
                usage.add_metric([name], figures["used"] / figures["capacity"] if figures["capacity"] else 0.0)
            if "bytes" in figures:
                size.add_metric([name], figures["bytes"])
            peak.add_metric([name], figures["peak"])
        yield from (family for family in (usage, blocks, states, size, peak) if family.samples)

    def _of_caches(self) -> Iterator[Any]:
        counter = self._families.CounterMetricFamily
        meanings = {
            "prefix_cache_queries": ("looked_up", "Full blocks that were looked up."),
            "prefix_cache_hits": ("hits", "Full blocks that were found."),
            "prefix_cache_evictions": ("evicted", "Blocks that were evicted."),
        }
        figures = {name: cache.stats() for name, cache in self._caches.items()}
        for metric, (key, meaning) in meanings.items():
            family = counter(f"pagepool:{metric}", meaning, labels=["cache"])
            for name in figures:
                family.add_metric([name], figures[name][key])
            if figures:
                yield family
