"""Tenants: what each was served, how many blocks it may use, and how many are reserved for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pagepool.config import SchedulerConfig, Tenant
from pagepool.scheduling.batch import ScheduledBatch
from pagepool.scheduling.block_manager import BlockManager
from pagepool.scheduling.prefix_adapter import PrefixAdapter, check_has
from pagepool.scheduling.request import SeqState, Sequence

__all__ = ["Reservations", "Tenants"]

# What a token costs a tenant: one that is read, one that is generated.
PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
ANYONE = Tenant()
SPARE = 1024  # counters of absent tenants that are left before a sweep
MOST_TENANTS = 254  # groups of a prefix cache, beside that of all others


class Tenants:
    """The virtual token counter and the quota of every tenant.

    Invariants: `_live[t]` is the number of t's requests that wait or are active; `_held[t]` is the sum, over those that
    have been admitted, of the blocks that they may ever need, and is at most t's `max_blocks`. A preempted sequence
    keeps its part of the quota, so that it can always come back.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._limits = config.tenants
        self._blocks_for = blocks.blocks_for
        self._live: Counter[Any] = Counter()
        self._held: Counter[Any] = Counter()
        self._served: dict[Any, float] = {}
        self._idle_at = 0.0  # the counter of the last one that was left without requests

    def fill(self, alive: list[Sequence]) -> None:
        """Count `alive`, all requests that wait or are active."""
        self._live = Counter([seq.tenant for seq in alive])
        for seq in alive:
            if seq._counted:
                self._held[seq.tenant] += self._blocks_for(seq.max_tokens)

    def inherit(self, before: Tenants) -> None:
        """What each tenant was served goes on from there."""
        self._served, self._idle_at = before._served, before._idle_at
        for tenant in self._live:
            self._served.setdefault(tenant, self._idle_at)

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
            least = min(busy) if busy else self._idle_at
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._live[tenant] += 1

    def start(self, seq: Sequence) -> None:
        """A request was admitted, perhaps again."""
        if not seq._counted:
            seq._counted = True
            self._held[seq.tenant] += self._blocks_for(seq.max_tokens)

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

    def may_start(self, seq: Sequence) -> bool:
        """True when the quota of its tenant has room for all that `seq` may need."""
        quota = self._limits.get(seq.tenant, ANYONE).max_blocks
        if quota is None or seq._counted:
            return True
        return self._held[seq.tenant] + self._blocks_for(seq.max_tokens) <= quota

    def refuses_more(self, tenant: Any, needed: int) -> str | None:
        """Why running requests of `tenant` may not need `needed` blocks more, or None."""
        quota, held = self._limits.get(tenant, ANYONE).max_blocks, self._held[tenant]
        if quota is None or held + needed <= quota:
            return None
        return f"{needed} blocks beside {held} are above the quota of tenant {tenant!r}, {quota}"

    def served(self, tenant: Any) -> float:
        """The counter of a tenant."""
        return self._served.get(tenant, 0.0)

    def charge(self, batch: ScheduledBatch) -> None:
        """Count the tokens of a step; the batch notes the counters before, for a step that is taken back."""
        after: dict[Any, float] = {}
        for row, seq in enumerate(batch._sequences):
            tenant = seq.tenant
            weight = OUTPUT_WEIGHT if row < batch.num_decodes else PROMPT_WEIGHT
            before = after[tenant] if tenant in after else self._served[tenant]
            after[tenant] = before + weight * len(batch.tokens[row]) / self._limits.get(tenant, ANYONE).weight
        batch._served_before = {tenant: self._served[tenant] for tenant in after}
        self._served.update(after)

    def refund(self, batch: ScheduledBatch) -> None:
        """The counters are as before the `charge` of a step."""
        self._served.update(batch._served_before)

    def summary(self) -> dict[str, Any]:
        """What `Scheduler.check` compares with counts made anew from the sequences."""
        return {"live requests of tenants": +self._live, "blocks held by tenants": +self._held}

    def _sweep(self) -> None:
        """Forget absent tenants whose counters say no more than what they would begin with."""
        least = min((self._served[tenant] for tenant in self._live), default=self._idle_at)
        self._served = {
            tenant: served for tenant, served in self._served.items() if tenant in self._live or served > least
        }


class Reservations:
    """The blocks that are reserved for tenants: `Tenant.min_blocks`. For each tenant t that has some:

        holding(t) = cached(t) + outside(t)
        cached(t)  = blocks that a request of t gave to the prefix cache, in use or not
        outside(t) = blocks of t's sequences, active or preempted, that are not in the cache, each once

    No block of t's is evicted, and none of its sequences is preempted, for others while holding(t) is no more than its
    reservation. That can be promised since the reservations together fit into the pool, and no request is accepted that
    needs more than those of the others leave. Only a sequence that is in part above the reservation and cannot give a
    part goes below.
    """

    def __init__(self, tenants: Mapping[Any, Tenant], blocks: BlockManager, prefix: PrefixAdapter) -> None:
        self._blocks = blocks
        self._prefix = prefix
        self._reserved = {tenant: limit.min_blocks for tenant, limit in tenants.items() if limit.min_blocks}
        if blocks.allocator is None:
            self._reserved = {}
        self._total = sum(self._reserved.values())
        if self._total > blocks.capacity:
            raise ValueError(f"{self._total} blocks are reserved for tenants, the pool has {blocks.capacity}")
        if len(self._reserved) > MOST_TENANTS:
            raise ValueError(f"{len(self._reserved)} tenants have reservations, at most {MOST_TENANTS} can")
        self._groups = {tenant: number for number, tenant in enumerate(self._reserved, 1)}
        self._sequences: dict[Any, dict[int, Sequence]] = {tenant: {} for tenant in self._reserved}
        if self._reserved and prefix.cache is not None:
            check_has(prefix.cache, ("reservations", "count_outside"))

    def group(self, tenant: Any) -> int:
        """The number of a tenant in the prefix cache; 0 for those without a reservation."""
        return self._groups.get(tenant, 0)

    def refusal(self, tenant: Any, max_tokens: int) -> str | None:
        """Why a request of `max_tokens` could wait for ever for blocks that are reserved for others, or None."""
        left = self._blocks.capacity - self._total + self._reserved.get(tenant, 0)
        needed = self._blocks.blocks_for(max_tokens)
        if not self._reserved or needed <= left:
            return None
        return f"{max_tokens} tokens need {needed} blocks, what is reserved for other tenants leaves {left}"

    def enter(self, seq: Sequence) -> None:
        """`seq` may have blocks from now on."""
        if seq.tenant in self._sequences:
            self._sequences[seq.tenant][seq.id] = seq

    def leave(self, seq: Sequence) -> None:
        """`seq` has ended."""
        if seq.tenant in self._sequences:
            self._sequences[seq.tenant].pop(seq.id, None)

    def above(self, tenant: Any) -> int | None:
        """By how many blocks a tenant is above its reservation, or, as a negative number, below; None without one."""
        reserved = self._reserved.get(tenant)
        if reserved is None:
            return None
        return self._cached(tenant) + self._outside(tenant) - reserved

    def protected(self, needs: Mapping[Any, int]) -> int:
        """Evictable blocks that are not for a step which needs `needs[tenant]` blocks for each tenant."""
        if not self._reserved or self._prefix.cache is None:
            return 0
        self._reserve()
        protected = self._prefix.cache.reservations.protected
        return sum(max(0, protected(group) - needs.get(tenant, 0)) for tenant, group in self._groups.items())

    def evict(self, missing: int, needs: Mapping[Any, int]) -> int:
        """Evict up to `missing` blocks for such a step: first what is reserved for nobody, then each tenant's own."""
        cache = self._prefix.cache
        if cache is None:
            return 0
        self._reserve()
        evicted: int = cache.evict(missing)
        for tenant, needed in needs.items():
            if tenant in self._groups and evicted < missing:
                evicted += cache.evict(min(needed, missing - evicted), group=self._groups[tenant])
        return evicted

    def audit(self, alive: list[Sequence]) -> str | None:
        """The first equation that does not hold, block by block, or None."""
        cache = self._prefix.cache
        for tenant, reserved in self._reserved.items():
            own = {seq.id: seq for seq in alive if seq.tenant == tenant and seq.state is not SeqState.WAITING}
            if self._sequences[tenant] != own:
                return f"{len(own)} sequences of tenant {tenant!r} may have blocks, not {len(self._sequences[tenant])}"
            states = [seq.kv for seq in own.values() if seq.kv is not None]
            blocks = {block for state in states for block in self._blocks.blocks_of(state)}
            holding = self._cached(tenant) + sum(cache is None or not cache.holds(block) for block in blocks)
            if self.above(tenant) != holding - reserved:
                return (
                    f"tenant {tenant!r} has {holding} blocks, {self.above(tenant)} above its {reserved} reserved ones"
                )
        return None

    def _reserve(self) -> None:
        """The cache keeps what is reserved, less what is outside of it."""
        for tenant, group in self._groups.items():
            self._prefix.cache.reservations.set(group, max(0, self._reserved[tenant] - self._outside(tenant)))

    def _cached(self, tenant: Any) -> int:
        return 0 if self._prefix.cache is None else int(self._prefix.cache.reservations.cached(self._groups[tenant]))

    def _outside(self, tenant: Any) -> int:
        states = [seq.kv for seq in self._sequences[tenant].values() if seq.kv is not None]
        if self._prefix.cache is None:
            return len({block for state in states for block in self._blocks.blocks_of(state)})  # forks share some
        if self._blocks.memory is not None:
            states = [table for state in states for table in state.kv]
        return int(self._prefix.cache.count_outside(states))
