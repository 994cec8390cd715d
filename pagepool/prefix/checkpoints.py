"""Checkpoints: the choice of recurrent states that are kept for later prompts.

A cached prefix has keys and values for each of its tokens. It has a recurrent state only at positions where the state
was copied, and a state is as large for ten tokens as for a million. A hybrid model can continue only from a position
that has a state. States are kept at three kinds of positions:

    branch  where a prompt differs from earlier prompts: found by the second such prompt, used from the third on
    end     where a request ended, for the next turn of a conversation. With `prompt_ends` also where its prompt ended,
            for the same prompt and longer ones
    grid    every `grid` tokens of a prompt: bounds what the second prompt must compute again

`CheckpointIndex` decides which states are kept when there is no room for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any

from pagepool._arguments import integer
from pagepool.config import StateLayout
from pagepool.errors import InvalidSlot, refuse_copy
from pagepool.memory.ssm_pool import SsmStatePool, StateMemory
from pagepool.prefix.checkpoint_index import REASONS, TOKEN_BYTES, CheckpointIndex, Kept, Stop
from pagepool.prefix.keys import root_key
from pagepool.prefix.radix_tree import token_row
from pagepool.prefix.stored_states import StoredStates, packed, unpack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["REASONS", "TOKEN_BYTES", "CheckpointIndex", "StateCheckpoints", "Stop"]

MAX_STATES = 2**31 - 1


class StateCheckpoints:
    """Keep recurrent states where they save most, so that a hybrid model can continue from a cached prefix.

    States are kept at the end of requests, where prompts differ, and on a sparse grid. When the budget is full, the
    states that save the fewest tokens per byte are dropped first. States that were used often or recently are dropped
    later. The size of a state does not depend on the size of a KV block. Not thread-safe.

    If the prefix cache of the last `follow` has a store whose fingerprint has these states, a state is also written to
    the store: when it is used, when it is dropped, and by `PrefixCache.flush`, from any thread. `resume` reads states
    from the store.

    Parameters
    ----------
    layout : StateLayout
        The states of one sequence.
    pool : SsmStatePool
        The pool of the engine, made by `from_layout(layout, ...)`. States are copied from and to its slots.
    budget_bytes : int
        Bytes for the copies and for the tokens by which they are found, enough for at most 2**31 - 1 states. Memory is
        committed when it is first used.
    grid : int
        Tokens from one grid position to the next. 0: no grid.
    spacing : int
        The minimum number of tokens between two states of one prompt, at least 1.
    align : int
        States are kept only at multiples of this many tokens: the block size of the prefix cache, or a multiple of it
        where the kernels stop less often.
    prompt_ends : bool
        Whether the state is also kept where each prompt ends, so that the second request with a prompt computes little
        of it. Costs a copy, and one more step for the tokens behind the last multiple of `align`.

    Raises
    ------
    ValueError
        The layout has no state, the pool has another layout, or a number is out of range.
    TypeError
        An argument has another type.
    MemoryError
        Not enough memory for the copies.

    Notes
    -----
    A request of a hybrid model takes these steps. None of the calls keeps its arguments::

        blocks = cache.match_prefix(tokens)                      # keys and values
        n = len(blocks) * cache.block_size
        begin = checkpoints.resume(slot, tokens, n)              # the state: continue from token `begin`
        for position, reason in checkpoints.stops(tokens, n, begin):
            ...                                                  # compute tokens up to `position`
            checkpoints.save(slot, tokens, position, reason)
        ...                                                      # compute the rest and the output up to `position`,
        checkpoints.save(slot, all_tokens, position, "end")      # the last multiple of `align`

    Keys and values of the tokens from `begin` to `n` are cached, but the state must pass over these tokens: a model
    computes them again, or only its recurrent layers where it can.

    Examples
    --------
    >>> import numpy as np
    >>> from pagepool import SsmStatePool, StateLayout
    >>> layout = StateLayout(layers=[{"ssm": ((4,), "float32")}])
    >>> pool = SsmStatePool.from_layout(layout, 2)
    >>> checkpoints = StateCheckpoints(layout, pool, budget_bytes=10_000)
    >>> first, second = pool.alloc(1), pool.alloc(2)
    >>> pool.view(0, "ssm")[first] = 7
    >>> checkpoints.save(first, range(100), 96, "end")
    True
    >>> checkpoints.resume(second, range(120), kv_tokens=112), pool.view(0, "ssm")[second]
    (96, array([7., 7., 7., 7.], dtype=float32))
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
        align: int = 16,
        prompt_ends: bool = False,
    ) -> None:
        if not isinstance(layout, StateLayout):
            raise TypeError(f"layout must be a StateLayout, not {type(layout).__name__}")
        if not hasattr(pool, "view"):
            raise TypeError(f"pool must be an SsmStatePool made from a layout, not {type(pool).__name__}")
        names = [(layer, name) for layer, states in enumerate(layout.layers) for name in states]
        empty = StateMemory(layout, 0)
        views = [empty.view(layer, name) for layer, name in names]
        self._pool_views = [pool.view(layer, name) for layer, name in names]
        for ours, theirs, (layer, name) in zip(views, self._pool_views, names, strict=True):
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
                f"budget_bytes must be at most {(MAX_STATES + 1) * self.state_bytes - 1}, for {MAX_STATES} states "
                f"of {self.state_bytes} bytes, not {budget}"
            )
        self.index = CheckpointIndex(
            self.state_bytes, budget, grid=grid, spacing=spacing, align=align, prompt_ends=prompt_ends
        )
        self._pool = pool
        self._followed: tuple[Any, int] | None = None  # the cache of the last `follow`, and its `epoch`
        self._stored: StoredStates | None = None
        # Guards the index and the copies: `PrefixCache.flush` reads them in any thread. It is released in `finally`,
        # because the end of `with` allocates, and a MemoryError there would leave the lock locked.
        self._lock = Lock()
        self.index.on_drop = self._offer
        copies = StateMemory(layout, most)
        self._copies = [copies.view(layer, name) for layer, name in names]

    @property
    def pool(self) -> SsmStatePool:
        """The pool that has the slots."""
        return self._pool

    def resume(
        self, slot: int, tokens: Any, kv_tokens: int, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> int:
        """Copy the state of the longest kept prefix of `tokens` within `kv_tokens` into `slot`.

        The copy counts as a use of the state, and the position of the slot becomes its length. Without a kept prefix
        the slot stays as it was.

        Parameters
        ----------
        slot : int
            A slot of the pool that a request has.
        tokens, cache_salt, extra_keys
            The prompt, as in `PrefixCache.match_prefix`. At least one token is left to compute.
        kv_tokens : int
            The number of leading tokens with keys and values. No longer prefix is taken.

        Returns
        -------
        int
            The length of the prefix, or 0.

        Raises
        ------
        InvalidSlot
            The slot is out of range or free. Nothing has changed.
        TypeError
            `kv_tokens` is not an integer. Nothing has changed.

        Notes
        -----
        A signal or `MemoryError` during the copy resets the slot.
        """
        theirs = self._acquired(slot)
        row, key = token_row(tokens), root_key(cache_salt, extra_keys)
        row = row[: max(0, min(integer("kv_tokens", kv_tokens), len(row) - 1))]
        self._lock.acquire()
        try:
            kept = self.index.longest(key, row)
            position = 0 if kept is None else kept.position
            try:
                longer = self._load(key, row, position, slot)
                if longer:
                    position = longer
                elif kept is not None:
                    self.index.use(kept)
                    for target, source in zip(self._pool_views, self._copies, strict=True):
                        target[slot] = source[kept.slot]
                    if self._stored is not None and kept.is_stored:
                        self._stored.note_use(row[:position], key)
                    self._offer(kept)
            except BaseException:
                theirs.state.reset()
                theirs.position = 0
                raise
        finally:
            self._lock.release()
        if position:
            theirs.state.step_position = theirs.position = position
        return position

    def _load(self, key: bytes, row: NDArray[np.int32], begin: int, slot: int) -> int:
        """Copy the longest state in the store, of more than `begin` tokens, into a slot and keep it. Or return 0."""
        if self._stored is None:
            return 0
        position = self._stored.load(row, key, begin, len(row))
        if position:
            unpack(self._stored.state, self._pool_views, slot)
            self._keep(key, row[:position], "end", slot)
        return position

    def _keep(self, key: bytes, row: NDArray[np.int32], reason: str, slot: int) -> Kept | None:
        """Copy a state that the store has from a slot of the pool, if it is worth keeping."""
        try:
            kept = self.index.place(key, row, reason)
            if kept is not None:
                kept.is_stored = True
                for target, source in zip(self._copies, self._pool_views, strict=True):
                    target[kept.slot] = source[slot]
        except BaseException:
            self.index.reset()
            raise
        return kept

    def _offer(self, kept: Kept) -> bool:
        """Queue a kept state to be written to the store. False when the queue is full."""
        if self._stored is not None and not kept.is_stored:
            try:
                state = packed(self._copies, kept.slot)
            except MemoryError:  # it is not stored
                return True
            kept.is_stored = self._stored.offer(self.index.tokens_of(kept), kept.key, state)
            return kept.is_stored
        return True

    def read_state(
        self, tokens: Any, limit: int, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> tuple[int, bytes]:
        """Return position and bytes of the longest kept prefix of at most `limit` tokens, `(0, b"")` without one.

        For `save_session`. Does not count as a use.
        """
        row = token_row(tokens)[: integer("limit", limit, 0)]
        self._lock.acquire()
        try:
            kept = self.index.longest(root_key(cache_salt, extra_keys), row)
            return (0, b"") if kept is None else (kept.position, bytes(packed(self._copies, kept.slot)))
        finally:
            self._lock.release()

    def add_state(self, tokens: Any, state: bytes, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()) -> bool:
        """Keep a state of `read_state` as the state after `tokens`; return whether it is kept.

        For `load_session`. Do not call it while a `Scheduler` runs. Raises `ValueError` for a state of another size and
        a number of tokens that is not a multiple of `align`.
        """
        if len(state) != self.state_bytes:
            raise ValueError(f"a state has {self.state_bytes} bytes, not {len(state)}")
        row = token_row(tokens)
        asked = self.index.asked(row, len(row), "end", cache_salt=cache_salt, extra_keys=extra_keys)
        self._lock.acquire()
        try:
            kept = self.index.place(*asked)
            if kept is not None:
                unpack(bytearray(state), self._copies, kept.slot)
            return kept is not None
        finally:
            self._lock.release()

    def offer_states(self) -> bool:
        """Queue every kept state to be written to the store. False when the queue is full. Any thread may call it."""
        self._lock.acquire()
        try:
            return all(self._offer(kept) for kept in self.index.kept())
        finally:
            self._lock.release()

    def stops(
        self,
        tokens: Any,
        kv_tokens: int,
        begin: int = 0,
        *,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
    ) -> list[Stop]:
        """Return the positions beyond `begin` at which to `save` while this prompt is read, in order. Changes nothing.

        Parameters
        ----------
        tokens, cache_salt, extra_keys
            The prompt, as in `resume`.
        kv_tokens : int
            The number of leading tokens that the prefix cache had; 0 without a cache.
        begin : int
            The result of `resume`.

        Returns
        -------
        list of Stop
            Each has the `position` and the `reason` that `save` takes: all positions of the grid and at most three
            more.

        Raises
        ------
        TypeError, ValueError
            Wrong tokens, keys or numbers.
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
        epoch: int | None = None,
    ) -> bool:
        """Copy the state in `slot`, which has passed over exactly `tokens[:position]`, if it is worth keeping.

        States of less value are dropped when the budget is full.

        Parameters
        ----------
        slot : int
            A slot of the pool that a request has.
        tokens, cache_salt, extra_keys
            At least the first `position` tokens of the request, output included, as in `resume`.
        position : int
            A multiple of `align`.
        reason : {"branch", "end", "grid"}
            The reason of the stop, or "end" when the request has ended.
        epoch : int or None
            `PrefixCache.epoch` when the request began. None: do not compare it with that of the last `follow`.

        Returns
        -------
        bool
            False if the state is not kept: the cache has forgotten blocks since `epoch`, the same state is kept,
            another one is fewer than `spacing` tokens before it, or only states of more value could make room.

        Raises
        ------
        InvalidSlot
            The slot is out of range or free. Nothing has changed.
        ValueError
            A wrong position or reason. Nothing has changed.

        Notes
        -----
        A signal or `MemoryError` during the copy forgets every state, so that no partial copy is kept.
        """
        self._acquired(slot)
        asked = self.index.asked(tokens, position, reason, cache_salt=cache_salt, extra_keys=extra_keys)
        self._lock.acquire()
        try:
            if epoch is not None and self._followed is not None and self._followed[1] != epoch:
                return False
            try:
                kept = self.index.place(*asked)
                if kept is None:
                    return False
                for target, source in zip(self._copies, self._pool_views, strict=True):
                    target[kept.slot] = source[slot]
            except BaseException:
                self.index.reset()
                raise
        finally:
            self._lock.release()
        return True

    def reset(self) -> None:
        """Forget every state. The store keeps its states."""
        self._lock.acquire()
        try:
            self.index.reset()
        finally:
            self._lock.release()

    def follow(self, cache: Any) -> None:
        """Forget every state if the `PrefixCache` was told to forget blocks since the last call, or is another cache.

        States that were computed from wrong blocks are also wrong. A `Scheduler` calls this before it looks for a
        state.
        """
        self._lock.acquire()
        try:
            followed, self._followed = self._followed, (cache, cache.epoch)
            if followed is not None and followed[0] is cache and followed[1] == self._followed[1]:
                return
            if followed is not None:
                self.index.reset()
            self._stored = self._stored_of(cache)
        finally:
            self._lock.release()

    def _stored_of(self, cache: Any) -> StoredStates | None:
        link = getattr(cache, "link", None)
        if link is None or not link.store.fingerprint.state_bytes:
            return None
        state_bytes = link.store.fingerprint.state_bytes
        if state_bytes != self.state_bytes:
            raise ValueError(f"the store has states of {state_bytes} bytes, the checkpoints {self.state_bytes}")
        link.checkpoints.add(self)
        return StoredStates(cache, self.index.align, state_bytes)

    def stats(self) -> dict[str, Any]:
        """Return a dict of counters: bytes and states kept, saved and used by reason, dropped and rejected."""
        return {"state_bytes": self.state_bytes, **self.index.stats()}

    def check(self) -> None:
        """Raise `PoolError` if an invariant of the index is broken. The message names it."""
        self.index.check()

    def _acquired(self, slot: int) -> Any:
        found = self._pool.slot(slot)
        if found.request_id == 0:
            raise InvalidSlot(f"slot {slot} is free: {self._pool.used_count} of {self._pool.capacity} slots are used")
        return found
