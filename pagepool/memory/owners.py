"""Who owns which block: the answers of `BlockAllocator.owners` and `.leaks`, and the warnings about leaks."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple

__all__ = ["Leak", "Owner", "warn_of"]

MOST = 20  # number of owners that get their own warning


class Owner(NamedTuple):
    """One owner of a block and the number of references that it holds; `object` is None for "other"."""

    kind: str
    label: int | str | None
    references: int
    object: Any


class Leak(NamedTuple):
    """The blocks of one owner, ascending, and those `alone` that no other owner holds."""

    kind: str
    label: int | str | None
    blocks: list[int]
    alone: list[int]
    object: Any


def warn_of(leaks: list[Leak], where: str) -> None:
    """Issues a `ResourceWarning` for each leak, the largest first, and one for the rest when there are many.

    The owner is the warning's `source`: under `-X tracemalloc=10` Python says where it was made. The warning names the
    nearest caller outside pagepool.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("pagepool."):
        level, frame = level + 1, frame.f_back
    for leak in leaks[:MOST]:
        warnings.warn(f"{where}: {_sentence(leak)}", ResourceWarning, stacklevel=level, source=leak.object)
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
        who = "an unknown owner"
    blocks = "1 block" if number == 1 else f"{number} blocks"
    return f"{who} holds {blocks} still, {alone} of them alone"
