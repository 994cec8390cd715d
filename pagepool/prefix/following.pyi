from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagepool.prefix.cache import PrefixCache

__all__ = ["following"]

def following(
    cache: PrefixCache,
    tokens: Any,
    most: int,
    *,
    cache_salt: str | bytes | int | None = None,
    extra_keys: Iterable[str | bytes | int | None] = (),
) -> NDArray[np.int32]: ...
