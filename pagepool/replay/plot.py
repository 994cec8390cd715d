"""`--plot FILE`: the picture of a replay as a PNG, by matplotlib."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pagepool.replay.hybrid_plot import draw_hybrid
from pagepool.replay.plot_style import COLOURS, INK, MUTED, SURFACE, legend, percent, style

__all__ = ["draw", "load"]

BLUES = ("#eef4fc", "#b7d3f6", "#5598e7", "#2a78d6", "#184f95", "#0d366b")


def load() -> Any:
    """matplotlib's figure class and colour map, for `draw`. Raises ImportError where it is missing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    return Figure, FigureCanvasAgg, LinearSegmentedColormap


def draw(picture: dict[str, Any], target: str | Path | BinaryIO) -> None:
    """Writes the picture to a file, by its path or open, as a PNG. Raises ImportError, OSError."""
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
    """A window without a first token has the value of the one before."""
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
