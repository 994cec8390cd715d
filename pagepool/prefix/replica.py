"""PrefixReplica: what a prefix cache in another process holds, kept up by its events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pagepool.arguments import integer, wrong
from pagepool.config import MAX_BLOCK_SIZE
from pagepool.errors import PoolError
from pagepool.prefix.events import PrefixEvent, PrefixSnapshot, prefix_names
from pagepool.prefix.keys import root_key, root_name
from pagepool.prefix.radix_tree import token_row

__all__ = ["PrefixReplica", "check_snapshot"]


def check_snapshot(snapshot: PrefixSnapshot) -> None:
    """Raises `TypeError` for what is no snapshot, `PoolError` for one that was cut short on its way."""
    if not isinstance(snapshot, PrefixSnapshot):
        raise wrong("snapshot", "a PrefixSnapshot", snapshot)
    if len(snapshot.stored) != snapshot.num_blocks:
        raise PoolError(f"a snapshot of {snapshot.num_blocks} blocks has {len(snapshot.stored)}: it was cut short")


class PrefixReplica:
    """Follows one `PrefixCache` by its events, as a router does that sends prompts to where their beginnings are.

    block_size     tokens per block, from 1 to 1,024, as the cache has it
    next_sequence  the number of the event that comes next

    Raises `ValueError` for another block size, `TypeError` for what is no integer.

    blocks == {name of each cached prefix: (block, parent's name, the block's tokens)}

    >>> from pagepool import BlockAllocator, PrefixCache
    >>> cache, replica = PrefixCache(BlockAllocator(8), block_size=2, max_events=64), PrefixReplica(2)
    >>> cache.touch([1, 2, 3, 4])
    0
    >>> replica.apply(cache.drain_events())
    >>> replica.match_prefix([1, 2, 3, 4, 5]), replica.match_prefix([1, 2], cache_salt="tenant")
    ([0, 1], [])
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
        self.next_sequence = 1
        self.blocks: dict[bytes, tuple[int, bytes, bytes]] = {}

    def apply(self, events: Iterable[PrefixEvent]) -> None:
        """Applies events in order, and skips those that a snapshot already included.

        Raises `PoolError` when one is missing, after applying those before it: `restore` a snapshot then.
        """
        if not isinstance(events, Iterable):
            raise wrong("events", "an iterable of PrefixEvent", events)
        for event in events:
            if event.sequence < self.next_sequence:
                continue
            if event.sequence > self.next_sequence:
                raise PoolError(f"event {self.next_sequence} was lost, here is {event.sequence}: restore a snapshot")
            if event.kind == "stored":
                self.blocks[event.name] = event.block, event.parent, event.tokens
            elif event.kind == "removed":
                del self.blocks[event.name]
            else:
                self.blocks.clear()
            self.next_sequence += 1

    def restore(self, snapshot: PrefixSnapshot) -> None:
        """Replaces everything by the snapshot. Raises `PoolError` for one that was cut short, and changes nothing."""
        check_snapshot(snapshot)
        self.blocks = {event.name: (event.block, event.parent, event.tokens) for event in snapshot.stored}
        self.next_sequence = snapshot.next_sequence

    def match_prefix(self, tokens: Any, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> list[int]:
        """Returns the blocks of the longest cached prefix of `tokens`. Compares every token; takes no references."""
        row, size = np.ascontiguousarray(token_row(tokens)), self.block_size
        parent, found = root_name(root_key(cache_salt, extra_keys)), []
        for index, name in enumerate(prefix_names(row, size, parent)):
            block, its_parent, its_tokens = self.blocks.get(name, (-1, b"", b""))
            if its_parent != parent or its_tokens != row[index * size : (index + 1) * size].tobytes():
                break
            found.append(block)
            parent = name
        return found
