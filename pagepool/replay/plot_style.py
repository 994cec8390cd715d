"""How the axes of every picture look."""

from __future__ import annotations

from typing import Any

__all__ = ["COLOURS", "INK", "MUTED", "SURFACE", "legend", "percent", "style"]

COLOURS = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#8a63d2", "#e87ba4", "#008300", "#52514e")
INK, MUTED, GRID, SURFACE = "#0b0b0b", "#52514e", "#e4e3df", "#fcfcfb"


def style(axis: Any, title: str) -> None:
    """A title, lines across and no frame."""
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
    """The names of the lines, above on the right."""
    axis.legend(loc="lower right", bbox_to_anchor=(1, 0.97), ncols=4, frameon=False, fontsize=8, labelcolor=MUTED)


def percent(value: float, _position: int | None = None) -> str:
    """A share with the digits that it has: ticks of low rates are parts of a percent.

    >>> percent(0.2), percent(0.015)
    ('20%', '1.5%')
    """
    return f"{100 * value:.6g}%"
