from typing import SupportsIndex, final

from pagepool.memory.allocator import BlockAllocator
from pagepool.prefix.evictable_blocks import EvictableBlocks

__all__ = ["CachedBlocks"]

@final
class CachedBlocks(EvictableBlocks):
    def __new__(
        cls, allocator: BlockAllocator, block_size: SupportsIndex, policy: str, hash_bits: SupportsIndex
    ) -> CachedBlocks: ...
