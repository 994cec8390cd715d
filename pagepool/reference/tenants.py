"""Token counters and quotas of tenants, in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from pagepool.config import SchedulerConfig, Tenant
from pagepool.reference.request import Batch, Request

__all__ = ["Tenants"]


class Tenants:
    """Token counters and quotas of tenants. `requests` returns all requests that have not ended."""

    def __init__(
        self, config: SchedulerConfig, blocks_for: Callable[[int], int], requests: Callable[[], Iterable[Request]]
    ) -> None:
        self._limits = config.tenants
        self._blocks_for = blocks_for
        self.requests = requests
        self._counters: dict[Any, float] = {}
        self._idle_at = 0.0

    def limit(self, tenant: Any) -> Tenant:
        """Return the limits of a tenant in the config."""
        return self._limits.get(tenant, Tenant())

    def served(self, tenant: Any) -> float:
        """Return the served tokens over the tenant's weight. An output token counts as two prompt tokens."""
        return self._counters.get(tenant, 0.0)

    def arrive(self, request: Request) -> None:
        """Note a new request, before it is in `requests`. An idle tenant's counter is raised to the least busy one."""
        live = Counter(other.tenant for other in self.requests())
        if not live[request.tenant]:
            least = min((self._counters[tenant] for tenant in live), default=self._idle_at)
            self._counters[request.tenant] = max(self.served(request.tenant), least)

    def leave(self, request: Request) -> None:
        """Note a request that has ended."""
        if all(other.tenant != request.tenant for other in self.requests()):
            self._idle_at = self._counters[request.tenant]

    def charge(self, batch: Batch, sign: int = 1) -> None:
        """Count the tokens of a step. `sign` -1 subtracts them."""
        for request, tokens, is_prefill in zip(batch.requests, batch.tokens, batch.is_prefill, strict=True):
            weight = sign * (1 if is_prefill else 2) / self.limit(request.tenant).weight
            self._counters[request.tenant] += weight * len(tokens)

    def may_start(self, request: Request) -> bool:
        """Return true if the quota has room. A preempted request is still counted, so it may always start."""
        return request.counted or self.has_room(request.tenant, self._blocks_for(request.max_tokens))

    def has_room(self, tenant: Any, needed: int) -> bool:
        """Return true if the quota has room for `needed` more blocks."""
        quota = self.limit(tenant).max_blocks
        counted = [other for other in self.requests() if other.tenant == tenant and other.counted]
        return quota is None or sum(self._blocks_for(other.max_tokens) for other in counted) + needed <= quota
