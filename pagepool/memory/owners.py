"""What `BlockAllocator.owners` and `.leaks` answer with."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Leak", "Owner"]


class Owner(NamedTuple):
    """One holder of a block.

    kind        "sequence", "cache", what an added holder calls itself, or "other"
    label       whose it is, as the holder says: a request id, a name or None
    references  how many of the block's references it has
    holder      the object itself, or None for "other"
    """

    kind: str
    label: int | str | None
    references: int
    holder: Any


class Leak(NamedTuple):
    """Everything that one holder has.

    kind, label, holder  as in `Owner`
    blocks               ids, ascending
    alone                those that nobody else holds: what comes free when it lets go
    """

    kind: str
    label: int | str | None
    blocks: list[int]
    alone: list[int]
    holder: Any
