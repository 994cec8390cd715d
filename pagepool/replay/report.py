"""The results of a replay, as a dict for JSON and as a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pagepool.replay.driver import Replay
from pagepool.replay.latency import percentile
from pagepool.replay.table import show

__all__ = ["headings", "print_table", "results"]

# What to name beside a licence that asks for it.
ATTRIBUTION = {
    "azure2023_conv": "Trace: Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv (Splitwise, ISCA'24), CC-BY-4.0.",
}


def results(replay: Replay, users: int | None = None) -> dict[str, Any]:
    """Everything measured, and the number of users when requests came from them. Counts and virtual times are the same
    in every run; `wall_s`, `ns_per_block_op`, `sched_us_per_step`, `memory_s`, `memory_share` and the attention's
    `seconds`, `append_seconds` and `gb_per_s` are wall time.

    `ns_per_block_op`: the time of `append_batch` and `release_batch` over block_allocs + block_frees; appends that take
    no block and the filling of block tables are in the time. `sched_us_per_step`: `schedule` + `commit`, with them.
    `memory_s`: these block operations, look-ups and insertions in a prefix cache, and with attention the tables that
    kernels read; `memory_share`: of `wall_s`.
    """
    totals, account, attention = replay.totals, replay.account, replay.attention
    operations = account.block_allocs + account.block_frees
    seconds = attention.seconds if attention else 0.0
    memory_seconds = account.nanoseconds / 1e9 + (attention.table_seconds if attention else 0.0)
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
        "blocks": account.allocator.capacity,
        "block_size": account.block_size,
        "block_allocs": account.block_allocs,
        "block_frees": account.block_frees + (cache["evicted"] + cache["cleared"] if cache else 0),
        "peak_blocks": account.allocator.peak_in_use,
        "mean_utilization": _ratio(totals.utilization_us, totals.occupied_us),
        "prefix": {
            "policy": cache["policy"],
            "capacity_blocks": account.allocator.capacity,
            "full_blocks": cache["looked_up"],
            "hit_blocks": cache["hits"],
            "evictions": cache["evicted"],
        }
        if cache
        else None,
        "preemptions": replay.scheduler.num_preemptions,
        "virtual_s": totals.time_us / 1e6,
        "ttft_ms": _percentiles(totals.latency.ttft),
        "tbt_ms": _percentiles(totals.latency.tbt),
        "wall_s": totals.wall_ns / 1e9,
        "ns_per_block_op": _ratio(account.nanoseconds, operations),
        "sched_us_per_step": _ratio(totals.schedule_ns / 1e3, totals.steps),
        "memory_s": memory_seconds,
        "memory_share": _ratio(memory_seconds * 1e9, totals.wall_ns),
        "attention": {
            "calls": attention.calls if attention else 0,
            "kv_bytes": kv_bytes,
            "seconds": seconds,
            "gb_per_s": _ratio(kv_bytes / 1e9, seconds),
            "append_seconds": attention.append_seconds if attention else 0.0,
        },
    }


def print_table(numbers: dict[str, Any]) -> None:
    """Print `numbers` to stdout."""
    title, rows, footer = headings(numbers)
    show(title, [], rows, footer)


def headings(numbers: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    """The title, what the table has as pairs of texts, and whose trace it is."""
    footer = ATTRIBUTION.get(numbers["trace"], f"Trace: {numbers['trace']}, {numbers['licence']}.")
    users = f", closed loop of {numbers['users']} users" if numbers["users"] else ""
    return f"pagepool replay of {numbers['trace']}{users}", _rows(numbers), footer


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _percentiles(counts: Counter[int]) -> dict[str, float]:
    return {f"p{percent}": percentile(counts, percent / 100) / 1e3 for percent in (50, 90, 99)}


def _prefix_rows(prefix: dict[str, Any] | None) -> list[tuple[str, str]]:
    if prefix is None:
        return []
    hits, full = prefix["hit_blocks"], prefix["full_blocks"]
    return [
        (f"prefix cache, {prefix['policy']}", f"{_ratio(hits, full):.1%} of {full:,} blocks hit"),
        ("evictions", f"{prefix['evictions']:,}"),
    ]


def _rows(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    def three(key: str) -> str:
        return " / ".join(f"{value:,.1f}" for value in numbers[key].values())

    rows = [
        ("requests", f"{numbers['requests']:,}"),
        ("finished / refused", f"{numbers['finished']:,} / {numbers['refused']:,}"),
        ("steps", f"{numbers['steps']:,}"),
        ("prefill / decode tokens", f"{numbers['prefill_tokens']:,} / {numbers['decode_tokens']:,}"),
        ("blocks taken / given back", f"{numbers['block_allocs']:,} / {numbers['block_frees']:,}"),
        ("peak blocks", f"{numbers['peak_blocks']:,} of {numbers['blocks']:,} x {numbers['block_size']}"),
        # With a cache, blocks that nobody uses are in use, and shared tokens count for each sequence.
        *([] if numbers["prefix"] else [("mean utilization", f"{numbers['mean_utilization']:.1%}")]),
        ("preemptions", f"{numbers['preemptions']:,}"),
        *_prefix_rows(numbers["prefix"]),
        ("virtual time", f"{numbers['virtual_s']:,.1f} s"),
        ("first token p50/90/99", f"{three('ttft_ms')} ms"),
        ("between tokens p50/90/99", f"{three('tbt_ms')} ms"),
        ("wall time", f"{numbers['wall_s']:,.2f} s"),
        ("per block operation", f"{numbers['ns_per_block_op']:,.1f} ns"),
        ("memory management", f"{numbers['memory_share']:.2%} of the time"),
        ("scheduler per step", f"{numbers['sched_us_per_step']:,.1f} us"),
    ]
    attention = numbers["attention"]
    if attention["calls"]:
        rows += [
            ("decode calls", f"{attention['calls']:,}"),
            ("keys and values read", f"{attention['kv_bytes'] / 1e9:,.1f} GB"),
            ("decode time", f"{attention['seconds']:,.2f} s"),
            ("decode speed", f"{attention['gb_per_s']:,.1f} GB/s"),
            ("append time", f"{attention['append_seconds']:,.2f} s"),
        ]
    return rows
