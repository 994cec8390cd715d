"""Floors of tenants: what nobody takes from them, running or cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagepool.config import Tenant
from pagepool.scheduling.blocks import BlockAccount, NoBlocks
from pagepool.scheduling.request import SeqState, Sequence
from pagepool.scheduling.reuse import check_has

__all__ = ["TenantFloors"]

MOST_TENANTS = 254  # groups of a prefix cache, beside nobody's


class TenantFloors:
    """The blocks of the tenants that have a floor. For each tenant t of those:

        holding(t) = cached(t) + outside(t)
        cached(t)  = blocks that a request of t gave to the prefix cache, in use or not
        outside(t) = blocks of t's sequences, active or preempted, that are not in the cache, each once

    No block of t's is evicted, and none of its sequences gives way, for others while holding(t) is no more than its
    floor. That can be kept since the floors together fit into the pool, and no request is accepted that needs more than
    the floors of the others leave. Only a sequence that is in part above the floor and cannot give a part goes below.
    """

    def __init__(self, tenants: Mapping[Any, Tenant], account: BlockAccount | NoBlocks) -> None:
        self._account = account
        self._floors = {tenant: limit.min_blocks for tenant, limit in tenants.items() if limit.min_blocks}
        if isinstance(account, NoBlocks):
            self._floors = {}
        total = sum(self._floors.values())
        if total > account.capacity:
            raise ValueError(f"the floors of the tenants add up to {total} blocks, the pool has {account.capacity}")
        if len(self._floors) > MOST_TENANTS:
            raise ValueError(f"{len(self._floors)} tenants have floors, at most {MOST_TENANTS} can")
        self._total = total
        self._groups = {tenant: number for number, tenant in enumerate(self._floors, 1)}
        self._sequences: dict[Any, dict[int, Sequence]] = {tenant: {} for tenant in self._floors}
        if self._floors and isinstance(account, BlockAccount):
            account.floors = self
            if account.cache is not None:
                check_has(account.cache, ("floors", "count_outside"))

    def __bool__(self) -> bool:
        return bool(self._floors)

    def group(self, tenant: Any) -> int:
        """The number of a tenant in the prefix cache; 0 for those without a floor."""
        return self._groups.get(tenant, 0)

    def refusal(self, tenant: Any, max_tokens: int) -> str | None:
        """Why a request of `max_tokens` could wait for ever for blocks that others are left, or None."""
        left = self._account.capacity - self._total + self._floors.get(tenant, 0)
        needed = self._account.blocks_for(max_tokens)
        if not self._floors or needed <= left:
            return None
        return f"{max_tokens} tokens need {needed} blocks, the floors of other tenants leave {left}"

    def enter(self, seq: Sequence) -> None:
        """`seq` may hold blocks from now on."""
        if seq.tenant in self._sequences:
            self._sequences[seq.tenant][seq.id] = seq

    def leave(self, seq: Sequence) -> None:
        """`seq` has ended."""
        if seq.tenant in self._sequences:
            self._sequences[seq.tenant].pop(seq.id, None)

    def rebuild(self, alive: list[Sequence]) -> None:
        """Of `alive`, all that wait or are active, those count that may hold blocks, whatever was counted."""
        for tenant, sequences in self._sequences.items():
            found = {seq.id: seq for seq in alive if seq.tenant == tenant and self._may_hold(seq)}
            sequences.clear()
            sequences.update(found)

    def audit(self, alive: list[Sequence]) -> str | None:
        """The first equation that does not hold, block by block, or None."""
        cache: Any = self._account.cache
        for tenant, floor in self._floors.items():
            own = [seq for seq in alive if seq.tenant == tenant and self._may_hold(seq)]
            if self._sequences[tenant] != {seq.id: seq for seq in own}:
                return f"{len(own)} sequences of tenant {tenant!r} may hold blocks, not {len(self._sequences[tenant])}"
            blocks = {block for seq in own if seq.kv is not None for block in seq.kv.blocks}
            outside = sum(cache is None or not cache.holds(block) for block in blocks)
            holding = outside + (0 if cache is None else cache.floors.cached(self._groups[tenant]))
            if self.above(tenant) != holding - floor:
                return f"tenant {tenant!r} has {holding} blocks, {self.above(tenant)} above its floor of {floor}"
        return None

    @staticmethod
    def _may_hold(seq: Sequence) -> bool:
        return seq.kv is not None or seq.state is not SeqState.WAITING

    def above(self, tenant: Any) -> int | None:
        """By how many blocks a tenant is above its floor, or how many it is below, as a negative number; None without
        a floor."""
        floor = self._floors.get(tenant)
        if floor is None:
            return None
        cache = self._account.cache
        cached = 0 if cache is None else cache.floors.cached(self._groups[tenant])
        return int(cached) + self._outside(tenant) - floor

    def protected(self, needs: Mapping[int, int]) -> int:
        """Evictable blocks that a step cannot have which needs `needs[group]` blocks for each group."""
        floors = self._tell()
        return sum(
            max(0, floors.spared(group) - needs.get(group, 0)) for group in (self._groups.values() if floors else ())
        )

    def evict(self, missing: int, needs: Mapping[int, int]) -> int:
        """Evict up to `missing` blocks for such a step: what nobody is left goes first, then each group's own."""
        self._tell()
        cache: Any = self._account.cache
        evicted: int = cache.evict(missing)
        for group, needed in needs.items():
            if group and evicted < missing:
                evicted += cache.evict(min(needed, missing - evicted), group=group)
        return evicted

    def _tell(self) -> Any:
        """Give the cache the floors less what is outside of it; returns its `floors`, None without a cache."""
        if self._account.cache is None:
            return None
        floors = self._account.cache.floors
        for tenant, group in self._groups.items():
            floors.set(group, max(0, self._floors[tenant] - self._outside(tenant)))
        return floors

    def _outside(self, tenant: Any) -> int:
        states = [seq.kv for seq in self._sequences[tenant].values() if seq.kv is not None]
        cache: Any = self._account.cache
        if cache is None:  # then no two of them share a block
            return sum([self._account.blocks_for(state.len) for state in states])
        return int(cache.count_outside(states))
