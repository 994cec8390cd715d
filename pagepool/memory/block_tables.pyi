from collections.abc import Sequence
from typing import Protocol, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from pagepool.memory.allocator import BlockAllocator
from pagepool.memory.batch import append_batch, release_batch
from pagepool.memory.block_table import PagedSeqState

__all__ = ["BlockTables", "append_batch", "release_batch"]

class _Batch(Protocol):
    @property
    def states(self) -> list[PagedSeqState]: ...
    @property
    def num_tokens(self) -> list[int]: ...

@final
class BlockTables:
    def __new__(cls, max_seqs: SupportsIndex, max_blocks_per_seq: SupportsIndex) -> BlockTables: ...
    @property
    def max_seqs(self) -> int: ...
    @property
    def max_blocks_per_seq(self) -> int: ...
    @property
    def allocator(self) -> BlockAllocator | None: ...
    def fill(
        self, states: Sequence[PagedSeqState] | _Batch, num_tokens: Sequence[int] | NDArray[np.integer] | None = None
    ) -> BlockTables: ...
    @property
    def block_tables(self) -> NDArray[np.int32]: ...
    @property
    def seq_lens(self) -> NDArray[np.int32]: ...
    @property
    def slot_mapping(self) -> NDArray[np.int64]: ...
    @property
    def query_start_loc(self) -> NDArray[np.int32]: ...
