import numpy as np
from numpy.typing import NDArray

from pagepool.memory.block_table import PagedSeqState

__all__ = ["append_each"]

def append_each(states: list[PagedSeqState], n: int, positions: list[int]) -> list[NDArray[np.int64]]: ...
