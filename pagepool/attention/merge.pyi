from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["merge_state", "merge_states"]

def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
def merge_states(v: Any, s: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
