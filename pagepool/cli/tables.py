"""The results of replays as tables on standard output."""

from __future__ import annotations

from typing import Any

from pagepool.cli.output import show
from pagepool.replay.passes import BELADY
from pagepool.replay.report import (
    about_states,
    as_list,
    capacity_text,
    footer,
    headings,
    hit_rate,
    hybrid_table,
    pass_rows,
    title,
)

__all__ = ["print_cluster", "print_comparison", "print_hybrid", "print_passes", "print_table"]


def print_table(numbers: dict[str, Any]) -> None:
    """Print the results of a replay on stdout."""
    heading, rows, below = headings(numbers)
    show(heading, [], rows, below)


def print_passes(numbers: dict[str, Any]) -> None:
    """Print a line for each pass on stdout."""
    lines = [
        [
            row["policy"],
            capacity_text(row),
            f"{row['hit_blocks']:,}",
            f"{row['full_blocks']:,}",
            f"{hit_rate(row):.1%}",
            f"{row['evictions']:,}",
            "swept" if row["ns_per_block"] is None else f"{row['ns_per_block']:.1f}",
        ]
        for row in pass_rows(numbers)
    ]
    header = ["policy", "capacity", "hits", "of full", "rate", "evictions", "ns/block"]
    show(title(numbers), header, lines, footer(numbers))


def print_comparison(numbers: dict[str, Any]) -> None:
    """Print the hit rates on stdout, a line for each capacity and a column for each policy.

    * marks the best policy; belady is a bound and never marked. If both lru and belady are compared, a second table
    shows the gain of each policy: 0 % is lru, 100 % is belady.
    """
    rows = pass_rows(numbers)
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    by_capacity: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_capacity.setdefault(capacity_text(row), {})[row["policy"]] = row
    rates, shares = [], []
    for capacity, line in by_capacity.items():
        most = max((row["hit_blocks"] for policy, row in line.items() if policy != BELADY), default=None)
        best = [row["hit_blocks"] == most and policy != BELADY for policy, row in line.items()]
        cells = zip(line.values(), best, strict=True)
        rates.append([capacity, *(f"{hit_rate(row):.2%}{'*' if is_best else ' '}" for row, is_best in cells)])
        if {"lru", BELADY} <= set(line):
            low, high = line["lru"]["hit_blocks"], line[BELADY]["hit_blocks"]
            above = ((row["hit_blocks"] - low) / (high - low) if high > low else 0.0 for row in line.values())
            shares.append([capacity, *(f"{share:.1%}" for share in above)])
    header = ["capacity", *policies]
    show(title(numbers), header, rates, "" if shares else footer(numbers))
    if shares:
        show("hits above lru, as shares of belady's hits above lru", header, shares, footer(numbers))


def print_hybrid(numbers: dict[str, Any]) -> None:
    """Print a line for each pass on stdout, and the number of saved and used states of each kind."""
    header, *lines = hybrid_table(numbers)
    show(f"{title(numbers)}\n{about_states(numbers)}", header, lines)
    rows = as_list(numbers["hybrid"])
    kinds = [
        [
            row["policy"],
            capacity_text(row),
            *(f"{row['saved'][kind]:,} / {row['used'][kind]:,}" for kind in row["saved"]),
        ]
        for row in rows
    ]
    show("states kept / times used", ["policy", "capacity", *rows[0]["saved"]], kinds, footer(numbers))


def print_cluster(numbers: dict[str, Any]) -> None:
    """Print a line for each route on stdout."""
    rows = [
        [
            row["route"],
            f"{row['hit_rate']:.1%}",
            f"{row['prefill_tokens']:,}",
            f"{row['moved_tokens']:,}",
            f"{row['ttft_ms']['p50']:,.1f}",
            f"{row['ttft_ms']['p99']:,.1f}",
            f"{row['load_spread']:.2f}",
            f"{row['used_workers']:,}",
        ]
        for row in numbers["routes"]
    ]
    title = (
        f"pagepool replay of {numbers['trace']}: {numbers['requests']:,} requests, {numbers['workers']:,} workers with "
        f"{numbers['blocks']:,} x {numbers['block_size']} tokens"
    )
    header = [
        "route",
        "found",
        "computed",
        "moved",
        "first token p50 ms",
        "p99 ms",
        "spread",
        "workers that got a request",
    ]
    show(title, header, rows, footer(numbers))
