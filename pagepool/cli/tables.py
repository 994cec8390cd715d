"""The results of replays as tables on standard output."""

from __future__ import annotations

from typing import Any

from pagepool.cli.output import show
from pagepool.replay.report import (
    about_states,
    as_list,
    capacity_text,
    footer,
    headings,
    hit_rate,
    title,
)

__all__ = ["print_cluster", "print_hybrid", "print_passes", "print_table"]


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
            f"{row['ns_per_block']:.1f}",
        ]
        for row in as_list(numbers["prefix"])
    ]
    header = ["policy", "capacity", "hits", "of full", "rate", "evictions", "ns/block"]
    show(title(numbers), header, lines, footer(numbers))


def print_hybrid(numbers: dict[str, Any]) -> None:
    """Print a line for each pass on stdout, and the number of saved and used states of each kind."""
    rows = as_list(numbers["hybrid"])
    lines = [
        [
            row["policy"],
            capacity_text(row),
            f"{row['hit_blocks']:,}",
            f"{row['usable_blocks']:,}",
            f"{row['usable_share']:.1%}",
            f"{row['states_saved']:,}",
            f"{row['state_share']:.1%}",
            f"{row['peak_state_share']:.1%}",
        ]
        for row in rows
    ]
    header = ["policy", "capacity", "hits", "usable", "share", "states", "of every block", "at a time"]
    show(f"{title(numbers)}\n{about_states(numbers)}", header, lines)
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
