"""CheckpointIndex: which recurrent states are kept, found by the exact tokens before them, dropped by value per byte.

The value of a state is the number of tokens that it saves, counted from the state before it, times the expected number
of uses: the uses so far, and at first the mean of its kind. Value is divided by bytes. As in GreedyDual-Size-Frequency
(Cherkasova, HP Labs 1998), the age of the cache is added to the priority, so that a state that was valuable long ago is
dropped in the end.

    priority = age at the last use + uses * saved tokens / (state bytes + 4 * saved tokens)
    age      = the priority of the state dropped last
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pagepool._arguments import integer
from pagepool.errors import PoolError
from pagepool.prefix.keys import root_key
from pagepool.prefix.radix_tree import PrefixTree, token_row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["REASONS", "TOKEN_BYTES", "CheckpointIndex", "Kept", "Stop"]

REASONS = ("branch", "end", "grid")
TOKEN_BYTES = 4
# The mean of uses of a kind starts at 1, as if this many states had been used once each before.
PRIOR = 8


@dataclass(eq=False, slots=True)
class Kept:
    """A kept state, or, without a slot, the root of a key.

    saved tokens = position - above.position        below = {state: state.above is this one}
    """

    key: bytes
    node: int = -1
    slot: int = -1
    position: int = 0
    birth: int = 0  # of two states with equal priority, the older one is dropped first
    reason: str = ""
    uses: float = 0.0
    age: float = 0.0
    above: Kept = field(init=False)
    below: set[Kept] = field(default_factory=set)
    priority: float = 0.0
    version: int = 0  # 0: it is not kept any longer
    is_stored: bool = False  # it came from the store, or is on its way there


Entry: TypeAlias = tuple[float, int, int, Kept]  # priority, birth, version


class ValueQueue:
    """States by priority. A state may have several entries; the entry with its current version counts."""

    def __init__(self, state_bytes: int) -> None:
        self.age = 0.0
        self._state_bytes = state_bytes
        self._heap: list[Entry] = []

    def push(self, kept: Kept, num_states: int) -> None:
        """Compute the priority again: after a use, and when the state before it was added or dropped. O(log
        num_states)."""
        priority = kept.age + self.value(kept.uses, kept.position - kept.above.position)
        heappush(self._heap, (priority, kept.birth, kept.version + 1, kept))
        kept.priority = priority
        kept.version += 1
        if len(self._heap) > 64 + 4 * num_states:
            self._heap = [entry for entry in self._heap if _is_current(entry)]
            heapify(self._heap)

    def value(self, uses: float, saves: int) -> float:
        """Value per byte of a state that saves `saves` tokens. Counts the bytes of state and tokens."""
        return uses * saves / (self._state_bytes + saves * TOKEN_BYTES)

    def least(self) -> Kept | None:
        """Return the state that will be dropped next. Does not drop it."""
        while self._heap and not _is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def __len__(self) -> int:
        return sum(map(_is_current, self._heap))


def _is_current(entry: Entry) -> bool:
    return entry[3].version == entry[2]


class Stop(NamedTuple):
    """A position of a prompt at which its state should be copied, and the reason."""

    position: int
    reason: str


class CheckpointIndex:
    """Chooses which states are kept, and finds them by the exact tokens before them. Stores slot numbers, not the
    states.

    Parameters
    ----------
    state_bytes : int
        Bytes of one state.
    budget_bytes : int or None
        Limit for the states and for the tokens by which they are found. None: no limit.
    grid : int
        Tokens from one grid position to the next. 0: no grid.
    spacing : int
        The minimum number of tokens between a state and the state before it.
    align : int
        Positions are multiples of it: the block size of the prefix cache, or a multiple of the block size.
    prompt_ends : bool
        Whether `stops` includes the end of each prompt.

    Notes
    -----
    The invariants, which `check` audits:

        num_states = held nodes of the tree = slots in use <= budget_bytes // state_bytes
        used_bytes = num_states * state_bytes + num_tokens * 4 <= budget_bytes
        saved - dropped = num_states

    Examples
    --------
    >>> index = CheckpointIndex(state_bytes=1000, budget_bytes=10_000)
    >>> prompts = [[*range(480), user, 7] for user in (1, 2, 3)]
    >>> index.stops(prompts[0], kv_tokens=0)  # nothing is known yet
    []
    >>> index.stops(prompts[1], kv_tokens=480)  # the second prompt differs from the first there
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
        self.on_drop: Callable[[Kept], object] | None = None  # called before a state loses its slot
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
        """Bytes of the kept states and of the tokens by which they are found."""
        return self.num_states * self.state_bytes + self._tree.num_tokens * TOKEN_BYTES

    def find(
        self, tokens: Any, limit: int | None = None, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> tuple[int, int] | None:
        """Return position and slot of the longest prefix of `tokens` with a kept state, or None. Counts as a use.

        Parameters
        ----------
        tokens, cache_salt, extra_keys
            The prompt, as in `PrefixCache.match_prefix`.
        limit : int or None
            The number of tokens that have keys and values: no position beyond it is returned. At least one token is
            left to compute.
        """
        row = token_row(tokens)
        most = len(row) - 1 if limit is None else min(integer("limit", limit), len(row) - 1)
        kept = self.longest(root_key(cache_salt, extra_keys), row[: max(0, most)])
        if kept is None:
            return None
        self.use(kept)
        return kept.position, kept.slot

    def longest(self, key: bytes, row: NDArray[np.int32]) -> Kept | None:
        """Return the state of the longest prefix of `row` with a kept state. Changes nothing."""
        _, nodes = self._tree.walk(key, row)
        return self._kept[nodes[-1]] if nodes else None

    def use(self, kept: Kept) -> None:
        """Count a use of a state."""
        kept.uses += 1
        kept.age = self._queue.age
        self.used[kept.reason] += 1
        self._queue.push(kept, self.num_states)

    def tokens_of(self, kept: Kept) -> NDArray[np.int32]:
        """Return the tokens before a state, int32 (position,)."""
        return self._tree.tokens_of(kept.node)

    def kept(self) -> list[Kept]:
        """Return every state."""
        return list(self._kept.values())

    def stops(
        self,
        tokens: Any,
        kv_tokens: int,
        begin: int = 0,
        *,
        cache_salt: Any = None,
        extra_keys: Iterable[Any] = (),
    ) -> list[Stop]:
        """Return where to stop while a prompt is read, to keep its state: in order, each beyond `begin`.

        Changes nothing.

        Parameters
        ----------
        tokens, cache_salt, extra_keys
            The prompt, as in `PrefixCache.match_prefix`.
        kv_tokens : int
            The number of leading tokens with cached keys and values: there the prompt differs from earlier prompts.
        begin : int
            The position from which the prompt is computed: the position that `find` returned.
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
            # Two stops are too close: the shorter prefix stays, since keys and values may reach no further. A grid stop
            # is dropped in any case.
            if stops and position < stops[-1].position + self.spacing:
                if wanted[position] == "grid" or stops[-1].reason == "branch":
                    continue
                stops.pop()
            stops.append(Stop(position, wanted[position]))
        return stops

    def aligned(self, position: int) -> int:
        """Return the last position up to this one that is a multiple of `align`."""
        return position - position % self.align

    def admit(
        self, tokens: Any, position: int, reason: str, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> int:
        """Return the slot to which the state after `tokens[:position]` is to be copied now, or -1.

        -1 means that the state is kept already, that another state is less than `spacing` before it, or that only
        states of more value could make room. States of the least value are dropped until there is room. Raises as
        `asked`; then nothing has changed.
        """
        kept = self.place(*self.asked(tokens, position, reason, cache_salt=cache_salt, extra_keys=extra_keys))
        return -1 if kept is None else kept.slot

    def asked(
        self, tokens: Any, position: int, reason: str, *, cache_salt: Any = None, extra_keys: Iterable[Any] = ()
    ) -> tuple[bytes, NDArray[np.int32], str]:
        """Check the arguments of `admit`; return the arguments of `place`. Reserves memory in the tree.

        Raises `ValueError` if `reason` does not exist, or if the position is outside the tokens or not a multiple of
        `align`.
        """
        row, at = token_row(tokens), integer("position", position)
        if not 1 <= at <= len(row) or at % self.align:
            raise ValueError(f"position must be a multiple of {self.align} from 1 to {len(row)}, not {at}")
        if reason not in REASONS:
            raise ValueError(f"reason must be one of {', '.join(REASONS)}, not {reason!r}")
        key = root_key(cache_salt, extra_keys)
        self._tree.reserve(at)
        return key, row[:at], reason

    def place(self, key: bytes, row: NDArray[np.int32], reason: str) -> Kept | None:
        """Do as `admit`, with checked arguments; return the new state, or None."""
        at = len(row)
        uses = (self.used[reason] + PRIOR) / (self.saved[reason] + PRIOR)
        while True:
            same, nodes = self._tree.walk(key, row)
            above = self._kept[nodes[-1]] if nodes else None
            begin = above.position if above is not None else 0
            if above is not None and at - begin < self.spacing:
                return None
            size = self.state_bytes + (at - same * self.align) * TOKEN_BYTES
            if self.budget_bytes is None or self.used_bytes + size <= self.budget_bytes:
                break
            priority = self._queue.age + self._queue.value(uses, at - begin)
            victim = self._queue.least()
            if victim is None or victim.priority >= priority:
                # Ages the other states as if this state had been kept and dropped immediately.
                self._queue.age = max(self._queue.age, priority)
                self.rejected += 1
                return None
            self._queue.age = victim.priority
            self._drop(victim)
        slot = self._free.pop() if self._free else len(self._kept)
        birth = sum(self.saved.values())
        kept = Kept(key, self._tree.hold(key, row), slot, at, birth, reason, uses, self._queue.age)
        kept.above = above or self._roots.setdefault(key, Kept(key))
        if same * self.align == at:  # a prefix of other states
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
        return kept

    def reset(self) -> None:
        """Forget every state and all counts."""
        self._forget()

    def stats(self) -> dict[str, Any]:
        """Return a dict of counters; `saved` and `used` by reason."""
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
        """Audit the equations above and the tree. Raises `PoolError` that names a broken one. O(tokens)."""
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
        """Whether `above`, of the same key, is a shorter prefix of `kept`."""
        blocks = (kept.position - above.position) // self.align
        return above.node < 0 or (blocks > 0 and self._tree.is_below(kept.node, above.node, blocks))

    def _drop(self, kept: Kept) -> None:
        if self.on_drop is not None:
            self.on_drop(kept)
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
