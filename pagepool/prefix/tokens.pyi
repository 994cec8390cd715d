from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["token_row"]

def token_row(tokens: Any) -> NDArray[np.int32]: ...
