"""Who owns which block: the answers of `BlockAllocator.owners` and `.leaks`, and the warnings about leaks."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pagepool.errors import PoolError

__all__ = ["Leak", "Owner", "audit_holders", "leaks_of", "owners_of", "warn_of"]

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


def owners_of(blocks: Iterable[int], holders: Iterable[Any], ref_count: Callable[[int], int]) -> dict[int, list[Owner]]:
    """Return the owners of each of the blocks, see `BlockAllocator.owners`."""
    found: dict[int, list[Owner]] = {block: [] for block in blocks}
    for holder in holders:
        for block, times in Counter(holder.references()).items():
            if block in found:
                found[block].append(Owner(holder.kind, holder.label, times, holder))
    for block, owners in found.items():
        others = ref_count(block) - sum(owner.references for owner in owners)
        if others > 0:
            owners.append(Owner("other", None, others, None))
    return found


def audit_holders(holders: Iterable[Any], counts: list[int], others: int | None) -> None:
    """Raise `PoolError` if a block has fewer references than its holders have, see `BlockAllocator.check`."""
    references: Counter[int] = Counter()
    for holder in holders:
        references.update(holder.references())
    for block, times in references.items():
        count = counts[block] if block < len(counts) else 0
        if times > count:
            raise PoolError(f"broken invariant: block {block} has {count} references, its holders have {times}")
    surplus = sum(counts) - sum(references.values())
    if others is not None and surplus != others:
        raise PoolError(f"broken invariant: {surplus} references belong to no holder, not {others}")


def leaks_of(owners: dict[int, list[Owner]]) -> list[Leak]:
    """Return the leaks among the owners of all blocks in use, see `BlockAllocator.leaks`."""
    found: list[Leak] = []
    loose: list[int] = []
    by_holder: dict[int, tuple[Owner, list[int]]] = {}
    for block, holders in owners.items():
        for owner in holders:
            if owner.kind == "other":
                loose.append(block)
            elif owner.kind != "cache":
                by_holder.setdefault(id(owner.object), (owner, []))[1].append(block)
    for owner, blocks in by_holder.values():
        alone = [block for block in blocks if len(owners[block]) == 1]
        found.append(Leak(owner.kind, owner.label, blocks, alone, owner.object))
    found.sort(key=lambda leak: -len(leak.blocks))
    if loose:
        alone = [block for block in loose if len(owners[block]) == 1]
        found.append(Leak("other", None, loose, alone, None))
    return found


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
