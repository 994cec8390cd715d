"""`--attend`: every step stores the K/V of its tokens in real pages and decodes over them."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from pagepool.config import KV_DTYPES, KvLayout
from pagepool.scheduling import ScheduledBatch

__all__ = ["GEOMETRIES", "Attention", "Geometry"]

SEED = 20231116


@dataclass(frozen=True)
class Geometry:
    """The shapes of a model's attention: layers, query heads, KV heads, and dims per head."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int

    def layout(self, block_size: int) -> KvLayout:
        """Return the page layout for this model's keys and values."""
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size)


GEOMETRIES = {
    "qwen2.5-0.5b": Geometry(24, 14, 2, 64),
    "llama-3.2-1b": Geometry(16, 32, 8, 64),
    "llama-3.1-8b": Geometry(32, 32, 8, 128),
}


class Attention:
    """Stores K and V of all tokens in every layer, and runs `decode` in every layer for all decoding sequences.

    It does not run prefill attention. The values are pseudo-random and made once: every step stores the first rows of
    the same arrays.

    Parameters
    ----------
    memory : module
        `pagepool` or `pagepool.reference`.
    pool : KvCachePool
        A pool of this module with the layout of the geometry.
    geometry : Geometry
        Shapes of the model.
    max_sequences, max_tokens : int
        Maximum number of sequences and tokens per step.
    max_blocks_per_seq : int
        Maximum number of blocks of a sequence.
    """

    def __init__(
        self,
        memory: Any,
        pool: Any,
        geometry: Geometry,
        max_sequences: int,
        max_tokens: int,
        max_blocks_per_seq: int,
    ) -> None:
        rng = np.random.default_rng(SEED)
        self._pool = pool
        self._layers = range(geometry.num_layers)
        self._decode = memory.decode
        self._tables = memory.BlockTables(max_sequences, max_blocks_per_seq)
        new = (max_tokens, geometry.num_kv_heads, geometry.head_dim)
        self._k = rng.standard_normal(new, dtype=np.float32)
        self._v = rng.standard_normal(new, dtype=np.float32)
        self._q = rng.standard_normal((max_sequences, geometry.num_qo_heads, geometry.head_dim), dtype=np.float32)
        self._out = np.empty_like(self._q)
        # Bytes of K and V of one token in one layer.
        self._token_bytes = 2 * geometry.num_kv_heads * geometry.head_dim * KV_DTYPES[pool.layout.dtype]
        self.calls = 0
        self.kv_bytes = 0
        self.seconds = 0.0
        self.append_seconds = 0.0
        self.table_seconds = 0.0  # included in append_seconds

    def run(self, batch: ScheduledBatch) -> None:
        """Store the tokens of `batch` and attend for its decodes."""
        start = perf_counter()
        tables = self._tables.fill(batch)
        self.table_seconds += perf_counter() - start
        slots, size = tables.slot_mapping, batch.total_tokens
        k, v = self._k[:size], self._v[:size]
        for layer in self._layers:
            self._pool.append(layer, slots, k, v)
        appended = perf_counter()
        self.append_seconds += appended - start
        decodes = batch.num_decodes
        if not decodes:
            return
        rows, lengths = tables.block_tables[:decodes], tables.seq_lens[:decodes]
        q, out = self._q[:decodes], self._out[:decodes]
        for layer in self._layers:
            self._decode(q, self._pool, layer, rows, lengths, out=out)
        self.seconds += perf_counter() - appended
        self.calls += len(self._layers)
        self.kv_bytes += int(np.asarray(lengths).sum()) * self._token_bytes * len(self._layers)
