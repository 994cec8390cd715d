"""The results of passes through the prefix cache, as a dict for JSON and as a table."""

from __future__ import annotations

from typing import Any

from pagepool.replay.prefix_pass import BELADY, CachePass
from pagepool.replay.prompts import Prompts
from pagepool.replay.table import show

__all__ = ["about_pass", "footer", "pass_results", "print_comparison", "print_passes", "title"]

ATTRIBUTION = {
    "mooncake_synthetic": "Trace: kvcache-ai/Mooncake, FAST25-release, Apache-2.0.",
    "claude_code_sessions": "Trace: callanjfox/kv-cache-tester, Apache-2.0.",
}


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
