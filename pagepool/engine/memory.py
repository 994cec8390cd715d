"""An engine's memory: its invariants between two steps, and its size in tokens."""

from __future__ import annotations

from typing import Any

from pagepool.errors import PoolError

__all__ = ["check_memory", "pool_tokens", "present"]


def check_memory(runner: Any, prefix_cache: Any, *, is_idle: bool) -> None:
    """Check the invariants of the prefix cache, the checkpoints and the pools.

    Parameters
    ----------
    runner : ModelRunner
        Or an object with its methods.
    prefix_cache : PrefixCache or None
        The cache over the runner's pools.
    is_idle : bool
        No request is left. Then the prefix cache must own every block in use, and no state may be in use.

    Raises
    ------
    PoolError
        If an invariant is broken. The message names it.
    """
    cached = 0
    if prefix_cache is not None:
        prefix_cache.check()
        cached = prefix_cache.num_cached
    for pool in runner.pools:
        pool.allocator.check()
        if is_idle and pool.shared is None and pool.allocator.in_use != cached:
            raise PoolError(f"no request is left, but {pool.allocator.in_use} blocks are in use; {cached} are cached")
    checkpoints = getattr(runner, "checkpoints", None)
    if checkpoints is not None:
        checkpoints.check()
    if is_idle and runner.states is not None and runner.states.used_count:
        raise PoolError(f"no request is left, but {runner.states.used_count} states are in use")


def pool_tokens(runner: Any) -> int | None:
    """Return the maximum length in tokens of one sequence in the pools of a `ModelRunner`; None without pages."""
    if not runner.pools:
        return None
    pool = runner.pools[0]
    tokens: int = pool.allocator.max_capacity * pool.block_size // len(runner.pools)
    return tokens


def present(named: dict[str, Any]) -> dict[str, Any]:
    """Return the entries with a value other than None.

    >>> present({"kv": 1, "states": None})
    {'kv': 1}
    """
    return {name: value for name, value in named.items() if value is not None}
