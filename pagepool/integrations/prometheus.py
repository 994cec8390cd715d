"""Prometheus metrics of schedulers, pools, caches and routers. They are read at each scrape and cost nothing else.

Needs the extra `metrics` (prometheus_client).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from pagepool._arguments import wrong

__all__ = ["PagepoolCollector"]


class PagepoolCollector:
    """A collector to register with a registry. At each scrape it reads the counters and `stats()` of its objects.

    Gauges: `pagepool:num_requests_running`, `pagepool:num_requests_waiting`, `pagepool:kv_cache_usage_perc` (the share
    of blocks that are in use and not evictable, from 0 to 1), `pagepool:kv_blocks` (by state: used, evictable, free),
    `pagepool:kv_bytes`, `pagepool:states`, `pagepool:peak`. Counters: `pagepool:num_preemptions`; in blocks
    `pagepool:prefix_cache_queries`, `pagepool:prefix_cache_hits`, `pagepool:prefix_cache_evictions`; of routers
    `pagepool:router_choices`, `pagepool:router_snapshots`, in tokens `pagepool:router_found_tokens` and
    `pagepool:router_forecast_error_tokens` (by direction: over, under). The label `pool`, `cache` or `router` is the
    name.

    A cache with a store also has, in pages: `pagepool:prefix_cache_tier_hits` (by tier: memory, store),
    `pagepool:store_pages` (by event: written, evicted, refused for a wrong sum, dropped because it was not written),
    in bytes `pagepool:store_bytes` (by direction: read, written). Gauges: `pagepool:store_disk_bytes`, and
    `pagepool:store_is_writer`, which is 0 in a process that only reads.

    Parameters
    ----------
    scheduler : Scheduler or None
        The scheduler to monitor.
    pools : mapping or None
        Name -> `KvCachePool`, `BlockAllocator` or `SsmStatePool`.
    caches : mapping or None
        Name -> `PrefixCache`.
    routers : mapping or None
        Name -> `Router`.

    Raises
    ------
    ImportError
        prometheus_client is not installed.
    TypeError
        An object has a wrong type.

    Examples
    --------
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
        routers: Mapping[str, Any] | None = None,
    ) -> None:
        self._families = import_module("prometheus_client.core")
        if scheduler is not None and not hasattr(scheduler, "num_preemptions"):
            raise wrong("scheduler", "a Scheduler or None", scheduler)
        self._scheduler = scheduler
        self._pools = _named("pools", pools, "a KvCachePool, BlockAllocator or SsmStatePool", "peak")
        self._caches = _named("caches", caches, "a PrefixCache", "looked_up")
        self._routers = _named("routers", routers, "a Router", "choices")

    def collect(self) -> Iterator[Any]:
        """Yield the metric families. prometheus_client calls this at each scrape."""
        yield from self._of_scheduler()
        yield from self._of_pools()
        yield from self._of_caches()
        yield from self._of_routers()

    def _of_scheduler(self) -> Iterator[Any]:
        if self._scheduler is None:
            return
        gauge, counter = self._families.GaugeMetricFamily, self._families.CounterMetricFamily
        running, waiting = self._scheduler.active_count, self._scheduler.waiting_count
        yield gauge("pagepool:num_requests_running", "Running requests.", value=running)
        yield gauge("pagepool:num_requests_waiting", "Waiting requests.", value=waiting)
        preemptions = self._scheduler.num_preemptions
        yield counter(
            "pagepool:num_preemptions",
            "Running requests that had to give up blocks.",
            value=preemptions,
        )

    def _of_pools(self) -> Iterator[Any]:
        gauge = self._families.GaugeMetricFamily
        usage = gauge("pagepool:kv_cache_usage_perc", "Blocks in use and not evictable, from 0 to 1.", labels=["pool"])
        blocks = gauge("pagepool:kv_blocks", "Blocks by state.", labels=["pool", "state"])
        states = gauge("pagepool:states", "Slots of recurrent states by state.", labels=["pool", "state"])
        size = gauge("pagepool:kv_bytes", "Bytes of pages or states in use.", labels=["pool"])
        peak = gauge("pagepool:peak", "Largest number of blocks or slots in use at the same time.", labels=["pool"])
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
            "prefix_cache_queries": ("looked_up", "Full blocks looked up."),
            "prefix_cache_hits": ("hits", "Full blocks found."),
            "prefix_cache_evictions": ("evicted", "Blocks evicted."),
        }
        figures = {name: cache.stats() for name, cache in self._caches.items()}
        for metric, (key, meaning) in meanings.items():
            family = counter(f"pagepool:{metric}", meaning, labels=["cache"])
            for name in figures:
                family.add_metric([name], figures[name][key])
            if figures:
                yield family
        yield from self._of_stores({name: figures[name]["hits"] for name in figures})

    def _of_stores(self, hits: dict[str, int]) -> Iterator[Any]:
        stores = {name: store for name in hits if (store := getattr(self._caches[name], "store", None)) is not None}
        if not stores:
            return
        counter, gauge = self._families.CounterMetricFamily, self._families.GaugeMetricFamily
        tiers = counter("pagepool:prefix_cache_tier_hits", "Full blocks found, by tier.", labels=["cache", "tier"])
        pages = counter("pagepool:store_pages", "Pages of the store, by event.", labels=["cache", "event"])
        moved = counter("pagepool:store_bytes", "Bytes of pages read and written.", labels=["cache", "direction"])
        size = gauge("pagepool:store_disk_bytes", "Bytes of the files of the store.", labels=["cache"])
        writer = gauge("pagepool:store_is_writer", "1 if this process writes to the store.", labels=["cache"])
        for name, store in stores.items():
            figures = store.stats()
            tiers.add_metric([name, "memory"], max(0, hits[name] - figures["found_blocks"]))
            tiers.add_metric([name, "store"], figures["found_blocks"])
            for event in ("written", "evicted", "refused", "dropped"):
                pages.add_metric([name, event], figures[event])
            for direction in ("read", "written"):
                moved.add_metric([name, direction], figures[f"{direction}_bytes"])
            size.add_metric([name], figures["bytes"])
            writer.add_metric([name], store.is_writer)
        yield from (tiers, pages, moved, size, writer)

    def _of_routers(self) -> Iterator[Any]:
        counter = self._families.CounterMetricFamily
        meanings = {
            "router_choices": ("choices", "Prompts that were sent to a worker."),
            "router_found_tokens": ("found_tokens", "Tokens that workers found cached."),
            "router_snapshots": ("snapshots", "Snapshots that were restored."),
        }
        figures = {name: router.stats() for name, router in self._routers.items()}
        for metric, (key, meaning) in meanings.items() if figures else ():
            family = counter(f"pagepool:{metric}", meaning, labels=["router"])
            for name in figures:
                family.add_metric([name], figures[name][key])
            yield family
        errors = counter(
            "pagepool:router_forecast_error_tokens", "Tokens forecast and found, apart.", labels=["router", "direction"]
        )
        for name in figures:
            errors.add_metric([name, "over"], figures[name]["overestimated"])
            errors.add_metric([name, "under"], figures[name]["underestimated"])
        if figures:
            yield errors


def _named(argument: str, found: Mapping[str, Any] | None, kind: str, figure: str) -> dict[str, Any]:
    """Return the objects by name. Raises `TypeError` if `figure` is missing in the `stats()` of an object."""
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise wrong(argument, "a mapping of names to objects, or None", found)
    for name, one in found.items():
        if not hasattr(one, "stats") or figure not in one.stats():
            raise wrong(f"{argument}[{name!r}]", kind, one)
    return dict(found)
