"""How many workers there should be. Serve copies this module into its controller: it imports nothing of pagepool."""

from __future__ import annotations

from math import ceil
from typing import Any

__all__ = ["workers_for_load"]

TOKENS_PER_WORKER = 4096  # that wait to be computed


def workers_for_load(context: Any) -> tuple[int, dict[str, Any]]:
    """An autoscaling policy of Serve: so many workers that none has more than 4,096 tokens to compute.

    Parameters
    ----------
    context
        Serve's `AutoscalingContext`, with the `load` of `WorkerReplica.record_autoscaling_stats`.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> metrics = {"load": {"first": 9000.0, "second": 500.0}}
    >>> bounds = {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": 8}
    >>> workers_for_load(SimpleNamespace(aggregated_metrics=metrics, policy_state={}, **bounds))
    (3, {})
    """
    loads = (context.aggregated_metrics or {}).get("load", {})
    wanted = ceil(sum(loads.values()) / TOKENS_PER_WORKER)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(wanted, high)), context.policy_state
