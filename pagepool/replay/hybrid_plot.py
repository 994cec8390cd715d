"""The picture of a hybrid model's passes as axes of matplotlib."""

from __future__ import annotations

from typing import Any

from pagepool.replay.plot_style import COLOURS, MUTED, percent, style

__all__ = ["draw_hybrid"]

EVERY_BLOCK: tuple[int, tuple[int, int]] = (0, (4, 3))


def draw_hybrid(figure: Any, hybrid: dict[str, Any]) -> None:
    """Three axes one above the other: over the bytes of states, and twice over the trace."""
    over_bytes, over_trace, states = figure.subplots(3, 1, height_ratios=(1.5, 1, 1))
    _budgets(over_bytes, hybrid["lines"])
    style(over_trace, "over the trace: share of full blocks usable; dashed: with a state at the end of every block")
    style(states, "states kept; dashed: at the end of every cached block")
    for line, colour in zip(hybrid["lines"], COLOURS * 8, strict=False):
        for axis, kept, every in ((over_trace, "usable", "hit"), (states, "states", "every_block")):
            axis.plot(hybrid["ends"], line[every], color=colour, lw=1, ls=EVERY_BLOCK, alpha=0.8)
            axis.plot(hybrid["ends"], line[kept], color=colour, lw=1.5)
    over_trace.set_ylim(bottom=0)
    over_trace.yaxis.set_major_formatter(percent)
    states.set_yscale("symlog", linthresh=10)
    states.set_ylim(bottom=0)
    states.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    states.set_xlabel("prompts", color=MUTED, fontsize=9)
    for axis in (over_trace, states):
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _budgets(axis: Any, lines: list[dict[str, Any]]) -> None:
    style(
        axis, "over the MiB of all states: share of full blocks usable; dashed: with a state at the end of every block"
    )
    axis.set_xscale("log", base=2)
    for line, colour in zip(lines, COLOURS * 8, strict=False):
        rooms = [(room / 2**20, rate) for room, rate in line["budgets"]]
        if rooms:
            axis.plot(*zip(*rooms, strict=True), color=colour, lw=1.6, marker="o", ms=4, label=line["name"])
        axis.axhline(line["hit_rate"], color=colour, lw=1, ls=EVERY_BLOCK, alpha=0.8)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.yaxis.set_major_formatter(percent)
    if any(line["budgets"] for line in lines):
        axis.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=MUTED)
