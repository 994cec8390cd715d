"""Tenants: what each was served, and how many blocks it may hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from pagepool.config import SchedulerConfig, Tenant
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.request import Sequence
from pagepool.scheduling.undo import Undo

__all__ = ["Tenants"]

# What a token costs a tenant: one that is read, one that is generated.
PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
ANYONE = Tenant()
SPARE = 1024  # counters of absent tenants that are kept before they are swept


class Tenants:
    """The virtual token counter and the quota of every tenant.

    Invariants: `_live[t]` is the number of t's requests that wait or are active; `_held[t]` is the sum, over those that
    have been admitted, of the blocks that they may ever need, and is at most t's `max_blocks`. A preempted sequence
    keeps its part of the quota, so that it can always come back.
    """

    def __init__(self, config: SchedulerConfig, blocks_for: Callable[[int], int]) -> None:
        self._limits = config.tenants
        self._blocks_for = blocks_for
        self._live: Counter[Any] = Counter()
        self._held: Counter[Any] = Counter()
        self._served: dict[Any, float] = {}
        self._idle_at = 0.0
        self.charges = config.policy == "fair"

    def refusal(self, tenant: Any, max_tokens: int) -> str | None:
        """Why a request of `max_tokens` can never run under the quota of `tenant`, or None."""
        quota = self._limits.get(tenant, ANYONE).max_blocks
        needed = self._blocks_for(max_tokens)
        if quota is None or needed <= quota:
            return None
        return f"{max_tokens} tokens need {needed} blocks, the quota of tenant {tenant!r} is {quota}"

    def arrive(self, seq: Sequence) -> None:
        """A request came. A tenant that had none begins no lower than the least of those that are busy."""
        tenant = seq.tenant
        if not self._live[tenant]:
            busy = [self._served[other] for other, count in self._live.items() if count]
            floor = min(busy) if busy else self._idle_at
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._live[tenant] += 1

    def keeps_out(self, seq: Sequence) -> bool:
        """Whether others of its tenant may wait for its part of the quota."""
        return seq._counted and self._limits.get(seq.tenant, ANYONE).max_blocks is not None

    def leave(self, seq: Sequence) -> None:
        """A request ended."""
        tenant = seq.tenant
        if seq._counted:
            self._held[tenant] -= self._blocks_for(seq.max_tokens)
        self._live[tenant] -= 1
        if not self._live[tenant]:
            self._idle_at = self._served[tenant]
            del self._live[tenant], self._held[tenant]
            if len(self._served) > 2 * len(self._live) + SPARE:
                self._sweep()

    def start(self, seq: Sequence) -> None:
        """A request was admitted, perhaps again."""
        if not seq._counted:
            # In this order: an interrupt in between must not make it count twice, which would keep others out for ever.
            seq._counted = True
            self._held[seq.tenant] += self._blocks_for(seq.max_tokens)

    def may_start(self, seq: Sequence) -> bool:
        """True when the quota of its tenant has room for all that `seq` may need."""
        quota = self._limits.get(seq.tenant, ANYONE).max_blocks
        if quota is None or seq._counted:
            return True
        return self._held[seq.tenant] + self._blocks_for(seq.max_tokens) <= quota

    def charge(self, batch: ScheduledBatch, undo: Undo) -> None:
        """Count the tokens of a step, the counters before noted in `undo`."""
        after: dict[Any, float] = {}
        for row, seq in enumerate(batch._sequences):
            tenant = seq.tenant
            weight = OUTPUT_WEIGHT if row < batch.num_decodes else PROMPT_WEIGHT
            share = self._limits.get(tenant, ANYONE).weight
            before = after[tenant] if tenant in after else self._served[tenant]
            after[tenant] = before + weight * len(batch.tokens[row]) / share
        undo.served = {tenant: self._served[tenant] for tenant in after}
        self._served.update(after)

    def take_back(self, served: dict[Any, float]) -> None:
        """These are the counters, as before a `charge`."""
        self._served.update(served)

    def rebuild(self, alive: list[Sequence]) -> None:
        """Count exactly `alive`, all that wait or are active, whatever was counted."""
        live, held = self._counts(alive)
        for tenant, count in self._live.items():
            if count and tenant not in live and tenant in self._served:
                self._idle_at = self._served[tenant]
        least = min((self._served[tenant] for tenant in live if tenant in self._served), default=self._idle_at)
        for tenant in live:
            self._served.setdefault(tenant, least)
        self._live, self._held = live, held

    def audit(self, alive: list[Sequence]) -> str | None:
        """The first equation that does not hold, or None."""
        live, held = self._counts(alive)
        if +self._live != live or +self._held != held:
            return f"tenants have {sum(live.values())} requests with {sum(held.values())} blocks, not " + (
                f"{sum(self._live.values())} with {sum(self._held.values())}"
            )
        if not live.keys() <= self._served.keys():
            return f"of {len(live)} tenants that wait or run, some have no counter"
        return None

    def _counts(self, alive: list[Sequence]) -> tuple[Counter[Any], Counter[Any]]:
        live = Counter([seq.tenant for seq in alive])
        held: Counter[Any] = Counter()
        for seq in alive:
            if seq._counted:
                held[seq.tenant] += self._blocks_for(seq.max_tokens)
        return live, +held

    def served(self, tenant: Any) -> float:
        """The counter of a tenant."""
        return self._served.get(tenant, 0.0)

    def _sweep(self) -> None:
        """Forget absent tenants whose counters say no more than what they would begin with."""
        floor = min((self._served[tenant] for tenant in self._live), default=self._idle_at)
        self._served = {
            tenant: served for tenant, served in self._served.items() if tenant in self._live or served > floor
        }
