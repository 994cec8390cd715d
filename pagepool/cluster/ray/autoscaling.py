"""Autoscaling policy. Serve copies this module into its controller, so it must not import from pagepool."""

from __future__ import annotations

from math import ceil
from typing import Any

__all__ = ["workers_for_load"]

TOKENS_PER_WORKER = 4096  # tokens to compute per worker at which more workers are started


def workers_for_load(context: Any) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy for Serve: one worker for every 4,096 tokens to compute, rounded up.

    Parameters
    ----------
    context : AutoscalingContext
        Serve's context, with the `load` of `WorkerReplica.record_autoscaling_stats`.

    Returns
    -------
    tuple of (int, dict)
        Number of workers, within the bounds of `context`, and the unchanged policy state.

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
