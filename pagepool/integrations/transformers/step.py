"""One forward of a model over pages: what its cache layers and its attention function share while it runs."""

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
    """Where the keys and values of one layer of a model lie, and which of them a query sees.

    cache_layer   its number in transformers' cache
    group         the number of its `KvGroup`
    pool_layer    its layer in the blocks of that group
    window        how many tokens to its left a query sees, as `window_left` of `decode`; None: all
    latent        whether it stores latents, as multi-head latent attention does, and not keys and values
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
        """What it stores of a token; layers of one shape may share a pool."""
        return Shape(self.num_kv_heads, self.head_dim, self.v_head_dim, self.latent)


class Shape(NamedTuple):
    """What a layer stores of a token."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: bool


class Tables(NamedTuple):
    """The block tables of a forward in one group, as `BlockTables` has them."""

    block_tables: Any
    seq_lens: Any
    slot_mapping: Any
    query_start_loc: Any


class Step:
    """The memory of one forward: tables of each group, and the layer that has stored and not attended yet.

    pools     the pool of each group
    tables    the `Tables` of each group
    seen      the most tokens that a sequence of this forward had before
    borrowed  modules that attend to keys and values of another layer, with that layer
    slots     of each sequence the slot of its recurrent states, if it has any
    """

    __slots__ = ("borrowed", "pending", "pools", "seen", "slots", "tables", "threads")

    def __init__(
        self,
        pools: Sequence[KvCachePool],
        tables: Sequence[Tables],
        seen: int,
        borrowed: Mapping[Any, AttentionLayer],
        slots: Sequence[int] = (),
    ) -> None:
        self.pools = pools
        self.tables = tables
        self.seen = seen
        self.borrowed = borrowed
        self.slots = slots
        self.pending: AttentionLayer | None = None
        self.threads = torch.get_num_threads()

    def append(self, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values, (batch, heads, tokens, dims) each, of this forward's tokens."""
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
        """Attends with queries (batch, heads, tokens, dims); returns (batch, tokens, heads, dims of values)."""
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
            num_threads=self.threads,
        )
        if layer.latent:
            out = expanded(module, out)
        return out.view(batch, count, heads, out.shape[-1])


def stored_as(pool: KvCachePool, rows: torch.Tensor) -> torch.Tensor:
    """Rows as pages of this dtype take them: as they are, or in float32."""
    if rows.stride(-1) != 1:  # as `append` wants it
        rows = rows.contiguous()
    return rows if str(rows.dtype) == f"torch.{pool.dtype}" else rows.float()


def by_token(rows: torch.Tensor) -> torch.Tensor:
    """(batch, heads, tokens, dims) as (batch * tokens, heads, dims); a view for a batch of one."""
    batch, heads, count, dims = rows.shape
    if batch == 1:
        return rows[0].transpose(0, 1)
    return rows.transpose(1, 2).reshape(batch * count, heads, dims)


def absorbed(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries of multi-head latent attention, with the projection of keys taken in: they meet the latents as stored."""
    nope = module.qk_nope_head_dim
    return torch.cat((torch.matmul(query[..., :nope], projection(module)[:, :nope]), query[..., nope:]), -1)


def expanded(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Results over latents, (tokens, heads, rank), as results over values, (tokens, heads, dims)."""
    values = projection(module)[:, module.qk_nope_head_dim :]
    return torch.matmul(latents.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).contiguous()


def projection(module: Any) -> torch.Tensor:
    """The weights that make keys and values of latents, (heads, dims of a key and a value, rank)."""
    weight: torch.Tensor = module.kv_b_proj.weight
    return weight.view(module.num_heads, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)


_running = threading.local()


def current_step() -> Step:
    """The step of the forward that this thread runs. Raises RuntimeError when it runs none over pages."""
    step: Step | None = getattr(_running, "step", None)
    if step is None:
        raise RuntimeError("another thread runs this model over pages: one forward of a model at a time")
    return step


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Within, `current_step` of this thread is `step`."""
    outer = getattr(_running, "step", None)
    _running.step = step
    try:
        yield
    finally:
        _running.step = outer
