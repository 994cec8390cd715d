from typing import SupportsIndex

from typing_extensions import disjoint_base

from pagepool.memory.allocator import BlockAllocator

__all__ = ["EvictableBlocks"]

@disjoint_base
class EvictableBlocks:
    def __new__(
        cls, allocator: BlockAllocator, block_size: SupportsIndex, policy: str, hash_bits: SupportsIndex
    ) -> EvictableBlocks: ...
