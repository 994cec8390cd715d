"""What is shown: the results of a replay, and of passes through the prefix cache, as a dict for JSON and as tables."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pagepool.replay.driver import Replay
from pagepool.replay.latency import percentile
from pagepool.replay.output import show
from pagepool.replay.passes import BELADY, CachePass, HybridPass, StateOptions
from pagepool.replay.prompts import Prompts

__all__ = [
    "about_pass",
    "about_states",
    "footer",
    "headings",
    "hybrid_results",
    "hybrid_table",
    "pass_results",
    "print_comparison",
    "print_hybrid",
    "print_passes",
    "print_table",
    "results",
    "title",
]

# What to name beside a licence that asks for it.
ATTRIBUTION = {
    "azure2023_conv": "Trace: Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv (Splitwise, ISCA'24), CC-BY-4.0.",
    "mooncake_synthetic": "Trace: kvcache-ai/Mooncake, FAST25-release, Apache-2.0.",
    "claude_code_sessions": "Trace: callanjfox/kv-cache-tester, Apache-2.0.",
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
    heading, rows, below = headings(numbers)
    show(heading, [], rows, below)


def headings(numbers: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    """The title, what the table has as pairs of texts, and whose trace it is."""
    users = f", closed loop of {numbers['users']} users" if numbers["users"] else ""
    return f"pagepool replay of {numbers['trace']}{users}", _replay_rows(numbers), footer(numbers)


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


def _replay_rows(numbers: dict[str, Any]) -> list[tuple[str, str]]:
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


def pass_results(prompts: Prompts, passes: list[CachePass], about: dict[str, Any]) -> dict[str, Any]:
    """Everything counted. `prefix` is an object for one pass, a list of them for several; only `ns_per_block`, the wall
    time of look-up and insertion over the blocks given, differs from run to run; null: they were counted by stack
    distances, without a cache. `capacity_blocks` null: unlimited. `about` says what else was asked for.
    """
    rows = [
        {
            "policy": one.policy,
            "capacity_blocks": one.capacity,
            "full_blocks": one.full_blocks,
            "hit_blocks": one.hit_blocks,
            "evictions": one.evictions,
            "ns_per_block": None if one.nanoseconds is None else one.nanoseconds / max(1, one.blocks),
        }
        for one in passes
    ]
    return {**about_pass(prompts, about), "prefix": rows[0] if len(rows) == 1 else rows}


def about_pass(prompts: Prompts, about: dict[str, Any]) -> dict[str, Any]:
    """What the results of every pass without a clock begin with."""
    return {
        "trace": prompts.trace.name,
        "licence": prompts.trace.licence,
        "requests": len(prompts.trace),
        "clock": "none",
        "block_size": prompts.block_size,
        "cache_partial": prompts.partial,
        **about,
    }


def print_passes(numbers: dict[str, Any]) -> None:
    """Print a line for each pass to stdout."""
    lines = [
        [
            row["policy"],
            _capacity(row),
            f"{row['hit_blocks']:,}",
            f"{row['full_blocks']:,}",
            f"{_rate(row):.1%}",
            f"{row['evictions']:,}",
            "swept" if row["ns_per_block"] is None else f"{row['ns_per_block']:.1f}",
        ]
        for row in _rows(numbers)
    ]
    header = ["policy", "capacity", "hits", "of full", "rate", "evictions", "ns/block"]
    show(title(numbers), header, lines, footer(numbers))


def print_comparison(numbers: dict[str, Any]) -> None:
    """Print the hit rates to stdout, a line for each capacity and a column for each policy; * marks the best, belady
    apart, which is no policy but the bound of all."""
    rows = _rows(numbers)
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    by_capacity: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_capacity.setdefault(_capacity(row), {})[row["policy"]] = row
    rates, shares = [], []
    for capacity, line in by_capacity.items():
        most = max((row["hit_blocks"] for policy, row in line.items() if policy != BELADY), default=None)
        marks = ("*" if row["hit_blocks"] == most and policy != BELADY else " " for policy, row in line.items())
        rates.append([capacity, *(f"{_rate(row):.2%}{mark}" for row, mark in zip(line.values(), marks, strict=True))])
        if {"lru", BELADY} <= set(line):
            low, high = line["lru"]["hit_blocks"], line[BELADY]["hit_blocks"]
            above = ((row["hit_blocks"] - low) / (high - low) if high > low else 0.0 for row in line.values())
            shares.append([capacity, *(f"{share:.1%}" for share in above)])
    header = ["capacity", *policies]
    show(title(numbers), header, rates, "" if shares else footer(numbers))
    if shares:
        show("as shares of what belady has above lru", header, shares, footer(numbers))


def _rows(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = numbers["prefix"] if isinstance(numbers["prefix"], list) else [numbers["prefix"]]
    return found


def title(numbers: dict[str, Any]) -> str:
    """The line above a table."""
    partial = ", partial blocks too" if numbers["cache_partial"] else ""
    users = f", {numbers['users']} users" if numbers["users"] else ""
    order = "" if numbers["order"] == "arrival" else f", order {numbers['order']}"
    return (
        f"prefix cache, {numbers['trace']}: {numbers['requests']:,} prompts, {numbers['block_size']}-token blocks"
        f"{partial}{users}{order}"
    )


def footer(numbers: dict[str, Any]) -> str:
    """The line below it: whose trace this is."""
    return ATTRIBUTION.get(numbers["trace"], f"Trace: {numbers['trace']}, {numbers['licence']}.")


def _capacity(row: dict[str, Any]) -> str:
    return "unlimited" if row["capacity_blocks"] is None else f"{row['capacity_blocks']:,}"


def _rate(row: dict[str, Any]) -> float:
    return row["hit_blocks"] / row["full_blocks"] if row["full_blocks"] else 0.0


def hybrid_results(
    prompts: Prompts, passes: list[HybridPass], options: StateOptions, about: dict[str, Any]
) -> dict[str, Any]:
    """Everything counted, the same in every run. `hybrid` is an object for one pass, a list of them for several.

    `usable_share` is `usable_blocks` of `hit_blocks`; `state_share` is `states_saved` of `every_block_states`, the
    states that one at the end of every block would have been, and `peak_state_share` that of those at a time.
    """
    rows = [
        {
            "policy": one.policy,
            "capacity_blocks": one.capacity,
            "full_blocks": one.full_blocks,
            "hit_blocks": one.hit_blocks,
            "usable_blocks": one.usable_blocks,
            "usable_share": _ratio(one.usable_blocks, one.hit_blocks),
            "every_block_states": one.every_block,
            "states_saved": sum(one.states["saved"].values()),
            "state_share": _ratio(sum(one.states["saved"].values()), one.every_block),
            "peak_states": one.states["peak_states"],
            "peak_state_share": _ratio(one.states["peak_states"], one.peak_blocks),
            "saved": one.states["saved"],
            "used": one.states["used"],
        }
        for one in passes
    ]
    sizes = {"state_bytes": options.state_bytes, "budget_bytes": options.budget_bytes, "grid": options.grid}
    return {**about_pass(prompts, about), "states": sizes, "hybrid": rows[0] if len(rows) == 1 else rows}


def print_hybrid(numbers: dict[str, Any]) -> None:
    """Print a line for each pass to stdout."""
    header, *lines = hybrid_table(numbers)
    show(f"{title(numbers)}\n{about_states(numbers)}", header, lines, "")
    rows = _hybrid_rows(numbers)
    kinds = [
        [row["policy"], line[1], *(f"{row['saved'][kind]:,} / {row['used'][kind]:,}" for kind in row["saved"])]
        for row, line in zip(rows, lines, strict=True)
    ]
    show("states kept / times used", ["policy", "capacity", *rows[0]["saved"]], kinds, footer(numbers))


def about_states(numbers: dict[str, Any]) -> str:
    """How large a state is, what all of them may take, and the grid."""
    sizes = numbers["states"]
    budget = "no bound" if sizes["budget_bytes"] is None else f"at most {sizes['budget_bytes'] / 2**20:,.1f} MiB"
    grid = f"a grid of {sizes['grid']:,} tokens" if sizes["grid"] else "no grid"
    return f"states of {sizes['state_bytes'] / 2**20:,.2f} MiB, {budget}; {grid}"


def hybrid_table(numbers: dict[str, Any]) -> list[list[str]]:
    """A header, and a line for each pass."""
    lines = [
        [
            row["policy"],
            "unlimited" if row["capacity_blocks"] is None else f"{row['capacity_blocks']:,}",
            f"{row['hit_blocks']:,}",
            f"{row['usable_blocks']:,}",
            f"{row['usable_share']:.1%}",
            f"{row['states_saved']:,}",
            f"{row['state_share']:.1%}",
            f"{row['peak_state_share']:.1%}",
        ]
        for row in _hybrid_rows(numbers)
    ]
    return [["policy", "capacity", "hits", "usable", "share", "states", "of every block", "at a time"], *lines]


def _hybrid_rows(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = numbers["hybrid"] if isinstance(numbers["hybrid"], list) else [numbers["hybrid"]]
    return found
