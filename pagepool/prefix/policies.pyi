import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

from pagepool.prefix.radix_tree import NodeTable

__all__ = ["LruPolicy", "belady_pass"]

@disjoint_base
class LruPolicy:
    def __new__(cls, table: NodeTable, capacity: int) -> LruPolicy: ...

def belady_pass(ids: NDArray[np.int32], ends: NDArray[np.int64], capacity: int) -> tuple[int, int]: ...
