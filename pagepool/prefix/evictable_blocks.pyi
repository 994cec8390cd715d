from typing import SupportsIndex

from pagepool.memory.allocator import BlockAllocator

__all__ = ["EvictableBlocks"]

class EvictableBlocks:
    def __new__(
        cls, allocator: BlockAllocator, block_size: SupportsIndex, policy: str, hash_bits: SupportsIndex
    ) -> EvictableBlocks: ...
