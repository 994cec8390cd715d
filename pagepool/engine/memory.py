"""An engine's memory: what there is of it, the tokens that it has room for, and what holds between two steps."""

from __future__ import annotations

from typing import Any

from pagepool.errors import PoolError

__all__ = ["check_memory", "pool_tokens", "present"]


def check_memory(runner: Any, prefix_cache: Any, *, is_idle: bool) -> None:
    """Audit prefix cache, checkpoints and pools; raises `PoolError` that names what is wrong.

    runner        a `ModelRunner`, or an object with its methods
    prefix_cache  the cache over its pools, or None
    is_idle       whether no request is left. Then the prefix cache owns every block in use, and no state is in use
    """
    cached = 0
    if prefix_cache is not None:
        prefix_cache.check()
        cached = prefix_cache.num_cached
    for pool in runner.pools:
        pool.allocator.check()
        if is_idle and pool.allocator.in_use != cached:
            raise PoolError(f"{pool.allocator.in_use} blocks are in use without a request, {cached} are cached")
    checkpoints = getattr(runner, "checkpoints", None)
    if checkpoints is not None:
        checkpoints.check()
    if is_idle and runner.states is not None and runner.states.used_count:
        raise PoolError(f"{runner.states.used_count} states are in use without a request")


def pool_tokens(runner: Any) -> int | None:
    """The most tokens that a sequence has room for in the pools of a `ModelRunner`; None for a model without pages."""
    if not runner.pools:
        return None
    pool = runner.pools[0]
    tokens: int = pool.allocator.capacity * pool.block_size // len(runner.pools)
    return tokens


def present(named: dict[str, Any]) -> dict[str, Any]:
    """Without the names of what an engine does not have.

    >>> present({"kv": 1, "states": None})
    {'kv': 1}
    """
    return {name: value for name, value in named.items() if value is not None}
