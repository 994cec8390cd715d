"""The cost table of the pressure ladder: how it is measured, and how it chooses. Nothing is timed in passing."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Any

from pagepool.arguments import integer
from pagepool.config import PressureCosts
from pagepool.scheduling.swap import SwapFile

__all__ = ["calibrate", "cheaper_to_swap"]


def cheaper_to_swap(costs: PressureCosts, blocks: int, lost_tokens: int) -> bool:
    """Whether writing `blocks` to the swap file and back costs less than reading `lost_tokens` again.

    >>> cheaper_to_swap(PressureCosts(recompute_us_per_token=60, swap_us_per_block=500), 2, 32)
    True
    """
    return costs.swap_us_per_block is not None and (
        blocks * costs.swap_us_per_block < lost_tokens * costs.recompute_us_per_token
    )


def calibrate(
    swap: SwapFile | None = None, prefill: Callable[[int], Any] | None = None, *, tokens: int = 256, rounds: int = 5
) -> PressureCosts:
    """Measure a cost table on this machine, once, before serving; put it into `SchedulerConfig(costs=...)`.

    swap     the swap file of the scheduler: free blocks of its pool are written and read back; None: never swapped
    prefill  called with a number of tokens, reads a prompt of as many; None: the table's default cost of a token
    tokens   how many it is called with
    rounds   how often each is measured; the median counts

    The pages of free blocks are overwritten. Raises `PoolExhausted` when the pool has no free block, `SwapError` when
    the file cannot be used.
    """
    tokens, rounds = integer("tokens", tokens, low=1), integer("rounds", rounds, low=1)
    costs: dict[str, float] = {}
    if prefill is not None:
        prefill(tokens)  # the first call warms up
        costs["recompute_us_per_token"] = _median_us(lambda: prefill(tokens), rounds) / tokens
    if swap is not None:
        allocator = swap.pools[0].allocator
        blocks = allocator.allocate_n(max(1, min(16, swap.free_blocks, allocator.available)))
        try:
            swap.load(swap.store(blocks), blocks)
            costs["swap_us_per_block"] = _median_us(lambda: swap.load(swap.store(blocks), blocks), rounds) / len(blocks)
        finally:
            allocator.free(blocks)
    return PressureCosts(**costs)


def _median_us(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = perf_counter_ns()
        run()
        times.append(perf_counter_ns() - start)
    return median(times) / 1e3
