"""What a prefix cache tells other processes: an event for each block stored or removed, and a picture of all."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PrefixEvent", "PrefixSnapshot"]


class PrefixEvent(NamedTuple):
    """One change of a cache, in plain types that any channel carries.

    sequence  1, 2, ...: one that is missing was dropped because nobody drained the events in time
    kind      "stored", "removed" or "cleared": everything went
    block     the id, -1 with "cleared"
    name      16 bytes that stand for salt, keys and all tokens up to the end of the block; b"" with "cleared"
    parent    the name of the prefix before the block, or of salt and keys alone; b"" with "cleared"
    tokens    of the block itself, as int32 in this machine's byte order; b"" but with "stored"
    """

    sequence: int
    kind: str
    block: int
    name: bytes
    parent: bytes
    tokens: bytes


class PrefixSnapshot(NamedTuple):
    """Every cached block as a "stored" event; the first change that it does not have is `next_sequence`."""

    next_sequence: int
    stored: list[PrefixEvent]
