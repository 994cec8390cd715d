from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["NodeTable", "token_row"]

@final
class NodeTable:
    def __new__(cls, block_size: int) -> NodeTable: ...
    @property
    def block_size(self) -> int: ...

def token_row(tokens: Any) -> NDArray[np.int32]: ...
