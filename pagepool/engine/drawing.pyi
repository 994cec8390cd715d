from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw", "largest"]

def draw(
    logits: NDArray[np.float32], most: float, temperature: float, top_p: float, random: Callable[[], float]
) -> int: ...
def largest(rows: NDArray[np.uint16]) -> list[int]: ...
