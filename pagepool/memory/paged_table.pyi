from typing_extensions import disjoint_base

from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.holders import Holder

__all__ = ["PagedTable"]

@disjoint_base
class PagedTable(Holder):
    @property
    def allocator(self) -> BlockAllocator: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_blocks_per_seq(self) -> int: ...
    @property
    def first_block(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def open_transactions(self) -> int: ...
