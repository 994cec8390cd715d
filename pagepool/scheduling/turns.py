"""Turns: whose turn it is among many lines, without asking those again for whom nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from pagepool.scheduling.request import Sequence

__all__ = ["Turns"]

# Below this many entries that no longer count a sweep is not worth its pass.
SWEEP_FROM = 64


class Turns:
    """The best candidate of every tenant, the least key first. Keys may grow, and only grow, by themselves; of all else
    `changed` is told. The first then costs O(log tenants) amortised for each change and each time that a key on top has
    grown; tenants that just wait cost nothing.

    Invariants: `_changed` holds all tenants of whom something has changed. Of any other whose candidates may start, the
    best has its entry in `_entries` and in `_heap`, with the key that it had; any entry of `_heap` that is not one of
    `_entries` counts no more. Whatever raises, an entry that is wrong is one of a tenant in `_changed`.

    candidates(tenant)  the first of its line
    """

    def __init__(self, candidates: Callable[[Any], list[Sequence]]) -> None:
        self._candidates = candidates
        self._heap: list[tuple[Any, int, Sequence]] = []
        self._entries: dict[Any, tuple[Any, int, Sequence]] = {}
        self._changed: dict[Any, None] = {}
        self._made = 0  # entries, so that equal keys are told apart

    def changed(self, tenant: Any) -> None:
        """Its line is another, or who of it may start, or a key has fallen."""
        self._changed[tenant] = None

    def forget(self, tenant: Any) -> None:
        """It has no line any more: neither its name nor its requests are kept until somebody asks who is first."""
        self._entries.pop(tenant, None)
        self._changed.pop(tenant, None)
        self._sweep()

    def first(
        self,
        key: Callable[[Sequence], Any],
        may_start: Callable[[Sequence], bool],
        exact: Callable[[Sequence], Any] | None = None,
    ) -> Sequence | None:
        """The one with the least key of all candidates that may start, or None. With `exact` it is that by which they
        go; `key` is no more than that, and after `exact` was asked the same."""
        while True:
            self._look(key, may_start)
            if not self._heap:
                return None
            entry = self._heap[0]
            seq = entry[-1]
            if self._entries.get(seq.tenant) is not entry:
                heappop(self._heap)
            elif (exact or key)(seq) == entry[0]:
                return seq
            else:
                self.changed(seq.tenant)

    def _look(self, key: Callable[[Sequence], Any], may_start: Callable[[Sequence], bool]) -> None:
        """At all tenants of whom something has changed."""
        while self._changed:
            tenant = next(reversed(self._changed))
            entries = [(key(seq), self._made, seq) for seq in self._candidates(tenant) if may_start(seq)]
            if entries:
                self._made += 1
                entry = entries[0] if len(entries) == 1 else min(entries)
                heappush(self._heap, entry)
                self._entries[tenant] = entry
            else:
                self._entries.pop(tenant, None)
            self._changed.popitem()  # that one; its place is gone, too, which `del` would leave to be passed over
        self._sweep()

    def _sweep(self) -> None:
        """Once most entries of the heap count no more."""
        if len(self._heap) > 2 * len(self._entries) + SWEEP_FROM:
            heap = list(self._entries.values())
            heapify(heap)
            self._heap = heap
