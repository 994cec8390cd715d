from collections.abc import Sequence
from typing import SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from pagepool.memory.allocator import BlockAllocator

__all__ = ["BlockGenerations"]

@final
class BlockGenerations:
    def __new__(cls, allocator: BlockAllocator) -> BlockGenerations: ...
    @property
    def allocator(self) -> BlockAllocator: ...
    @property
    def words(self) -> memoryview: ...
    def of(self, blocks: SupportsIndex | Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint32]: ...
