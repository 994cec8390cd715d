from typing import final

from pagepool.memory.allocator import BlockAllocator

__all__ = ["KeptBlocks"]

@final
class KeptBlocks:
    def __new__(cls, allocator: BlockAllocator) -> KeptBlocks: ...
    @property
    def allocator(self) -> BlockAllocator: ...
