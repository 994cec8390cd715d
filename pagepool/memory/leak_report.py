"""Warnings about what is held still where nothing should be: when a pool is closed, or an engine is idle."""

from __future__ import annotations

import sys
import warnings

from pagepool.memory.owners import Leak

__all__ = ["warn_of"]

MOST = 20  # holders that have a warning of their own


def warn_of(leaks: list[Leak], where: str) -> None:
    """A `ResourceWarning` for each leak, those with the most first, and one for the rest when there are many.

    Each has its holder as `source`, so that Python, when it is started with `-X tracemalloc=10`, says where that was
    made. The warning is of the first line up the stack that is not pagepool's own.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("pagepool."):
        level, frame = level + 1, frame.f_back
    for leak in leaks[:MOST]:
        warnings.warn(f"{where}: {_sentence(leak)}", ResourceWarning, stacklevel=level, source=leak.holder)
    rest = leaks[MOST:]
    if rest:
        blocks = sum(len(leak.blocks) for leak in rest)
        message = f"{where}: {len(rest)} others hold {blocks} blocks or states still"
        warnings.warn(message, ResourceWarning, stacklevel=level)


def _sentence(leak: Leak) -> str:
    number, alone = len(leak.blocks), len(leak.alone)
    if leak.kind == "state":
        return f"request {leak.label} has state {leak.blocks[0]} still"
    who = f"a {leak.kind} without a label" if leak.label is None else f"{leak.kind} {leak.label!r}"
    if leak.kind == "other":
        who = "nobody who is known"
    blocks = "1 block" if number == 1 else f"{number} blocks"
    return f"{who} holds {blocks} still, {alone} of them alone"
