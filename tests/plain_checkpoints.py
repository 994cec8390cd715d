"""Recurrent states of hybrid models that are kept for reuse, in plain Python.

Like `pagepool.prefix.checkpoints`, with the same names and the same rule for dropping states. It has no tree: a state
is found by a search through all states with the tuple of all tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CheckpointIndex", "StateCheckpoints"]

TOKEN_BYTES = 4
PRIOR = 8


@dataclass
class State:
    """A kept state: its serial number, its reason, its number of uses, and the age of the index at its last use."""

    birth: int
    reason: str
    uses: float
    age: float


class CheckpointIndex:
    """The kept states by (salt, tokens before the state).

    >>> index = CheckpointIndex(state_bytes=1000, budget_bytes=10_000)
    >>> index.admit(range(480), 480, "branch"), index.find([*range(480), 7], limit=480)
    (True, 480)
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
        self.state_bytes = state_bytes
        self.budget_bytes = budget_bytes
        self.grid, self.spacing, self.align = grid, spacing, align
        self.reset()

    def reset(self) -> None:
        """Forget all states and counts."""
        self.states: dict[tuple[Any, tuple[int, ...]], State] = {}
        self.saved = {"branch": 0, "end": 0, "grid": 0}
        self.used = {"branch": 0, "end": 0, "grid": 0}
        self.age = 0.0

    @property
    def num_states(self) -> int:
        """Number of kept states."""
        return len(self.states)

    @property
    def used_bytes(self) -> int:
        """Bytes of the states and of the tokens of all prefixes. Shared blocks count once."""
        return len(self.states) * self.state_bytes + len(self._prefixes()) * self.align * TOKEN_BYTES

    def find(self, tokens: Any, limit: int | None = None, *, cache_salt: Any = None) -> int | None:
        """Return the length of the longest kept prefix, and count a use of its state."""
        row = tuple(tokens)
        most = len(row) - 1 if limit is None else min(limit, len(row) - 1)
        length = self._longest(cache_salt, row[: max(0, most)])
        if not length:
            return None
        state = self.states[cache_salt, row[:length]]
        state.uses += 1
        state.age = self.age
        self.used[state.reason] += 1
        return length

    def stops(self, tokens: Any, kv_tokens: int, begin: int = 0, *, cache_salt: Any = None) -> list[tuple[int, str]]:
        """Return the positions to save: where the prompt differs from earlier prompts, and the grid after that.

        Two stops are at least `spacing` tokens apart.
        """
        row = tuple(tokens)
        last = len(row) - 1
        known = min(kv_tokens, last)
        prefixes = self._prefixes()
        same = max((end for end in range(len(row) + 1) if (cache_salt, row[:end]) in prefixes), default=0)
        wanted = {place - place % self.align: "branch" for place in (min(same, last), known) if place > 0}
        for place in range(self.grid, last + 1, self.grid) if self.grid else ():
            if place > max(known, begin):
                wanted.setdefault(place - place % self.align, "grid")
        if self.prompt_ends:
            wanted.setdefault(last - last % self.align, "end")
        taken = self._longest(cache_salt, row)
        stops: list[tuple[int, str]] = []
        for place, reason in sorted(wanted.items()):
            if place <= begin or taken <= place < taken + self.spacing:
                continue
            if stops and place < stops[-1][0] + self.spacing:
                if reason == "grid" or stops[-1][1] == "branch":
                    continue
                stops.pop()
            stops.append((place, reason))
        return stops

    def admit(self, tokens: Any, position: int, reason: str, *, cache_salt: Any = None) -> bool:
        """Keep a state. Drops states with a lower priority to make room. Returns false if the state was not kept."""
        row = tuple(tokens)[:position]
        uses = (self.used[reason] + PRIOR) / (self.saved[reason] + PRIOR)
        while True:
            begin = self._longest(cache_salt, row)
            if begin and position - begin < self.spacing:
                return False
            known = self._prefixes()
            new = sum((cache_salt, row[:end]) not in known for end in range(self.align, position + 1, self.align))
            size = self.state_bytes + new * self.align * TOKEN_BYTES
            if self.budget_bytes is None or self.used_bytes + size <= self.budget_bytes:
                self.states[cache_salt, row] = State(sum(self.saved.values()), reason, uses, self.age)
                self.saved[reason] += 1
                return True
            priority = self.age + self._value(uses, position - begin)
            least = min(self.states, key=lambda key: (self.priority(key), self.states[key].birth), default=None)
            if least is None or self.priority(least) >= priority:
                self.age = max(self.age, priority)
                return False
            self.age = self.priority(least)
            del self.states[least]

    def priority(self, key: tuple[Any, tuple[int, ...]]) -> float:
        """Return the value per byte of a state, plus the age at its last use."""
        (salt, row), state = key, self.states[key]
        return state.age + self._value(state.uses, len(row) - self._longest(salt, row[:-1]))

    def _value(self, uses: float, saves: int) -> float:
        return uses * saves / (self.state_bytes + saves * TOKEN_BYTES)

    def _longest(self, salt: Any, row: tuple[int, ...]) -> int:
        return max((end for end in range(len(row) + 1) if (salt, row[:end]) in self.states), default=0)

    def _prefixes(self) -> set[tuple[Any, tuple[int, ...]]]:
        size = self.align
        return {(salt, row[:end]) for salt, row in self.states for end in range(size, len(row) + 1, size)}


class StateCheckpoints:
    """Copies of the states of `pool` at the positions in the index."""

    def __init__(self, layout: Any, pool: Any, budget_bytes: int, **options: Any) -> None:
        self._pool = pool
        self._views = [pool.view(layer, name) for layer, states in enumerate(layout.layers) for name in states]
        self.index = CheckpointIndex(sum(view[:1].nbytes for view in self._views), budget_bytes, **options)
        self._copies: dict[tuple[Any, tuple[int, ...]], list[Any]] = {}
        self._followed: tuple[Any, int] | None = None

    def follow(self, cache: Any) -> None:
        """Forget all states if `cache` has forgotten blocks since the last call, or is another cache."""
        followed, self._followed = self._followed, (cache, cache.epoch)
        if followed is not None and (followed[0] is not cache or followed[1] != cache.epoch):
            self.index.reset()
            self._copies.clear()

    def resume(self, slot: int, tokens: Any, kv_tokens: int, *, cache_salt: Any = None) -> int:
        """Copy the state of the longest kept prefix within `kv_tokens` to the slot; return its length, or 0."""
        length = self.index.find(tokens, kv_tokens, cache_salt=cache_salt) or 0
        if length:
            for view, copy in zip(self._views, self._copies[cache_salt, tuple(tokens)[:length]], strict=True):
                view[slot] = copy
            lent = self._pool.slot(slot)
            lent.state.step_position = lent.position = length
        return length

    def stops(self, tokens: Any, kv_tokens: int, begin: int = 0, *, cache_salt: Any = None) -> list[tuple[int, str]]:
        """Return the positions of this prompt at which the state should be saved."""
        return self.index.stops(tokens, kv_tokens, begin, cache_salt=cache_salt)

    def save(self, slot: int, tokens: Any, position: int, reason: str, *, cache_salt: Any = None) -> bool:
        """Copy the state in `slot`, which is the state after `tokens[:position]`. Returns false if it is not kept."""
        kept = self.index.admit(tokens, position, reason, cache_salt=cache_salt)
        if kept:
            self._copies[cache_salt, tuple(tokens)[:position]] = [view[slot].copy() for view in self._views]
        self._copies = {key: copy for key, copy in self._copies.items() if key in self.index.states}
        return kept
