"""The pages and slots of states of a model, and the tables of a batch of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagepool.config import KvLayout, StateLayout
from pagepool.integrations.transformers.layout import ModelLayout
from pagepool.integrations.transformers.step import Tables
from pagepool.memory.block_table import PagedSeqState
from pagepool.memory.block_tables import BlockTables
from pagepool.memory.hybrid import HybridSequence, KvGroup
from pagepool.memory.kv_pool import KvCachePool
from pagepool.memory.ssm_pool import SsmStatePool

__all__ = ["ModelMemory", "kv_layout"]


def kv_layout(layout: ModelLayout, block_size: int, dtype: Any) -> KvLayout | None:
    """What a block holds for a model; None for one without attention. Raises as `KvLayout`."""
    if not layout.attention:
        return None
    first = layout.attention[0]
    return KvLayout(
        layout.group_size,
        first.num_kv_heads,
        first.head_dim,
        block_size,
        dtype,
        v_head_dim=first.v_head_dim,
        v_in_k=first.latent,
    )


class ModelMemory:
    """The memory of one model.

    pool    its `KvCachePool`, which serves all groups, or None
    groups  a `KvGroup` for each set of layers with a block table; None for a single one without a window
    states  its `SsmStatePool`, or None
    """

    def __init__(
        self, layout: ModelLayout, num_blocks: int, dtype: Any, block_size: int = 16, max_sequences: int = 32
    ) -> None:
        kv = kv_layout(layout, block_size, dtype)
        self.pool = None if kv is None else KvCachePool.from_layout(kv, num_blocks)
        self.groups: tuple[KvGroup, ...] | None = None
        if self.pool is not None and layout.windows != [None]:
            self.groups = tuple(KvGroup(self.pool.allocator, block_size, window) for window in layout.windows)
        self.states: SsmStatePool | None = None
        self.views: list[dict[str, torch.Tensor]] = []
        if layout.has_states:
            self.states = SsmStatePool.from_layout(StateLayout(layers=layout.states), max_sequences)
            self.views = [
                {name: torch.from_dlpack(self.states.view(layer, name)) for name in names}
                for layer, names in enumerate(layout.states)
            ]
        self._block_size = block_size
        self._tables = [BlockTables(max_sequences, 64) for _ in layout.windows]

    def sequence(self, label: int | None = None) -> Any:
        """Returns a new sequence: a `PagedSeqState`, or a `HybridSequence` of a model with windows or states.

        Raises PoolExhausted when no slot is free for its state.
        """
        if self.groups is None and self.states is None:
            assert self.pool is not None
            return PagedSeqState(self.pool.allocator, self._block_size, label=label)
        groups = self.groups
        if groups is None:
            groups = () if self.pool is None else (KvGroup(self.pool.allocator, self._block_size),)
        return HybridSequence(groups, self.states, label=label)

    def fill(self, sequences: Sequence[Any], counts: Sequence[int]) -> list[Tables]:
        """The tables of each group, for a forward of the last `counts[i]` tokens of each sequence.

        They are valid until the next call.
        """
        found = []
        for group, tables in enumerate(self._tables):
            rows = [getattr(sequence, "kv", [sequence])[group] for sequence in sequences]
            width = max((-(-row.len // self._block_size) for row in rows), default=0)
            if len(rows) > tables.max_seqs or width > tables.max_blocks_per_seq:
                height = max(len(rows), tables.max_seqs)
                self._tables[group] = tables = BlockTables(height, max(2 * width, tables.max_blocks_per_seq))
            tables.fill(rows, counts)
            found.append(Tables(tables.block_tables, tables.seq_lens, tables.slot_mapping, tables.query_start_loc))
        return found

    def close(self) -> None:
        """Frees the pages. Raises BufferError while views of them are held."""
        self.views = []
        self.states = None
        if self.pool is not None:
            self.pool.close()
