"""`--reference`: the block manager of the scheduler over the allocator and sequences of `pagepool.reference`."""

from __future__ import annotations

from typing import Any

from pagepool.reference import PagedSeqState, append_batch, release_batch
from pagepool.replay.driver import MeteredBlockManager
from pagepool.scheduling.block_manager import BlockManager

__all__ = ["PlainBlockManager"]


class PlainBlocks(BlockManager):
    """A block manager whose allocator, sequences and references are plain Python."""

    def __init__(self, allocator: Any, block_size: int) -> None:
        self._set_up(allocator, block_size, [block_size])
        self.has_states = True

    def _extend(self, missing: int, takes: bool) -> bool:
        return False

    def _open_state(self, max_blocks: int) -> PagedSeqState:
        return PagedSeqState(self.allocator, self.block_size, max_blocks)

    def _open_refs(self) -> PlainRefs:
        return PlainRefs(self.allocator)

    def _append_batch(self, states: list[PagedSeqState], counts: list[int]) -> None:
        append_batch(states, counts)

    def _release_batch(self, states: list[PagedSeqState], close: bool) -> None:
        release_batch(states, close)


class PlainBlockManager(MeteredBlockManager, PlainBlocks):
    """A `MeteredBlockManager` over `PlainBlocks`."""


class PlainRefs(list[int]):
    """References that are taken and dropped within one call, as `BlockRefs`."""

    def __init__(self, allocator: Any) -> None:
        super().__init__()
        self._allocator = allocator

    def match_prefix(self, cache: Any, tokens: Any, **keys: Any) -> Any:
        """Return the cached blocks of the longest prefix; hold one more reference to each."""
        return cache.match_held(self, tokens, **keys)

    def give_back(self) -> None:
        """Drop all references."""
        if self:
            self._allocator.free(self)
            self.clear()
