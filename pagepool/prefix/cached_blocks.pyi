from typing import SupportsIndex, final

from pagepool.memory.allocator import BlockAllocator

__all__ = ["CachedBlocks"]

@final
class CachedBlocks:
    def __new__(
        cls, allocator: BlockAllocator, block_size: SupportsIndex, policy: str, hash_bits: SupportsIndex
    ) -> CachedBlocks: ...
