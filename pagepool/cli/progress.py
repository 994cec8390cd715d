"""Progress of a replay on stderr: a line every two seconds."""

from __future__ import annotations

import sys
from time import monotonic

from pagepool.replay.driver import Replay

__all__ = ["Progress"]

LINE_SECONDS = 2.0


class Progress:
    """Prints how many of `total` requests are done. `total` counts the requests of all passes.

    Call it with the replay after each step, or call `update`. A replay of less than two seconds prints no line.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._next = monotonic() + LINE_SECONDS

    def __call__(self, replay: Replay) -> None:
        """Show the state of `replay` after a step."""
        if monotonic() < self._next:
            return
        allocator, scheduler, totals = replay.block_manager.allocator, replay.scheduler, replay.totals
        self.update(
            totals.finished + totals.refused,
            f"{scheduler.active_count} running, {scheduler.waiting_count} waiting, "
            f"{allocator.in_use}/{allocator.capacity} blocks, {totals.time_us / 1e6:.0f} s virtual",
        )

    def update(self, done: int, state: str) -> None:
        """Show the number of finished requests and `state`. Does nothing if the last line was printed just now."""
        now = monotonic()
        if now >= self._next:
            self._next = now + LINE_SECONDS
            print(f"pagepool: {done} of {self._total} requests, {state}", file=sys.stderr, flush=True)
