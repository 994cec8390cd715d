import numpy as np
from numpy.typing import NDArray

from pagepool.memory.block_table import PagedSeqState

__all__ = ["append_batch", "group_append", "release_batch"]

def append_batch(states: list[PagedSeqState], counts: list[int]) -> None: ...
def release_batch(states: list[PagedSeqState], close: bool = False) -> None: ...
def group_append(states: list[PagedSeqState], n: int, positions: list[int]) -> list[NDArray[np.int64]]: ...
