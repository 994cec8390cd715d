from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw"]

def draw(
    logits: NDArray[np.float32], most: float, temperature: float, top_p: float, random: Callable[[], float]
) -> int: ...
