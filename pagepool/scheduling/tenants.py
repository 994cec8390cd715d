"""Tenants: the tokens served to each one, and their quotas of blocks."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any

from pagepool.config import SchedulerConfig, Tenant
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.block_manager import BlockManager
from pagepool.scheduling.request import Sequence

__all__ = ["Tenants"]

# Cost of a prompt token and of a generated token.
PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
ANYONE = Tenant()
SPARE = 1024  # number of counters of absent tenants that triggers a sweep


class Tenants:
    """The virtual token counter and the quota of every tenant.

    Invariants: `_live[t]` is the number of requests of t that wait or are active. `_held[t]` is the number of blocks
    that the admitted requests of t may ever need together, at most its `max_blocks`. A preempted sequence keeps its
    part of the quota, so it can always be admitted again.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._limits = config.tenants
        self._charges = config.policy == "fair"
        self._blocks_for = blocks.blocks_for
        self._live: Counter[Any] = Counter()
        self._held: Counter[Any] = Counter()
        self._served: dict[Any, float] = {}
        self._idle_at = 0.0  # counter of the last tenant that became idle

    def count(self, seq: Sequence) -> None:
        """Count a request that waits or is active, for `summary`."""
        self._live[seq.tenant] += 1
        if seq._counted:
            self._held[seq.tenant] += self._blocks_for(seq.max_tokens)

    def refusal(self, tenant: Any, max_tokens: int) -> str | None:
        """Return the reason why a request of `max_tokens` can never run under the quota of `tenant`, or None."""
        needed, (_, quota) = self._blocks_for(max_tokens), self.quota(tenant)
        if needed <= quota:
            return None
        return f"{max_tokens} tokens need {needed} blocks, the quota of tenant {tenant!r} is {quota}"

    def quota(self, tenant: Any) -> tuple[int, float]:
        """Return the blocks that the admitted requests of `tenant` may ever need, and its quota (inf: no limit)."""
        quota = self._limits.get(tenant, ANYONE).max_blocks
        return self._held[tenant], inf if quota is None else quota

    def arrive(self, seq: Sequence) -> None:
        """Count a new request. The counter of an idle tenant is raised to the least counter of the busy tenants."""
        tenant = seq.tenant
        if not self._live[tenant]:
            busy = [self._served[other] for other, count in self._live.items() if count]
            least = min(busy) if busy else self._idle_at
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._live[tenant] += 1

    def start(self, seq: Sequence) -> None:
        """Count a request that was admitted, perhaps again."""
        if not seq._counted:
            seq._counted = True
            self._held[seq.tenant] += self._blocks_for(seq.max_tokens)

    def leave(self, seq: Sequence) -> None:
        """Count a request that has ended."""
        tenant = seq.tenant
        if seq._counted:
            self._held[tenant] -= self._blocks_for(seq.max_tokens)
        self._live[tenant] -= 1
        if not self._live[tenant]:
            self._idle_at = self._served[tenant]
            del self._live[tenant], self._held[tenant]
            if len(self._served) > 2 * len(self._live) + SPARE:
                self._sweep()

    def may_start(self, seq: Sequence) -> bool:
        """Return true if the quota of its tenant has room for all blocks that `seq` may need."""
        if seq._counted:
            return True
        held, quota = self.quota(seq.tenant)
        return held + self._blocks_for(seq.max_tokens) <= quota

    def served(self, tenant: Any) -> float:
        """Return the counter of a tenant."""
        return self._served.get(tenant, 0.0)

    def charge(self, batch: ScheduledBatch, sign: int = 1) -> None:
        """Count the tokens of a step, under the policy "fair". `sign` -1 subtracts them."""
        if not self._charges:
            return
        for row, seq in enumerate(batch._sequences):
            weight = sign * (OUTPUT_WEIGHT if row < batch.num_decodes else PROMPT_WEIGHT)
            self._charge(seq, weight * len(batch.tokens[row]))

    def charge_drafts(self, seq: Sequence, count: int) -> None:
        """Count `count` accepted drafts."""
        if self._charges:
            self._charge(seq, OUTPUT_WEIGHT * count)

    def _charge(self, seq: Sequence, amount: float) -> None:
        if seq.tenant in self._served:  # the counter of a tenant that has left may have been removed
            self._served[seq.tenant] += amount / self._limits.get(seq.tenant, ANYONE).weight

    def summary(self) -> dict[str, Any]:
        """Return the values that `Scheduler.check` compares with counts from the sequences."""
        return {"live requests of tenants": +self._live, "blocks held by tenants": +self._held}

    def _sweep(self) -> None:
        """Remove counters of absent tenants that would get the same value again on their return."""
        least = min((self._served[tenant] for tenant in self._live), default=self._idle_at)
        self._served = {
            tenant: served for tenant, served in self._served.items() if tenant in self._live or served > least
        }
