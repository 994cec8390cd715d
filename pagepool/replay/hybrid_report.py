"""The results of passes with recurrent states, as a dict for JSON and as a table."""

from __future__ import annotations

from typing import Any

from pagepool.replay.hybrid_pass import HybridPass, StateOptions
from pagepool.replay.prefix_report import about_pass, footer, title
from pagepool.replay.prompts import Prompts
from pagepool.replay.table import show

__all__ = ["about_states", "hybrid_results", "hybrid_table", "print_hybrid"]


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
    rows = _rows(numbers)
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
        for row in _rows(numbers)
    ]
    return [["policy", "capacity", "hits", "usable", "share", "states", "of every block", "at a time"], *lines]


def _rows(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = numbers["hybrid"] if isinstance(numbers["hybrid"], list) else [numbers["hybrid"]]
    return found


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
