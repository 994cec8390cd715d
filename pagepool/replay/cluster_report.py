"""The results of many workers as a dict for JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from pagepool.replay.cluster import Cluster
from pagepool.replay.report import percentiles, ratio

__all__ = ["cluster_results"]


def cluster_results(clusters: list[Cluster], users: int | None = None) -> dict[str, Any]:
    """Return all counts, which are the same in every run. `routes` has an object for each cluster.

    All clusters have the same trace and the same number of workers. `hit_rate` is the share of prompt tokens that were
    cached when a request began, including moved tokens. `used_workers` is the number of workers that got a request.
    `load_spread` is the busy time of the busiest worker over the mean of all workers. `moved_s` is the time that links
    were busy. `router` is `Router.stats()`, or null without a router.
    """
    first = clusters[0]
    return {
        "trace": first.trace.name,
        "licence": first.trace.licence,
        "requests": len(first.trace),
        "users": users,
        "workers": first.options.workers,
        "blocks": first.workers[0].block_manager.allocator.capacity,
        "block_size": first.workers[0].block_manager.block_size,
        "staleness_us": first.options.staleness,
        "link": asdict(first.options.link) if first.options.link else None,
        "routes": [_of_route(cluster) for cluster in clusters],
    }


def _of_route(cluster: Cluster) -> dict[str, Any]:
    totals = [worker.totals for worker in cluster.workers]
    busy = [one.occupied_us for one in totals]
    return {
        "route": cluster.options.route,
        "finished": sum(one.finished for one in totals),
        "refused": sum(one.refused for one in totals),
        "steps": sum(one.steps for one in totals),
        "prompt_tokens": cluster.prompt_tokens,
        "found_tokens": cluster.found_tokens,
        "hit_rate": ratio(cluster.found_tokens, cluster.prompt_tokens),
        "prefill_tokens": sum(one.prefill_tokens for one in totals),
        "decode_tokens": sum(one.decode_tokens for one in totals),
        "preemptions": sum(worker.scheduler.num_preemptions for worker in cluster.workers),
        "virtual_s": max(one.time_us for one in totals) / 1e6,
        "ttft_ms": percentiles(sum((one.latency.ttft for one in totals), Counter())),
        "tbt_ms": percentiles(sum((one.latency.tbt for one in totals), Counter())),
        "used_workers": sum(worker.received > 0 for worker in cluster.workers),
        "load_spread": ratio(max(busy) * len(busy), sum(busy)),
        "moved_tokens": cluster.moved_tokens,
        "moved_s": cluster.moved_us / 1e6,
        "router": cluster.router.stats() if cluster.router else None,
    }
