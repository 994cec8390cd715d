"""Errors about blocks and slots. Each names the number that was asked for and the number that exists."""

from __future__ import annotations

from collections import Counter

import numpy as np

from pagepool.errors import InvalidBlock, InvalidSlot, PoolExhausted, StaleHandle

__all__ = ["closed", "exhausted", "invalid_blocks", "invalid_slot", "unwritable_slot"]


def closed(what: str, label: int | str | None) -> StaleHandle:
    """Return the error of a closed sequence. The message calls it `what` if it has no label.

    >>> closed("sequence 3", None), closed("the sequence", "a")
    (StaleHandle('sequence 3 was closed: its blocks may have another owner by now'),
     StaleHandle("the sequence 'a' was closed: its blocks may have another owner by now"))
    """
    who = what if label is None else f"{what} {label!r}"
    return StaleHandle(f"{who} was closed: its blocks may have another owner by now")


def exhausted(asked: int, free_count: int, capacity: int) -> PoolExhausted:
    """The error of an allocator that has fewer free blocks than were asked for.

    >>> exhausted(2, 1, 4)
    PoolExhausted('asked for 2 blocks, 1 of 4 is free')
    """
    noun = "block" if asked == 1 else "blocks"
    verb = "is" if free_count == 1 else "are"
    return PoolExhausted(f"asked for {asked} {noun}, {free_count} of {capacity} {verb} free")


def invalid_blocks(blocks: list[int], counts: list[int], capacity: int, verb: str) -> InvalidBlock:
    """The error of blocks that could not all lose ("drop") or gain ("add") a reference.

    `counts` are the blocks' reference counts, -1 for an id out of range.

    >>> invalid_blocks([0, 1, 1], [1, 1, 1], capacity=4, verb="drop")
    InvalidBlock('cannot drop 2 references of block 1: it has 1')
    """
    times = Counter(blocks)
    for block, count in zip(blocks, counts, strict=True):
        if count < 0:
            return InvalidBlock(f"block {block} is out of range: there are {capacity} blocks")
        if count == 0:
            preposition = "of" if verb == "drop" else "to"
            return InvalidBlock(f"cannot {verb} 1 reference {preposition} block {block}: it is free and has 0")
        if verb == "drop" and times[block] > count:
            return InvalidBlock(f"cannot drop {times[block]} references of block {block}: it has {count}")
    return InvalidBlock(f"one of {len(blocks)} blocks was freed or taken by another thread meanwhile")


def invalid_slot(slots: np.ndarray, num_slots: int) -> InvalidSlot:
    """The error of the first slot that is neither -1 nor in the pool.

    >>> invalid_slot(np.array([3, -1, 64]), 64)
    InvalidSlot('slot 64 of token 2 is out of range: the pool has 64 slots')
    """
    bad = np.flatnonzero((slots < -1) | (slots >= num_slots))[0]
    return InvalidSlot(f"slot {slots[bad]} of token {bad} is out of range: the pool has {num_slots} slots")


def unwritable_slot(slot: int, token: int, block: int, count: int) -> InvalidSlot:
    """The error of a slot in a block that is free or shared. `count` is the block's reference count.

    >>> unwritable_slot(20, 0, 1, 2)
    InvalidSlot('slot 20 of token 0 is in block 1, which has 2 references and must have 1')
    """
    found = f"has {count} references and must have 1" if count > 0 else "is free"
    return InvalidSlot(f"slot {slot} of token {token} is in block {block}, which {found}")
