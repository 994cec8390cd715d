"""Step: the state that the cache layers and the attention function of a model share during one forward over pages."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pagepool.attention.decode import decode
from pagepool.memory.kv_pool import KvCachePool

__all__ = ["AttentionLayer", "Shape", "Step", "Tables", "current_step", "running"]


@dataclass(frozen=True)
class AttentionLayer:
    """The location of one attention layer's keys and values in the pools, and its window.

    Attributes
    ----------
    cache_layer : int
        Index of the layer in transformers' cache.
    num_kv_heads : int
        Number of heads of keys and values.
    head_dim : int
        Elements per head of a key.
    v_head_dim : int
        Elements per head of a value.
    window : int or None
        Number of tokens to the left that a query sees, as `window_left` of `decode`. None: all tokens.
    latent : bool
        Whether the layer stores latents of multi-head latent attention (MLA) instead of keys and values.
    group : int
        Index of the layer's `KvGroup`.
    pool_layer : int
        Index of the layer within a block of the group.
    """

    cache_layer: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None
    latent: bool
    group: int = 0
    pool_layer: int = 0

    @property
    def shape(self) -> Shape:
        """Shape of the stored data per token. Layers with equal shapes can share a pool."""
        return Shape(self.num_kv_heads, self.head_dim, self.v_head_dim, self.latent)


class Shape(NamedTuple):
    """Shape of the data that a layer stores per token."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: bool


class Tables(NamedTuple):
    """The block tables of one group for a forward, in the format of `BlockTables`."""

    block_tables: Any
    seq_lens: Any
    slot_mapping: Any
    query_start_loc: Any


class Step:
    """The memory of one forward: pools, tables and slots, and the layer that has stored but not attended yet.

    Parameters
    ----------
    pools : sequence of KvCachePool
        The pool of each group.
    tables : sequence of Tables
        The block tables of each group.
    seen : int
        Largest number of earlier tokens of any sequence in this forward.
    borrowed : mapping
        Modules that attend to the keys and values of another layer -> this layer.
    slots : sequence of int
        State slot of each row: of its sequence, or of a draft. Empty for a model without recurrent states.
    drafts : sequence of sequence of int
        The rows of the first drafts of all sequences, then the rows of the second drafts, and so on. The recurrent
        states of a row of drafts follow those of the row before it.
    arithmetic : str
        The arithmetic of attention, as in `decode`.
    """

    __slots__ = ("arithmetic", "borrowed", "drafts", "pending", "pools", "seen", "slots", "tables", "threads")

    def __init__(
        self,
        pools: Sequence[KvCachePool],
        tables: Sequence[Tables],
        seen: int,
        borrowed: Mapping[Any, AttentionLayer],
        slots: Sequence[int] = (),
        arithmetic: Any = "exact",
        drafts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.pools = pools
        self.tables = tables
        self.seen = seen
        self.borrowed = borrowed
        self.slots = slots
        self.drafts = drafts
        self.arithmetic = arithmetic
        self.pending: AttentionLayer | None = None
        self.threads = torch.get_num_threads()

    def append(self, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values of this forward's tokens, each (batch, heads, tokens, dims)."""
        pool, slots = self.pools[layer.group], self.tables[layer.group].slot_mapping
        if layer.latent:
            pool.append(layer.pool_layer, slots, stored_as(pool, by_token(torch.cat((keys, values), -1))))
        else:
            pool.append(layer.pool_layer, slots, stored_as(pool, by_token(keys)), stored_as(pool, by_token(values)))
        self.pending = layer

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        scaling: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with queries (batch, heads, tokens, dims). Return (batch, tokens, heads, dims of values)."""
        layer, self.pending = self.pending or self.borrowed[module], None
        pool, tables = self.pools[layer.group], self.tables[layer.group]
        batch, heads, count, _ = query.shape
        q = absorbed(module, query) if layer.latent else query
        q = by_token(q)
        out = torch.empty((batch * count, heads, pool.v_head_dim), dtype=query.dtype)
        decode(
            q,
            pool,
            layer.pool_layer,
            tables.block_tables,
            tables.seq_lens,
            query_start_loc=tables.query_start_loc,
            sm_scale=module.scaling if scaling is None else scaling,
            window_left=layer.window,
            logits_soft_cap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            out=out,
            arithmetic=self.arithmetic,
            num_threads=self.threads,
        )
        if layer.latent:
            out = expanded(module, out)
        return out.view(batch, count, heads, out.shape[-1])


def stored_as(pool: KvCachePool, rows: torch.Tensor) -> torch.Tensor:
    """Return rows in the dtype of the pool, or else in float32, from which `append` converts."""
    if rows.stride(-1) != 1:  # `append` needs contiguous elements
        rows = rows.contiguous()
    return rows if str(rows.dtype) == f"torch.{pool.dtype}" else rows.float()


def by_token(rows: torch.Tensor) -> torch.Tensor:
    """Reshape (batch, heads, tokens, dims) to (batch * tokens, heads, dims). Returns a view if batch is 1."""
    batch, heads, count, dims = rows.shape
    if batch == 1:
        return rows[0].transpose(0, 1)
    return rows.transpose(1, 2).reshape(batch * count, heads, dims)


def absorbed(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Multiply queries by the key projection (weight absorption of MLA), so that they attend to stored latents."""
    nope = module.qk_nope_head_dim
    return torch.cat((torch.matmul(query[..., :nope], projection(module)[:, :nope]), query[..., nope:]), -1)


def expanded(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Project results over latents (tokens, heads, rank) to results over values (tokens, heads, dims)."""
    values = projection(module)[:, module.qk_nope_head_dim :]
    return torch.matmul(latents.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).contiguous()


def projection(module: Any) -> torch.Tensor:
    """Return the weights that project latents to keys and values, (heads, dims of key + dims of value, rank)."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(module.num_heads, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)


_running = threading.local()


def current_step() -> Step:
    """Return the step of this thread's running forward. Raises RuntimeError without a running forward over pages."""
    step: Step | None = getattr(_running, "step", None)
    if step is None:
        raise RuntimeError("another thread runs this model over pages: one forward of a model at a time")
    return step


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Context manager in which `current_step` of this thread returns `step`."""
    outer = getattr(_running, "step", None)
    _running.step = step
    try:
        yield
    finally:
        _running.step = outer
