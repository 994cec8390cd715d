"""StateCheckpoints: copies of recurrent states at chosen positions, beside the prefix cache of a hybrid model."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from pagepool.arguments import integer
from pagepool.config import StateLayout
from pagepool.errors import InvalidSlot, refuse_copy
from pagepool.memory.ssm_pool import SsmStatePool
from pagepool.memory.state_memory import StateMemory
from pagepool.prefix.checkpoint_index import CheckpointIndex, Stop

__all__ = ["StateCheckpoints"]

MAX_STATES = 2**31 - 1


class StateCheckpoints:
    """Keeps recurrent states where they are worth most, so that a hybrid model can go on from a cached prefix.

    layout        of the states
    pool          the engine's `SsmStatePool.from_layout(layout, ...)`: states are copied out of its slots and into them
    budget_bytes  for the copies and the tokens that find them, up to that of 2**31 - 1 states. Their memory is
                  committed as it is used
    grid, spacing, align    where states may be kept: as `CheckpointIndex` has them

    A state is kept at the end of requests, where prompts part, and on a sparse grid; in what order they go, see
    `pagepool.prefix.checkpoint_value`. The size of a state and that of a KV block have nothing to do with each other.
    A request of a hybrid model takes these steps, one thread at a time; none of the calls keeps the arguments:

        blocks, kv_tokens = cache.match_tokens(tokens)           # keys and values, parts of a block included
        begin = checkpoints.resume(slot, tokens, kv_tokens)      # the state: go on from token `begin`
        for position, reason in checkpoints.stops(tokens, kv_tokens, begin):
            ...                                                  # compute tokens up to `position`
            checkpoints.save(slot, tokens, position, reason)
        ...                                                      # the rest, and the output
        checkpoints.save(slot, all_tokens, len(all_tokens), "end")

    Keys and values of the tokens from `begin` on are cached, but the state must pass over them: a model computes them
    once more, or only its recurrent layers where it can.

    >>> import numpy as np
    >>> from pagepool import SsmStatePool, StateLayout
    >>> layout = StateLayout(layers=[{"ssm": ((4,), "float32")}])
    >>> pool = SsmStatePool.from_layout(layout, 2)
    >>> checkpoints = StateCheckpoints(layout, pool, budget_bytes=10_000)
    >>> first, second = pool.alloc(1), pool.alloc(2)
    >>> pool.view(0, "ssm")[first] = 7
    >>> checkpoints.save(first, range(100), 100, "end")
    True
    >>> checkpoints.resume(second, range(120), kv_tokens=112), pool.view(0, "ssm")[second]
    (100, array([7., 7., 7., 7.], dtype=float32))
    """

    __reduce__ = refuse_copy

    def __init__(
        self,
        layout: StateLayout,
        pool: SsmStatePool,
        budget_bytes: int,
        *,
        grid: int = 16_384,
        spacing: int = 16,
        align: int = 1,
    ) -> None:
        if not isinstance(layout, StateLayout):
            raise TypeError(f"layout must be a StateLayout, not {type(layout).__name__}")
        if not hasattr(pool, "view"):
            raise TypeError(f"pool must be an SsmStatePool made from a layout, not {type(pool).__name__}")
        names = [(layer, name) for layer, states in enumerate(layout.layers) for name in states]
        empty = StateMemory(layout, 0)
        views = [empty.view(layer, name) for layer, name in names]
        self._theirs = [pool.view(layer, name) for layer, name in names]
        for ours, theirs, (layer, name) in zip(views, self._theirs, names, strict=True):
            if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
                raise ValueError(
                    f"state {name!r} of layer {layer} is {ours.dtype}{ours.shape[1:]} in the layout, "
                    f"{theirs.dtype}{theirs.shape[1:]} in the pool"
                )
        self.state_bytes = sum(prod(view.shape[1:]) * view.itemsize for view in views)
        if not self.state_bytes:
            raise ValueError("the layout has no state to keep")
        budget = integer("budget_bytes", budget_bytes, 0)
        most = budget // self.state_bytes
        if most > MAX_STATES:
            raise ValueError(
                f"budget_bytes must be at most {(MAX_STATES + 1) * self.state_bytes - 1}, that of {MAX_STATES} states "
                f"of {self.state_bytes} bytes, not {budget}"
            )
        self.index = CheckpointIndex(self.state_bytes, budget, grid=grid, spacing=spacing, align=align)
        self._pool = pool
        copies = StateMemory(layout, most)
        self._ours = [copies.view(layer, name) for layer, name in names]

    def resume(
        self, slot: int, tokens: Any, kv_tokens: int, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> int:
        """Brings `slot` of the pool to the longest kept prefix of `tokens` within `kv_tokens`; returns its length.

        0 when there is none: then the slot is as it was. The slot's position becomes the length. One token at least is
        left to compute. Raises `InvalidSlot` for a slot that is out of range, or free, `TypeError` for a `kv_tokens`
        that is no integer; then nothing has changed. What comes in the middle of the copy, a `MemoryError` or a signal,
        leaves the slot at its beginning.
        """
        theirs = self._lent(slot)
        found = self.index.find(tokens, integer("kv_tokens", kv_tokens), cache_salt=cache_salt, extra_keys=extra_keys)
        if found is None:
            return 0
        position, kept = found
        try:
            for target, source in zip(self._theirs, self._ours, strict=True):
                target[slot] = source[kept]
        except BaseException:
            theirs.state.reset()
            theirs.position = 0
            raise
        theirs.state.step_position = theirs.position = position
        return position

    def stops(
        self,
        tokens: Any,
        kv_tokens: int,
        begin: int = 0,
        *,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
    ) -> list[Stop]:
        """The positions beyond `begin` at which the state is worth a copy while this prompt is read, in order.

        kv_tokens  leading tokens that the prefix cache had; 0 where there is none
        begin      what `resume` has returned

        Changes nothing. As many as the grid has, and at most two more.
        """
        return self.index.stops(tokens, kv_tokens, begin, cache_salt=cache_salt, extra_keys=extra_keys)

    def save(
        self,
        slot: int,
        tokens: Any,
        position: int,
        reason: str,
        *,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
    ) -> bool:
        """Copies the state in `slot`, which has passed over exactly `tokens[:position]`; False when it is not worth it.

        reason  why: that of the stop, or "end" when the request has ended

        States of less value go when the budget asks for it. Raises `InvalidSlot`, `ValueError` for a position or a
        reason that is none; then nothing has changed. What comes in the middle, a `MemoryError` or a signal, makes it
        forget every state: better none than one that was copied in part.
        """
        self._lent(slot)
        asked = self.index.asked(tokens, position, reason, cache_salt=cache_salt, extra_keys=extra_keys)
        try:
            kept = self.index.place(*asked)
            if kept < 0:
                return False
            for target, source in zip(self._ours, self._theirs, strict=True):
                target[kept] = source[slot]
        except BaseException:
            self.index.reset()
            raise
        return True

    def reset(self) -> None:
        """Forgets every state."""
        self.index.reset()

    def stats(self) -> dict[str, Any]:
        """What is kept and what was done, as a dict."""
        return {"state_bytes": self.state_bytes, **self.index.stats()}

    def check(self) -> None:
        """Raises `PoolError` naming an equation of the index that is broken."""
        self.index.check()

    def _lent(self, slot: int) -> Any:
        found = self._pool.slot(slot)
        if found.request_id == 0:
            raise InvalidSlot(f"slot {slot} is free: {self._pool.used_count} of {self._pool.capacity} slots are used")
        return found
