from typing_extensions import disjoint_base, final

from pagepool.memory.allocator import BlockAllocator

__all__ = ["KeptBlocks"]

@final
@disjoint_base
class KeptBlocks:
    def __new__(cls, allocator: BlockAllocator) -> KeptBlocks: ...
    @property
    def allocator(self) -> BlockAllocator: ...
