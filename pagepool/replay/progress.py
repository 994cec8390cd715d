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
    """A context manager to call with the replay after each step, or to `tell`; `total` is the number of requests, over
    all passes where there are several."""
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


def _ended(replay: Replay) -> int:
    return replay.totals.finished + replay.totals.refused


class PlainProgress(AbstractContextManager["PlainProgress"]):
    """One line every two seconds; a short replay prints none."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._next = monotonic() + LINE_SECONDS

    def __call__(self, replay: Replay) -> None:
        """The replay, after a step."""
        if monotonic() >= self._next:
            virtual = f"{replay.totals.time_us / 1e6:.0f} s virtual"
            self.tell(_ended(replay), f"{_state(replay)}, {virtual}")

    def tell(self, done: int, state: str) -> None:
        """How many requests are done, and what else there is to say."""
        now = monotonic()
        if now >= self._next:
            self._next = now + LINE_SECONDS
            print(f"pagepool: {done} of {self._total} requests, {state}", file=sys.stderr, flush=True)

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
        """The replay, after a step."""
        if monotonic() >= self._next:
            self.tell(_ended(replay), _state(replay))

    def tell(self, done: int, state: str) -> None:
        """How many requests are done, and what else there is to say."""
        now = monotonic()
        if now >= self._next:
            self._next = now + BAR_SECONDS
            self._bar.update(self._task, completed=done, state=state)

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
