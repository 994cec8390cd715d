"""Progress of a replay on stderr: a bar on a terminal with rich, otherwise a line every two seconds."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

from pagepool.replay.driver import Replay

__all__ = ["Progress"]

LINE_SECONDS = 2.0
BAR_SECONDS = 0.1


class Progress:
    """A context manager that shows how many of `total` requests are done. `total` counts the requests of all passes.

    Call it with the replay after each step, or call `update`. A replay of less than two seconds prints no line.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar = _bar(total) if sys.stderr.isatty() else None
        self._next = 0.0 if self._bar else monotonic() + LINE_SECONDS

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, replay: Replay) -> None:
        """Show the state of `replay` after a step."""
        if monotonic() < self._next:
            return
        allocator, scheduler, totals = replay.block_manager.allocator, replay.scheduler, replay.totals
        state = (
            f"{scheduler.active_count} running, {scheduler.waiting_count} waiting, "
            f"{allocator.in_use}/{allocator.capacity} blocks"
        )
        if not self._bar:
            state += f", {totals.time_us / 1e6:.0f} s virtual"
        self.update(totals.finished + totals.refused, state)

    def update(self, done: int, state: str) -> None:
        """Show the number of finished requests and `state`. Does nothing if the last update was very recent."""
        now = monotonic()
        if now < self._next:
            return
        if self._bar:
            self._next = now + BAR_SECONDS
            self._bar.update(self._bar.task_ids[0], completed=done, state=state)
        else:
            self._next = now + LINE_SECONDS
            print(f"pagepool: {done} of {self._total} requests, {state}", file=sys.stderr, flush=True)


def _bar(total: int) -> Any:
    """Return a progress bar of rich with one task, or None if rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    bar = Progress(
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task("replay", total=total, state="")
    return bar
