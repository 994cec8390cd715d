"""Results as dicts for JSON: of a replay, of passes through the prefix cache, of hybrid models, of many workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from pagepool.replay.cluster import Cluster
from pagepool.replay.driver import Replay
from pagepool.replay.latency import percentile
from pagepool.replay.passes import CachePass, HybridPass, StateOptions
from pagepool.replay.prompts import Prompts

__all__ = [
    "about_states",
    "as_list",
    "capacity_text",
    "cluster_results",
    "footer",
    "headings",
    "hit_rate",
    "hybrid_results",
    "pass_results",
    "results",
    "title",
]

# Traces with a licence that requires attribution.
ATTRIBUTION = {
    "azure2023_conv": "Trace: Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv (Splitwise, ISCA'24), CC-BY-4.0.",
    "mooncake_synthetic": "Trace: kvcache-ai/Mooncake, FAST25-release, Apache-2.0.",
    "claude_code_sessions": "Trace: callanjfox/kv-cache-tester, Apache-2.0.",
}


def footer(numbers: dict[str, Any]) -> str:
    """Return the line below a table, which names the source of the trace."""
    return ATTRIBUTION.get(numbers["trace"], f"Trace: {numbers['trace']}, {numbers['licence']}.")


def ratio(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


# ------------------------------------------------------------------------------------- a replay under the virtual clock


def results(replay: Replay, users: int | None = None) -> dict[str, Any]:
    """Return all results of a replay. `users` is the number of users of a closed loop.

    Counts and virtual times are the same in every run. Wall times are `wall_s`, `ns_per_block_op`, `sched_us_per_step`,
    `memory_s`, `memory_share` and the attention's `seconds`, `append_seconds` and `gb_per_s`.

    `ns_per_block_op` is the time of the scheduler's block operations over block_allocs + block_frees. It includes
    appends that take no block, and filling block tables. `sched_us_per_step` is the time of `schedule` and `commit`,
    including block operations. `memory_s` is the time of block operations, of lookups and insertions in a prefix cache,
    and with attention of filling the kernels' tables. `memory_share` is its share of `wall_s`.
    """
    totals, block_manager, attention = replay.totals, replay.block_manager, replay.attention
    operations = block_manager.block_allocs + block_manager.block_frees
    seconds = attention.seconds if attention else 0.0
    memory_seconds = block_manager.nanoseconds / 1e9 + (attention.table_seconds if attention else 0.0)
    if replay.cache is not None:
        memory_seconds += replay.cache.nanoseconds / 1e9
    cache = replay.cache.stats() if replay.cache is not None else None
    kv_bytes = attention.kv_bytes if attention else 0
    return {
        "trace": replay.trace.name,
        "licence": replay.trace.licence,
        "requests": len(replay.trace),
        "users": users,
        "finished": totals.finished,
        "refused": totals.refused,
        "steps": totals.steps,
        "prefill_tokens": totals.prefill_tokens,
        "decode_tokens": totals.decode_tokens,
        "blocks": block_manager.allocator.capacity,
        "block_size": block_manager.block_size,
        "block_allocs": block_manager.block_allocs,
        "block_frees": block_manager.block_frees + (cache["evicted"] + cache["cleared"] if cache else 0),
        "peak_blocks": block_manager.allocator.peak_in_use,
        "mean_utilization": ratio(totals.utilization_us, totals.occupied_us),
        "prefix": {
            "policy": cache["policy"],
            "capacity_blocks": block_manager.allocator.capacity,
            "full_blocks": cache["looked_up"],
            "hit_blocks": cache["hits"],
            "evictions": cache["evicted"],
        }
        if cache
        else None,
        "preemptions": replay.scheduler.num_preemptions,
        "virtual_s": totals.time_us / 1e6,
        "ttft_ms": percentiles(totals.latency.ttft),
        "tbt_ms": percentiles(totals.latency.tbt),
        "wall_s": totals.wall_ns / 1e9,
        "ns_per_block_op": ratio(block_manager.nanoseconds, operations),
        "sched_us_per_step": ratio(totals.schedule_ns / 1e3, totals.steps),
        "memory_s": memory_seconds,
        "memory_share": ratio(memory_seconds * 1e9, totals.wall_ns),
        "attention": {
            "calls": attention.calls if attention else 0,
            "kv_bytes": kv_bytes,
            "seconds": seconds,
            "gb_per_s": ratio(kv_bytes / 1e9, seconds),
            "append_seconds": attention.append_seconds if attention else 0.0,
        },
    }


def percentiles(counts: Counter[int]) -> dict[str, float]:
    """Return the median, the 90th and the 99th percentile of times in microseconds, in milliseconds."""
    return {f"p{percent}": percentile(counts, percent / 100) / 1e3 for percent in (50, 90, 99)}


def headings(numbers: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    """Return the title, the rows of the table as pairs of texts, and the footer."""
    users = f", closed loop of {numbers['users']} users" if numbers["users"] else ""
    return f"pagepool replay of {numbers['trace']}{users}", _replay_rows(numbers), footer(numbers)


def _replay_rows(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    def three(key: str) -> str:
        return " / ".join(f"{value:,.1f}" for value in numbers[key].values())

    prefix, attention = numbers["prefix"], numbers["attention"]
    rows = [
        ("requests", f"{numbers['requests']:,}"),
        ("finished / refused", f"{numbers['finished']:,} / {numbers['refused']:,}"),
        ("steps", f"{numbers['steps']:,}"),
        ("prefill / decode tokens", f"{numbers['prefill_tokens']:,} / {numbers['decode_tokens']:,}"),
        ("blocks taken / given back", f"{numbers['block_allocs']:,} / {numbers['block_frees']:,}"),
        ("peak blocks", f"{numbers['peak_blocks']:,} of {numbers['blocks']:,} x {numbers['block_size']}"),
    ]
    # Not meaningful with a cache: cached blocks belong to no sequence, and shared tokens are counted once for each
    # sequence.
    if not prefix:
        rows += [("mean utilization", f"{numbers['mean_utilization']:.1%}")]
    rows += [("preemptions", f"{numbers['preemptions']:,}")]
    if prefix:
        rows += [
            (f"prefix cache, {prefix['policy']}", f"{hit_rate(prefix):.1%} of {prefix['full_blocks']:,} blocks hit"),
            ("evictions", f"{prefix['evictions']:,}"),
        ]
    rows += [
        ("virtual time", f"{numbers['virtual_s']:,.1f} s"),
        ("first token p50/90/99", f"{three('ttft_ms')} ms"),
        ("between tokens p50/90/99", f"{three('tbt_ms')} ms"),
        ("wall time", f"{numbers['wall_s']:,.2f} s"),
        ("per block operation", f"{numbers['ns_per_block_op']:,.1f} ns"),
        ("memory management", f"{numbers['memory_share']:.2%} of the time"),
        ("scheduler per step", f"{numbers['sched_us_per_step']:,.1f} us"),
    ]
    if attention["calls"]:
        rows += [
            ("decode calls", f"{attention['calls']:,}"),
            ("keys and values read", f"{attention['kv_bytes'] / 1e9:,.1f} GB"),
            ("decode time", f"{attention['seconds']:,.2f} s"),
            ("decode speed", f"{attention['gb_per_s']:,.1f} GB/s"),
            ("append time", f"{attention['append_seconds']:,.2f} s"),
        ]
    return rows


# ---------------------------------------------------------------------------------- the prefix cache, without a clock


def pass_results(prompts: Prompts, passes: list[CachePass]) -> dict[str, Any]:
    """Return all counts, and the number of users. `prefix` is an object for one pass, a list for several passes.

    `ns_per_block` is the wall time of lookup and insertion per block. It is null if an `LruSweep` counted without a
    cache. All other values are the same in every run. `capacity_blocks` null means unlimited.
    """
    rows = [
        {
            "policy": one.policy,
            "capacity_blocks": one.capacity,
            "full_blocks": one.full_blocks,
            "hit_blocks": one.hit_blocks,
            "evictions": one.evictions,
            "ns_per_block": one.nanoseconds / max(1, one.blocks),
        }
        for one in passes
    ]
    return {**_about_pass(prompts), "prefix": rows[0] if len(rows) == 1 else rows}


def _about_pass(prompts: Prompts) -> dict[str, Any]:
    return {
        "trace": prompts.trace.name,
        "licence": prompts.trace.licence,
        "requests": len(prompts.trace),
        "clock": "none",
        "block_size": prompts.block_size,
    }


def hit_rate(row: dict[str, Any]) -> float:
    """Return the share of full blocks that hit."""
    return ratio(row["hit_blocks"], row["full_blocks"])


def title(numbers: dict[str, Any]) -> str:
    """Return the line above the tables of passes without a clock."""
    return f"prefix cache, {numbers['trace']}: {numbers['requests']:,} prompts, {numbers['block_size']}-token blocks"


def as_list(found: Any) -> list[dict[str, Any]]:
    """Return the results of one or several passes as a list."""
    return found if isinstance(found, list) else [found]


def capacity_text(row: dict[str, Any]) -> str:
    """Return the capacity of a pass, for a table."""
    return "unlimited" if row["capacity_blocks"] is None else f"{row['capacity_blocks']:,}"


# ---------------------------------------------------------------------------------------------------- hybrid models


def hybrid_results(prompts: Prompts, passes: list[HybridPass], options: StateOptions) -> dict[str, Any]:
    """Return all counts, which are the same in every run. `hybrid` is an object for one pass, a list for several.

    `usable_share` is `usable_blocks / hit_blocks`. `state_share` is `states_saved / every_block_states`: it compares
    the states with one state at the end of every cached block. `peak_state_share` compares the peaks.
    """
    rows = [
        {
            "policy": one.policy,
            "capacity_blocks": one.capacity,
            "full_blocks": one.full_blocks,
            "hit_blocks": one.hit_blocks,
            "usable_blocks": one.usable_blocks,
            "usable_share": ratio(one.usable_blocks, one.hit_blocks),
            "every_block_states": one.every_block,
            "states_saved": sum(one.states["saved"].values()),
            "state_share": ratio(sum(one.states["saved"].values()), one.every_block),
            "peak_states": one.states["peak_states"],
            "peak_state_share": ratio(one.states["peak_states"], one.peak_blocks),
            "saved": one.states["saved"],
            "used": one.states["used"],
        }
        for one in passes
    ]
    sizes = {"state_bytes": options.state_bytes, "grid": options.grid}
    return {**_about_pass(prompts), "states": sizes, "hybrid": rows[0] if len(rows) == 1 else rows}


def about_states(numbers: dict[str, Any]) -> str:
    """Return a line with the size of a state and the grid."""
    sizes = numbers["states"]
    return f"states of {sizes['state_bytes'] / 2**20:,.2f} MiB, no bound; a grid of {sizes['grid']:,} tokens"


# ------------------------------------------------------------------------------------------------------ many workers


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
