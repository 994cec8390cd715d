"""`--plot FILE`: the picture of a replay as a PNG, by matplotlib."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

__all__ = ["COLOURS", "INK", "MUTED", "SURFACE", "draw", "draw_hybrid", "legend", "load", "percent", "style"]

COLOURS = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#8a63d2", "#e87ba4", "#008300", "#52514e")
BLUES = ("#eef4fc", "#b7d3f6", "#5598e7", "#2a78d6", "#184f95", "#0d366b")
EVERY_BLOCK: tuple[int, tuple[int, int]] = (0, (4, 3))
INK, MUTED, GRID, SURFACE = "#0b0b0b", "#52514e", "#e4e3df", "#fcfcfb"


def style(axis: Any, title: str) -> None:
    """Set the title, draw a horizontal grid and remove the frame."""
    axis.set_facecolor(SURFACE)
    axis.set_title(title, loc="left", color=INK, fontsize=10)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=MUTED, labelsize=8, length=0, which="both")
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#c3c2b7")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def legend(axis: Any) -> None:
    """Draw the legend at the upper right, above the axis."""
    axis.legend(loc="lower right", bbox_to_anchor=(1, 0.97), ncols=4, frameon=False, fontsize=8, labelcolor=MUTED)


def percent(value: float, _position: int | None = None) -> str:
    """Format a share as percent, with a digit after the point for low rates.

    >>> percent(0.2), percent(0.015)
    ('20%', '1.5%')
    """
    return f"{100 * value:.6g}%"


def load() -> Any:
    """Import the classes of matplotlib that `draw` needs. Raises ImportError if it is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    return Figure, FigureCanvasAgg, LinearSegmentedColormap


def draw(picture: dict[str, Any], target: str | Path | BinaryIO) -> None:
    """Write the picture as a PNG to a path or an open file. Raises ImportError, OSError."""
    Figure, Canvas, ColourMap = load()
    timeline, hybrid = picture["timeline"], picture["hybrid"]
    figure = Figure(figsize=(11, 9.5 if timeline or hybrid else 5.5), dpi=130, facecolor=SURFACE)
    Canvas(figure)
    left = 0.075
    figure.text(left, 0.972, picture["title"], color=INK, fontsize=14, fontweight="bold", va="top", parse_math=False)
    figure.text(left, 0.012, picture["footer"], color=MUTED, fontsize=8, parse_math=False)
    if timeline:
        axes = figure.subplots(4, 1, sharex=True, height_ratios=(2.4, 1, 1, 1))
        figure.subplots_adjust(left=left, right=0.985, top=0.915, bottom=0.085, hspace=0.32)
        _map(axes[0], timeline, ColourMap.from_list("blocks", BLUES))
        _counts(axes[1], timeline, "sequences", (("running", "running"), ("waiting", "waiting")))
        _counts(axes[2], timeline, "tokens of a step", (("prefill_tokens", "prompt"), ("decode_tokens", "decode")), 2)
        _latency(axes[3], timeline)
        axes[3].set_xlabel("virtual time, seconds", color=MUTED, fontsize=9)
    elif hybrid:
        draw_hybrid(figure, hybrid)
        figure.subplots_adjust(left=left, right=0.985, top=0.915, bottom=0.085, hspace=0.32)
    else:
        axis = figure.subplots()
        figure.subplots_adjust(left=left, right=0.985, top=0.86, bottom=0.15)
        _curve(axis, picture["curve"])
    figure.savefig(target, format="png", facecolor=SURFACE)


def _map(axis: Any, timeline: dict[str, Any], colours: Any) -> None:
    style(axis, f"blocks in use: the pool of {timeline['capacity']:,} over time, block 0 below")
    axis.grid(False)
    if not timeline["begin"] or not timeline["rows"]:
        return
    cells = np.frombuffer(base64.b64decode(timeline["map"]), np.uint8).reshape(-1, timeline["rows"]).T
    edges = [*timeline["begin"], timeline["end"][-1]]
    rows = np.linspace(0, timeline["capacity"], timeline["rows"] + 1)
    axis.pcolormesh(edges, rows, cells, cmap=colours, vmin=0, vmax=255, rasterized=True)


def _steps(axis: Any, timeline: dict[str, Any], name: str, label: str, colour: str) -> None:
    axis.plot(timeline["end"], [np.nan if v is None else v for v in timeline[name]], color=colour, lw=1.4, label=label)


def _counts(
    axis: Any, timeline: dict[str, Any], title: str, lines: tuple[tuple[str, str], ...], first_colour: int = 0
) -> None:
    style(axis, title)
    for (name, label), colour in zip(lines, COLOURS[first_colour:], strict=False):
        _steps(axis, timeline, name, label, colour)
    axis.set_ylim(bottom=0)
    legend(axis)


def _latency(axis: Any, timeline: dict[str, Any]) -> None:
    style(axis, "latency, milliseconds")
    _steps(axis, timeline, "step_ms", "a step: between tokens", COLOURS[0])
    axis.plot(timeline["end"], _bridged(timeline["ttft_ms"]), color=COLOURS[4], lw=1.2, label="to the first token, p50")
    axis.plot(timeline["end"], _bridged(timeline["ttft_p99_ms"]), color=COLOURS[5], lw=1.2, label="p99")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    legend(axis)


def _bridged(values: list[float | None]) -> list[float]:
    """Replace each None (a window without a first token) by the previous value."""
    found, last = [], float("nan")
    for value in values:
        last = last if value is None else value
        found.append(last)
    return found


def _curve(axis: Any, curve: dict[str, Any]) -> None:
    style(axis, "hit rate of full blocks over the capacity of the prefix cache, in blocks")
    axis.set_xscale("log")
    for line, colour in zip(curve["lines"], COLOURS * 8, strict=False):
        points, whole = line["points"], line["curve"]
        if whole:
            axis.plot(*zip(*whole, strict=True), color=colour, lw=1.6, label=line["policy"])
        if points:
            look = {"ls": "none"} if whole else {"lw": 1.4, "label": line["policy"]}
            axis.plot(*zip(*points, strict=True), color=colour, marker="o", ms=4.5, **look)
    if curve["unlimited"] is not None:
        axis.axhline(curve["unlimited"], color=MUTED, lw=1, ls=(0, (4, 3)))
        axis.annotate(
            "unlimited",
            (0.002, curve["unlimited"]),
            xycoords=("axes fraction", "data"),
            va="bottom",
            color=MUTED,
            fontsize=8,
        )
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.yaxis.set_major_formatter(percent)
    legend(axis)


def draw_hybrid(figure: Any, hybrid: dict[str, Any]) -> None:
    """Draw three charts: usable blocks by the bytes of states, usable blocks along the trace, and states along the
    trace."""
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
