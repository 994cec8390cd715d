"""The shapes of some models: what `--attend` stores and reads."""

from __future__ import annotations

from dataclasses import dataclass

from pagepool.config import KvLayout

__all__ = ["GEOMETRIES", "Geometry"]


@dataclass(frozen=True)
class Geometry:
    """Layers, query heads, key/value heads, and elements per head of a model."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int

    def layout(self, block_size: int, dtype: str) -> KvLayout:
        """The pages that hold this model's keys and values."""
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)


GEOMETRIES = {
    "qwen2.5-0.5b": Geometry(24, 14, 2, 64),
    "llama-3.2-1b": Geometry(16, 32, 8, 64),
    "llama-3.1-8b": Geometry(32, 32, 8, 128),
}
