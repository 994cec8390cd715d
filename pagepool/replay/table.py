"""Tables on stdout: with rich when it is installed and stdout is a terminal, in plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["show"]


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], footer: str = "") -> None:
    """Print a table: the first column from the left, the others from the right; no header when it is empty."""
    if sys.stdout is None:
        return  # closed by who started us
    if sys.stdout.isatty() and _rich(title, header, rows, footer):
        return
    lines = [header, *rows] if header else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  " + "  ".join(cells).rstrip())
    if footer:
        print(footer)


def _rich(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], footer: str) -> bool:
    """Whether rich was there to print it, and the terminal wide enough: it would cut the numbers off."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    # Texts, not markup: a trace's name may hold brackets.
    caption = Text(footer) if footer else None
    table = Table(title=Text(title), caption=caption, show_header=bool(header), box=SIMPLE_HEAD, title_justify="left")
    for index in range(len(rows[0]) if rows else len(header)):
        name = Text(header[index]) if header else ""
        table.add_column(name, justify="right" if index else "left", style="" if index else "bold", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    if Console(width=1 << 16).measure(table).maximum > console.width:
        return False
    console.print(table)
    return True
