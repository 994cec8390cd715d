import numpy as np
from numpy.typing import NDArray

__all__ = ["belady_pass"]

def belady_pass(ids: NDArray[np.int32], ends: NDArray[np.int64], capacity: int) -> tuple[int, int]: ...
