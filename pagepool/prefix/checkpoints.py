"""Checkpoints: at which positions of which prompts recurrent states are kept, and which go when room is needed.

Keys and values of a prefix are there for each of its tokens; a recurrent state is there only where somebody copied it,
and it is as large for ten tokens as for a million. A hybrid model can go on from the longest cached prefix at whose
end a state was kept, so the question is where to keep one. Three kinds of places earn it:

    branch  where a prompt leaves those before it: found when the second such prompt comes, used from the third on
    end     where a request ended: the next turn of a conversation goes on from there. And, if asked for, where its
            prompt ended: the same prompt and longer ones go on from there
    grid    every `grid` tokens of a prompt: bounds what the second prompt must compute again

Its value is the tokens that it saves, those from the state before it on, times the times that it will be used: those
counted since, and before any the mean of its kind so far. It is weighed by the byte, and the priority is that of
GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998): the age of the cache is added, so that what was once valuable goes
in the end.

    priority = age when it was used last + uses * saved tokens / (state bytes + 4 * saved tokens)
    age      = the priority of the state dropped last
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from pagepool._arguments import integer
from pagepool.config import StateLayout
from pagepool.errors import InvalidSlot, PoolError, refuse_copy
from pagepool.memory.ssm_pool import SsmStatePool, StateMemory
from pagepool.prefix.keys import root_key
from pagepool.prefix.radix_tree import PrefixTree, token_row

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["REASONS", "CheckpointIndex", "StateCheckpoints", "Stop"]

REASONS = ("branch", "end", "grid")
TOKEN_BYTES = 4
MAX_STATES = 2**31 - 1
# A kind's mean of uses begins at 1 and moves as if so many states had been used once each before.
PRIOR = 8


@dataclass(eq=False, slots=True)
class Kept:
    """A state that is kept, or, without a slot, the root of a key.

    saved tokens = position - above.position        below = the states whose `above` it is
    """

    key: bytes
    node: int = -1
    slot: int = -1
    position: int = 0
    birth: int = 0  # of two states with one priority, the older goes first
    reason: str = ""
    uses: float = 0.0
    age: float = 0.0
    above: Kept = field(init=False)
    below: set[Kept] = field(default_factory=set)
    priority: float = 0.0
    version: int = 0  # 0: it is not kept any longer


Entry: TypeAlias = tuple[float, int, int, Kept]  # priority, birth, version


class ValueQueue:
    """States by priority. Of the entries of one state, that with its version counts."""

    def __init__(self, state_bytes: int) -> None:
        self.age = 0.0
        self._state_bytes = state_bytes
        self._heap: list[Entry] = []

    def push(self, kept: Kept, num_states: int) -> None:
        """Works out the priority anew: after a use, and when the state before it came or went. O(log num_states)."""
        priority = kept.age + self.value(kept.uses, kept.position - kept.above.position)
        heappush(self._heap, (priority, kept.birth, kept.version + 1, kept))
        kept.priority = priority
        kept.version += 1
        if len(self._heap) > 64 + 4 * num_states:
            self._heap = [entry for entry in self._heap if _is_current(entry)]
            heapify(self._heap)

    def value(self, uses: float, saves: int) -> float:
        """The value of a state that saves so many tokens, per byte of the state and the tokens."""
        return uses * saves / (self._state_bytes + saves * TOKEN_BYTES)

    def least(self) -> Kept | None:
        """The state that goes next; it stays."""
        while self._heap and not _is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def __len__(self) -> int:
        return sum(map(_is_current, self._heap))


def _is_current(entry: Entry) -> bool:
    return entry[3].version == entry[2]


class Stop(NamedTuple):
    """A position of a prompt at which its state is worth a copy, and why."""

    position: int
    reason: str


class CheckpointIndex:
    """Which states are kept, by the exact tokens before them. It owns no state, only the numbers of their slots.

    state_bytes   bytes of one state
    budget_bytes  for states and the tokens that find them; None: no bound
    grid          tokens from one grid position to the next; 0: no grid
    spacing       tokens that a state must at least be away from the one before it
    align         positions are multiples of it: the block size of the prefix cache, or a multiple of that
    prompt_ends   whether `stops` has the end of each prompt, too

    The invariants, which `check` audits:

        num_states = held nodes of the tree = slots in use <= budget_bytes // state_bytes
        used_bytes = num_states * state_bytes + num_tokens * 4 <= budget_bytes
        saved - dropped = num_states

    >>> index = CheckpointIndex(state_bytes=1000, budget_bytes=10_000)
    >>> prompts = [[*range(480), user, 7] for user in (1, 2, 3)]
    >>> index.stops(prompts[0], kv_tokens=0)  # nothing is known yet
    []
    >>> index.stops(prompts[1], kv_tokens=480)  # the second one leaves the first there
    [Stop(position=480, reason='branch')]
    >>> index.admit(prompts[1], 480, "branch"), index.find(prompts[2], limit=480)
    (0, (480, 0))
    """

    def __init__(
        self,
        state_bytes: int,
        budget_bytes: int | None = None,
        *,
        grid: int = 16_384,
        spacing: int = 16,
        align: int = 16,
        prompt_ends: bool = False,
    ) -> None:
        self.prompt_ends = prompt_ends
        self.state_bytes = integer("state_bytes", state_bytes, 1)
        self.budget_bytes = None if budget_bytes is None else integer("budget_bytes", budget_bytes, 0)
        self.grid = integer("grid", grid, 0)
        self.spacing = integer("spacing", spacing, 1)
        self.align = integer("align", align, 1)
        self._forget()

    def _forget(self) -> None:
        self._tree = PrefixTree(self.align)
        self._roots: dict[bytes, Kept] = {}
        self._kept: dict[int, Kept] = {}  # by node
        self._free: list[int] = []
        self._queue = ValueQueue(self.state_bytes)
        self.saved = dict.fromkeys(REASONS, 0)
        self.used = dict.fromkeys(REASONS, 0)
        self.dropped = self.rejected = self.peak_states = 0

    @property
    def num_states(self) -> int:
        """States kept."""
        return len(self._kept)

    @property
    def used_bytes(self) -> int:
        """Bytes of the states kept and of the tokens that find them."""
        return self.num_states * self.state_bytes + self._tree.num_tokens * TOKEN_BYTES

    def find(
        self, tokens: Any, limit: int | None = None, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> tuple[int, int] | None:
        """Position and slot of the longest prefix of `tokens` whose state is kept, or None; it counts as used.

        tokens  those of the prompt, as `PrefixCache.match_prefix` takes them, salt and keys as well
        limit   no position beyond it: how many tokens have their keys and values. One token at least is left to compute
        """
        row = token_row(tokens)
        most = len(row) - 1 if limit is None else min(integer("limit", limit), len(row) - 1)
        _, nodes = self._tree.walk(root_key(cache_salt, extra_keys), row[: max(0, most)])
        if not nodes:
            return None
        kept = self._kept[nodes[-1]]
        kept.uses += 1
        kept.age = self._queue.age
        self.used[kept.reason] += 1
        self._queue.push(kept, self.num_states)
        return kept.position, kept.slot

    def stops(
        self,
        tokens: Any,
        kv_tokens: int,
        begin: int = 0,
        *,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
    ) -> list[Stop]:
        """Where to stop while a prompt is read, and keep its state: in order, each beyond `begin`. Changes nothing.

        kv_tokens  leading tokens whose keys and values were cached: where the prompt leaves those before it
        begin      the position from which it is computed, that of the state found
        """
        row = token_row(tokens)
        last, known = len(row) - 1, min(integer("kv_tokens", kv_tokens), len(row) - 1)
        same, nodes = self._tree.walk(root_key(cache_salt, extra_keys), row)
        wanted = {
            self.aligned(position): "branch" for position in (min(same * self.align, last), known) if position > 0
        }
        if self.grid:
            first = (max(known, begin) // self.grid + 1) * self.grid
            for position in range(first, last + 1, self.grid):
                wanted.setdefault(self.aligned(position), "grid")
        if self.prompt_ends:  # one token is left, to compute logits again
            wanted.setdefault(self.aligned(last), "end")
        taken = self._kept[nodes[-1]].position if nodes else 0
        stops: list[Stop] = []
        for position in sorted(wanted):
            if position <= begin or taken <= position < taken + self.spacing:
                continue
            # Of two that are too close the shorter prefix stays, as keys and values may reach no further; one of the
            # grid gives way.
            if stops and position < stops[-1].position + self.spacing:
                if wanted[position] == "grid" or stops[-1].reason == "branch":
                    continue
                stops.pop()
            stops.append(Stop(position, wanted[position]))
        return stops

    def aligned(self, position: int) -> int:
        """The last position up to this one that is a multiple of `align`."""
        return position - position % self.align

    def admit(
        self, tokens: Any, position: int, reason: str, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> int:
        """The slot that the state after `tokens[:position]` is to be copied to now, or -1 when it is not worth one.

        It is not when it is kept already, or another is less than `spacing` before it, or only states of more value
        would have to go. Those of the least value go until there is room. Raises as `asked`; then nothing has changed.
        """
        return self.place(*self.asked(tokens, position, reason, cache_salt=cache_salt, extra_keys=extra_keys))

    def asked(
        self, tokens: Any, position: int, reason: str, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> tuple[bytes, NDArray[np.int32], str]:
        """What `place` takes, from what `admit` takes. Makes room in the tree, and changes nothing else.

        Raises `ValueError` for a position that is no multiple of `align`, or not among the tokens, and for an unknown
        reason.
        """
        row, at = token_row(tokens), integer("position", position)
        if not 1 <= at <= len(row) or at % self.align:
            raise ValueError(f"position must be a multiple of {self.align} from 1 to {len(row)}, not {at}")
        if reason not in REASONS:
            raise ValueError(f"reason must be one of {', '.join(REASONS)}, not {reason!r}")
        key = root_key(cache_salt, extra_keys)
        self._tree.reserve(at)
        return key, row[:at], reason

    def place(self, key: bytes, row: NDArray[np.int32], reason: str) -> int:
        """What `admit` does, once it is asked properly."""
        at = len(row)
        uses = (self.used[reason] + PRIOR) / (self.saved[reason] + PRIOR)
        while True:
            same, nodes = self._tree.walk(key, row)
            above = self._kept[nodes[-1]] if nodes else None
            begin = above.position if above is not None else 0
            if above is not None and at - begin < self.spacing:
                return -1
            size = self.state_bytes + (at - same * self.align) * TOKEN_BYTES
            if self.budget_bytes is None or self.used_bytes + size <= self.budget_bytes:
                break
            priority = self._queue.age + self._queue.value(uses, at - begin)
            victim = self._queue.least()
            if victim is None or victim.priority >= priority:
                # As if it had been let in and had gone at once: with time the others grow old beside newcomers.
                self._queue.age = max(self._queue.age, priority)
                self.rejected += 1
                return -1
            self._queue.age = victim.priority
            self._drop(victim)
        slot = self._free.pop() if self._free else len(self._kept)
        birth = sum(self.saved.values())
        kept = Kept(key, self._tree.hold(key, row), slot, at, birth, reason, uses, self._queue.age)
        kept.above = above or self._roots.setdefault(key, Kept(key))
        if same * self.align == at:  # on the way to others
            kept.below = {each for each in kept.above.below if self._is_below(each, kept)}
        kept.above.below -= kept.below
        kept.above.below.add(kept)
        self._kept[kept.node] = kept
        self.saved[reason] += 1
        self.peak_states = max(self.peak_states, self.num_states)
        self._queue.push(kept, self.num_states)
        for each in kept.below:
            each.above = kept
            self._queue.push(each, self.num_states)
        return slot

    def reset(self) -> None:
        """Forgets every state and all counts."""
        self._forget()

    def stats(self) -> dict[str, Any]:
        """What is kept and what was done, as a dict; `saved` and `used` by reason."""
        return {
            "states": self.num_states,
            "peak_states": self.peak_states,
            "used_bytes": self.used_bytes,
            "budget_bytes": self.budget_bytes,
            "saved": dict(self.saved),
            "used": dict(self.used),
            "dropped": self.dropped,
            "rejected": self.rejected,
        }

    def check(self) -> None:
        """Audits the equations above and those of the tree; raises `PoolError` naming a broken one. O(tokens)."""
        self._tree.check()
        below = [kept for one in (*self._roots.values(), *self._kept.values()) for kept in one.below]
        if len(below) != self.num_states or any(self._kept.get(kept.node) is not kept for kept in below):
            raise PoolError(f"broken invariant: {len(below)} states are below others, {self.num_states} are kept")
        if not all(kept.above.position < kept.position and self._is_below(kept, kept.above) for kept in below):
            raise PoolError("broken invariant: a state is above another and does not begin it")
        slots = [kept.slot for kept in below] + self._free
        if sorted(slots) != list(range(len(slots))):
            raise PoolError(f"broken invariant: {len(below)} slots in use and {len(self._free)} free are not all")
        if self.budget_bytes is not None and self.used_bytes > self.budget_bytes:
            raise PoolError(f"broken invariant: {self.used_bytes} bytes are above the budget of {self.budget_bytes}")
        if sum(self.saved.values()) - self.dropped != self.num_states:
            raise PoolError(f"broken invariant: {self.saved} saved - {self.dropped} dropped are not {self.num_states}")
        queued = len(self._queue)
        if queued != self.num_states:
            raise PoolError(f"broken invariant: {queued} states can be dropped, {self.num_states} are kept")

    def _is_below(self, kept: Kept, above: Kept) -> bool:
        """Whether the tokens of `kept` begin with those of `above`, of the same key."""
        blocks = (kept.position - above.position) // self.align
        return above.node < 0 or (blocks > 0 and self._tree.is_below(kept.node, above.node, blocks))

    def _drop(self, kept: Kept) -> None:
        kept.version = 0
        del self._kept[kept.node]
        self._tree.release(kept.node)
        self._free.append(kept.slot)
        self.dropped += 1
        above = kept.above
        above.below.remove(kept)
        above.below |= kept.below
        for each in kept.below:
            each.above = above
            self._queue.push(each, self.num_states)
        if above.node < 0 and not above.below:
            del self._roots[above.key]


class StateCheckpoints:
    """Keeps recurrent states where they save most, so that a hybrid model can go on from a cached prefix.

    layout        the `StateLayout` of one sequence's states
    pool          the engine's `SsmStatePool.from_layout(layout, ...)`: states are copied out of its slots and into them
    budget_bytes  bytes for the copies and for the tokens by which they are found, at most those of 2**31 - 1 states.
                  Memory is committed as it is used
    grid          tokens from one position of the grid to the next; 0: no grid
    spacing       the fewest tokens between two states of one prompt, at least 1
    align         states are kept only at multiples of this many tokens: the block size of the prefix cache, or a
                  multiple of it where the kernels stop less often
    prompt_ends   whether the state is also kept where each prompt ends, so that the second request with a prompt
                  computes little of it; at the cost of a copy, and of a step more for what `align` leaves

    States are kept at the end of requests, where prompts part, and on a sparse grid. When the budget is full, the
    states that save the fewest tokens per byte are dropped first, those that were used often or lately later. The size
    of a state is independent of that of a KV block. Raises `ValueError` when the layout has no state or is not that of
    the pool, and for a number out of range, `TypeError` for anything else, `MemoryError`.

    A request of a hybrid model takes these steps, one thread at a time; none of the calls keeps its arguments:

        blocks = cache.match_prefix(tokens)                      # keys and values
        n = len(blocks) * cache.block_size
        begin = checkpoints.resume(slot, tokens, n)              # the state: go on from token `begin`
        for position, reason in checkpoints.stops(tokens, n, begin):
            ...                                                  # compute tokens up to `position`
            checkpoints.save(slot, tokens, position, reason)
        ...                                                      # the rest and the output, up to `position`, the last
        checkpoints.save(slot, all_tokens, position, "end")      # multiple of `align`; then what is left

    Keys and values of the tokens from `begin` on are cached, but the state must pass over them: a model computes them
    once more, or only its recurrent layers where it can.

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
                f"budget_bytes must be at most {(MAX_STATES + 1) * self.state_bytes - 1}, that of {MAX_STATES} states "
                f"of {self.state_bytes} bytes, not {budget}"
            )
        self.index = CheckpointIndex(
            self.state_bytes, budget, grid=grid, spacing=spacing, align=align, prompt_ends=prompt_ends
        )
        self._pool = pool
        self._followed: tuple[Any, int] | None = None  # a cache, and how often it had forgotten
        copies = StateMemory(layout, most)
        self._copies = [copies.view(layer, name) for layer, name in names]

    @property
    def pool(self) -> SsmStatePool:
        """The pool whose states are kept."""
        return self._pool

    def resume(
        self, slot: int, tokens: Any, kv_tokens: int, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> int:
        """Copies the state of the longest kept prefix of `tokens` within `kv_tokens` into `slot`; returns its length.

        slot       a slot of the pool that a request has
        tokens     the tokens of the prompt, as `PrefixCache.match_prefix` takes them, `cache_salt` and `extra_keys` too
        kv_tokens  the first tokens whose keys and values are there: no longer prefix is taken

        Returns 0, and leaves the slot as it was, when there is none. The slot's position becomes the length. At least
        one token is left to compute. The state counts as used. Raises `InvalidSlot` for a slot that is out of range or
        free, `TypeError` for a `kv_tokens` that is no integer; then nothing has changed. A signal or `MemoryError`
        during the copy resets the slot.
        """
        theirs = self._acquired(slot)
        found = self.index.find(tokens, integer("kv_tokens", kv_tokens), cache_salt=cache_salt, extra_keys=extra_keys)
        if found is None:
            return 0
        position, kept = found
        try:
            for target, source in zip(self._pool_views, self._copies, strict=True):
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
        """Returns the positions beyond `begin` at which to `save` while this prompt is read, in order.

        tokens, cache_salt, extra_keys  those of the prompt, as in `resume`
        kv_tokens  leading tokens that the prefix cache had; 0 without a cache
        begin      what `resume` returned

        Returns a list of `Stop`, each with the `position` and the `reason` that `save` takes: as many as the grid has,
        and at most three more. Changes nothing. Raises `TypeError` and `ValueError` for wrong tokens, keys or numbers.
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
        """Copies the state in `slot`, which has passed over exactly `tokens[:position]`; False if it is not kept.

        slot      a slot of the pool that a request has
        tokens    at least the first `position` tokens of the request, outputs included, as in `resume`
        position  a multiple of `align`
        reason    the reason of the stop, or "end" when the request has ended

        It is not kept when the same state is there, another one is fewer than `spacing` tokens before it, or only
        states of more value could make room. Drops states of less value when the budget is full. Raises `InvalidSlot`
        for a slot that is out of range or free, `ValueError` for a wrong position or reason; then nothing has changed.
        A signal or `MemoryError` during the copy makes it forget every state, so that none is kept that was copied in
        part.
        """
        self._acquired(slot)
        asked = self.index.asked(tokens, position, reason, cache_salt=cache_salt, extra_keys=extra_keys)
        try:
            kept = self.index.place(*asked)
            if kept < 0:
                return False
            for target, source in zip(self._copies, self._pool_views, strict=True):
                target[kept] = source[slot]
        except BaseException:
            self.index.reset()
            raise
        return True

    def reset(self) -> None:
        """Forgets every state."""
        self.index.reset()

    def follow(self, cache: Any) -> None:
        """Forgets every state when the `PrefixCache` was told to forget blocks since the last call, or is another one.

        What was computed from blocks that are to be forgotten may be as wrong as they. A `Scheduler` calls it before it
        looks for a state.
        """
        followed, self._followed = self._followed, (cache, cache.forgotten)
        if followed is not None and (followed[0] is not cache or followed[1] != cache.forgotten):
            self.reset()

    def stats(self) -> dict[str, Any]:
        """Returns a dict of counters: what is kept, bytes and states, and how many were saved and used for each reason,
        dropped and rejected."""
        return {"state_bytes": self.state_bytes, **self.index.stats()}

    def check(self) -> None:
        """Raises `PoolError` naming an equation of the index that is broken."""
        self.index.check()

    def _acquired(self, slot: int) -> Any:
        found = self._pool.slot(slot)
        if found.request_id == 0:
            raise InvalidSlot(f"slot {slot} is free: {self._pool.used_count} of {self._pool.capacity} slots are used")
        return found
