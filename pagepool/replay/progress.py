"""How far the replay is, on stderr: a bar with rich on a terminal, now and then a plain line otherwise."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

from pagepool.replay.driver import Replay

__all__ = ["progress"]

LINE_SECONDS = 2.0
BAR_SECONDS = 0.1


def progress(total: int) -> PlainProgress | RichProgress:
    """A context manager to call with the replay after each step; `total` is the number of requests."""
    if sys.stderr.isatty():
        try:
            return RichProgress(total)
        except ImportError:
            pass  # rich is optional; the plain lines say the same
    return PlainProgress(total)


def _state(replay: Replay) -> str:
    allocator, scheduler = replay.account.allocator, replay.scheduler
    return (
        f"{scheduler.active_count} running, {scheduler.waiting_count} waiting, "
        f"{allocator.in_use}/{allocator.capacity} blocks"
    )


class PlainProgress(AbstractContextManager["PlainProgress"]):
    """One line every two seconds; a short replay prints none."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._next = monotonic() + LINE_SECONDS

    def __call__(self, replay: Replay) -> None:
        now = monotonic()
        if now >= self._next:
            self._next = now + LINE_SECONDS
            ended = replay.totals.finished + replay.totals.refused
            virtual = f"{replay.totals.time_us / 1e6:.0f} s virtual"
            line = f"pagepool: {ended} of {self._total} requests, {_state(replay)}, {virtual}"
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        return None


class RichProgress(AbstractContextManager["RichProgress"]):
    """A bar over the requests that have ended. Raises ImportError where rich is missing."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar: Any = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("replay", total=total, state="")
        self._next = 0.0

    def __enter__(self) -> RichProgress:
        self._bar.start()
        return self

    def __call__(self, replay: Replay) -> None:
        now = monotonic()
        if now >= self._next:
            self._next = now + BAR_SECONDS
            ended = replay.totals.finished + replay.totals.refused
            self._bar.update(self._task, completed=ended, state=_state(replay))

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
