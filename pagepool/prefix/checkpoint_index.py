"""CheckpointIndex: at which positions of which prompts recurrent states are kept, and which go when room is needed.

Keys and values of a prefix are there for each of its tokens; a recurrent state is there only where somebody copied it,
and it is as large for ten tokens as for a million. A hybrid model can go on from the longest cached prefix at whose
end a state was kept, so the question is where to keep one. Three kinds of places earn it:

    branch  where a prompt leaves those before it: found when the second such prompt comes, used from the third on
    end     where a request ended: the next turn of a conversation goes on from there
    grid    every `grid` tokens of a prompt: bounds what the second prompt must compute again

Which goes when the bytes run out: `pagepool.prefix.checkpoint_value`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagepool.arguments import integer
from pagepool.errors import PoolError
from pagepool.prefix.checkpoint_value import PRIOR, TOKEN_BYTES, Mark, ValueQueue, mark_of
from pagepool.prefix.keys import root_key
from pagepool.prefix.token_tree import TokenNode, TokenTree
from pagepool.prefix.tokens import token_row

__all__ = ["REASONS", "CheckpointIndex", "Stop"]

REASONS = ("branch", "end", "grid")


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
    align         positions are multiples of it: what the kernels can stop at, or the KV cache can find

    The invariants, which `check` audits:

        num_states = marks in the tree = slots in use <= budget_bytes // state_bytes
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
        align: int = 1,
    ) -> None:
        self.state_bytes = integer("state_bytes", state_bytes, 1)
        self.budget_bytes = None if budget_bytes is None else integer("budget_bytes", budget_bytes, 0)
        self.grid = integer("grid", grid, 0)
        self.spacing = integer("spacing", spacing, 1)
        self.align = integer("align", align, 1)
        self._forget()

    def _forget(self) -> None:
        self._tree = TokenTree()
        self._nodes: dict[int, TokenNode] = {}  # by slot
        self._free: list[int] = []
        self._queue = ValueQueue(self.state_bytes)
        self.saved = dict.fromkeys(REASONS, 0)
        self.used = dict.fromkeys(REASONS, 0)
        self.dropped = self.rejected = self.peak_states = 0

    @property
    def num_states(self) -> int:
        """States kept."""
        return len(self._nodes)

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
        node, _ = self._tree.walk(root_key(cache_salt, extra_keys), row)
        while node is not None and (node.mark is None or node.end > most):
            node = node.parent
        if node is None:
            return None
        mark = mark_of(node)
        mark.uses += 1
        mark.age = self._queue.age
        self.used[mark.reason] += 1
        self._queue.push(node, self.num_states)
        return node.end, mark.slot

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
        node, same = self._tree.walk(root_key(cache_salt, extra_keys), row)
        wanted = {self.aligned(position): "branch" for position in (min(same, last), known) if position > 0}
        if self.grid:
            first = (max(known, begin) // self.grid + 1) * self.grid
            for position in range(first, last + 1, self.grid):
                wanted.setdefault(self.aligned(position), "grid")
        while node is not None and node.mark is None:
            node = node.parent
        taken = node.end if node is not None else 0
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
        """What `place` takes, from what `admit` takes. Changes nothing.

        Raises `ValueError` for a position that is no multiple of `align`, or not among the tokens, and for an unknown
        reason.
        """
        row, at = token_row(tokens), integer("position", position)
        if not 1 <= at <= len(row) or at % self.align:
            raise ValueError(f"position must be a multiple of {self.align} from 1 to {len(row)}, not {at}")
        if reason not in REASONS:
            raise ValueError(f"reason must be one of {', '.join(REASONS)}, not {reason!r}")
        return root_key(cache_salt, extra_keys), row[:at], reason

    def place(self, key: bytes, row: NDArray[np.int32], reason: str) -> int:
        """What `admit` does, once it is asked properly."""
        at = len(row)
        uses = (self.used[reason] + PRIOR) / (self.saved[reason] + PRIOR)
        while True:
            node, same = self._tree.walk(key, row)
            if node is not None and node.mark is None:
                node = node.above()
            begin = node.end if node is not None else 0
            if node is not None and at - begin < self.spacing:
                return -1
            size = self.state_bytes + (at - same) * TOKEN_BYTES
            if self.budget_bytes is None or self.used_bytes + size <= self.budget_bytes:
                break
            priority = self._queue.age + self._queue.value(uses, at - begin)
            victim = self._queue.least()
            if victim is None or mark_of(victim).priority >= priority:
                # As if it had been let in and had gone at once: with time the others grow old beside newcomers.
                self._queue.age = max(self._queue.age, priority)
                self.rejected += 1
                return -1
            self._queue.age = mark_of(victim).priority
            self._drop(victim)
        return self._put(self._tree.place(key, row), reason, uses)

    def drop(self, slot: int) -> None:
        """Forgets the state in a slot. Raises `ValueError` for a slot that has none."""
        if slot not in self._nodes:
            raise ValueError(f"slot {slot} has no state; {self.num_states} are kept")
        self._drop(self._nodes[slot])

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
        marked = {mark_of(node).slot: node for node in self._tree.nodes() if node.mark is not None}
        if marked != self._nodes or set(marked) & set(self._free):
            raise PoolError(
                f"broken invariant: {len(marked)} marks are in the tree, {self.num_states} slots are in use"
            )
        if len(marked) + len(self._free) != (max([-1, *marked, *self._free]) + 1):
            raise PoolError(f"broken invariant: {len(marked)} slots in use and {len(self._free)} free are not all")
        if self.budget_bytes is not None and self.used_bytes > self.budget_bytes:
            raise PoolError(f"broken invariant: {self.used_bytes} bytes are above the budget of {self.budget_bytes}")
        if sum(self.saved.values()) - self.dropped != self.num_states:
            raise PoolError(f"broken invariant: {self.saved} saved - {self.dropped} dropped are not {self.num_states}")
        queued = len(self._queue)
        if queued != self.num_states:
            raise PoolError(f"broken invariant: {queued} states can be dropped, {self.num_states} are kept")

    def _put(self, node: TokenNode, reason: str, uses: float) -> int:
        slot = self._free.pop() if self._free else len(self._nodes)
        node.mark = Mark(slot, sum(self.saved.values()), reason, uses, self._queue.age)
        self._nodes[slot] = node
        self.saved[reason] += 1
        self.peak_states = max(self.peak_states, self.num_states)
        for one in (node, *node.below()):
            self._queue.push(one, self.num_states)
        return slot

    def _drop(self, node: TokenNode) -> None:
        mark, below = mark_of(node), list(node.below())
        del self._nodes[mark.slot]
        self._free.append(mark.slot)
        self.dropped += 1
        self._tree.unmark(node)
        for one in below:
            self._queue.push(one, self.num_states)
