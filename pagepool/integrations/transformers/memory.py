"""ModelMemory: the pages and state slots of a model, and the block tables for a batch of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagepool.config import KvLayout, StateLayout
from pagepool.integrations.transformers.layout import ModelLayout
from pagepool.integrations.transformers.step import Tables
from pagepool.memory.block_table import PagedSeqState
from pagepool.memory.block_tables import BlockTables
from pagepool.memory.budget import MemoryBudget
from pagepool.memory.hybrid import HybridSequence, KvGroup
from pagepool.memory.kv_pool import KvCachePool
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.prefix.checkpoints import TOKEN_BYTES, StateCheckpoints

__all__ = ["ModelMemory", "kv_layouts"]

GRID = 256  # distance in tokens between state checkpoints of a long prompt
LEAST_CHECKPOINTS = 8


def kv_layouts(layout: ModelLayout, block_size: int, dtype: Any) -> list[KvLayout]:
    """Return the `KvLayout` of each pool. Raises as `KvLayout`."""
    return [
        KvLayout(
            num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            block_size,
            dtype,
            v_head_dim=shape.v_head_dim,
            v_in_k=shape.latent,
        )
        for shape, num_layers in layout.shapes
    ]


class ModelMemory:
    """The memory of one model.

    Attributes
    ----------
    pools : tuple of KvCachePool
        The pool of each group. Groups with the same shape share a pool, and all pools share one allocator.
    groups : tuple of KvGroup or None
        The groups of layers. Each has a block table. None if the model has at most one group, without a window.
    states : SsmStatePool or None
        The recurrent states.
    state_layout : StateLayout or None
        The layout of the recurrent states of a sequence.
    arithmetic : str
        The arithmetic of attention over these pages, as in `decode`.
    """

    def __init__(
        self,
        layout: ModelLayout,
        num_blocks: int,
        dtype: Any,
        block_size: int = 16,
        max_sequences: int = 32,
        arithmetic: str = "exact",
        shared: str | int | None = None,
        fingerprint: str = "",
        budget: MemoryBudget | None = None,
    ) -> None:
        self.arithmetic = arithmetic
        self._pools: list[KvCachePool] = []
        shapes = kv_layouts(layout, block_size, dtype)
        if shared is not None and len(shapes) != 1:
            raise ValueError(f"a shared pool needs one shape of keys and values; the model has {len(shapes)}")
        for kv in shapes:
            allocator = self._pools[0].allocator if self._pools else None
            if budget is None:
                pool = KvCachePool.from_layout(kv, num_blocks, allocator, shared=shared, fingerprint=fingerprint)
            else:  # the scheduler raises the number of blocks
                options: dict[str, Any] = {"shared": shared, "fingerprint": fingerprint, "budget": budget}
                pool = KvCachePool.from_layout(kv, 0, allocator, num_blocks, **options)
            self._pools.append(pool)
        self.pools = tuple(self._pools[group.pool] for group in layout.groups)
        groups = tuple(KvGroup(self.pools[0].allocator, block_size, group.window) for group in layout.groups)
        self.groups = None if [group.window for group in groups] in ([], [None]) else groups
        self.states: SsmStatePool | None = None
        self.views: list[dict[str, torch.Tensor]] = []
        self.state_layout = StateLayout(layers=layout.states) if layout.has_states else None
        if self.state_layout is not None:
            self.states = SsmStatePool.from_layout(self.state_layout, max_sequences)
            self.views = [
                {name: torch.from_dlpack(self.states.view(layer, name)) for name in names}
                for layer, names in enumerate(layout.states)
            ]
        self._block_size = block_size
        self._tables = [BlockTables(max_sequences, 64) for _ in layout.groups]

    def sequence(self, label: int | None = None) -> Any:
        """Return a new sequence: a `PagedSeqState`, or a `HybridSequence` for a model with windows or states.

        Raises PoolExhausted if no state slot is free.
        """
        if self.groups is None and self.states is None:
            return PagedSeqState(self.pools[0].allocator, self._block_size, label=label)
        groups = self.groups or tuple(KvGroup(pool.allocator, self._block_size) for pool in self.pools)
        return HybridSequence(groups, self.states, label=label)

    @property
    def all_pools(self) -> list[KvCachePool]:
        """Every pool once, in the order of creation."""
        return list(self._pools)

    def new_checkpoints(self) -> StateCheckpoints | None:
        """Return state checkpoints for a prefix cache: as many as slots, but at least 8. None without states."""
        if self.states is None or self.state_layout is None:
            return None
        size = self._block_size
        state_bytes = StateCheckpoints(self.state_layout, self.states, 0).state_bytes
        budget = max(self.states.capacity, LEAST_CHECKPOINTS) * (state_bytes + TOKEN_BYTES * GRID)
        return StateCheckpoints(
            self.state_layout, self.states, budget, grid=GRID, spacing=size, align=size, prompt_ends=True
        )

    def fill(self, sequences: Sequence[Any], counts: Sequence[int]) -> list[Tables]:
        """Return the tables of each group for a forward over the last `counts[i]` tokens of each sequence.

        The tables are valid until the next call.
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
        """Free the pages. Raises BufferError while views of them exist."""
        self.views = []
        self.states = None
        self.pools = ()
        while self._pools:
            self._pools.pop().close()
