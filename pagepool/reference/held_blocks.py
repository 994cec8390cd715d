"""References to blocks, taken at once and given back at once, in plain Python: what a `Transaction` holds.

references held == one to each block        blocks are given back in the opposite order
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["HeldBlocks"]


class HeldBlocks:
    """Of one allocator; a call that raises has taken nothing.

    >>> from pagepool.reference import BlockAllocator
    >>> held = BlockAllocator(4).hold()
    >>> held.allocate_n(3).tolist(), len(held)
    ([0, 1, 2], 3)
    """

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self._blocks: list[int] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def allocate_n(self, n: int) -> np.ndarray:
        """Takes n blocks."""
        blocks: np.ndarray = self.allocator.allocate_n(n)
        self._blocks = blocks.tolist()
        return blocks

    def share(self, blocks: Any) -> None:
        """Takes one reference more to each block."""
        self.allocator.share(blocks)
        self._blocks = np.asarray(blocks).reshape(-1).tolist()

    def match_prefix(self, cache: Any, tokens: Any, **keys: Any) -> np.ndarray:
        """Takes the cached blocks of a prompt."""
        blocks: np.ndarray = cache.match_prefix(tokens, **keys)
        self._blocks = blocks.tolist()
        return blocks

    def give_back(self) -> None:
        """Drops the references, the last one first."""
        self.allocator.free(self._blocks[::-1])
        self._blocks = []
