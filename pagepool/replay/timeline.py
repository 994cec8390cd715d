"""What a replay looked like over its virtual time, in a bounded number of windows: what pictures are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagepool.replay.driver import Replay

__all__ = ["Timeline", "Window"]

MOST_WINDOWS = 480
MOST_ROWS = 96
MOST_BLOCKS = 6_144  # that are looked at for one column of the map


@dataclass
class Window:
    """Some steps that follow one another. Times are virtual microseconds; the rest is as at the end of the window."""

    begin: int
    end: int = 0
    steps: int = 0
    busy: int = 0  # microseconds of its steps; the others are idle
    longest: int = 0  # of its steps
    prefill_tokens: int = 0
    decode_tokens: int = 0
    running: int = 0
    waiting: int = 0
    in_use: int = 0
    cached_only: int = 0  # of these, blocks that only the prefix cache has
    held_tokens: int = 0
    preemptions: int = 0
    ttft: list[int] = field(default_factory=list)
    column: bytes = b""  # of the map: a byte for each row, the share of its blocks in use

    def join(self, later: Window) -> None:
        """Becomes both."""
        self.steps += later.steps
        self.busy += later.busy
        self.longest = max(self.longest, later.longest)
        self.prefill_tokens += later.prefill_tokens
        self.decode_tokens += later.decode_tokens
        self.ttft += later.ttft
        for name in ("end", "running", "waiting", "in_use", "cached_only", "held_tokens", "preemptions", "column"):
            setattr(self, name, getattr(later, name))


class Timeline:
    """Call it with the replay after each step. It keeps at most MOST_WINDOWS windows of as many steps each: whenever
    they are full, two become one and from then on each takes twice as many."""

    def __init__(self, capacity: int) -> None:
        self.windows: list[Window] = []
        self.capacity = capacity
        self.rows = min(MOST_ROWS, capacity)
        self._steps = 1
        self._seen = (0, 0)  # prefill and decode tokens before the step
        self._window = Window(0)
        # Blocks of each row, evenly picked where there are too many to look at all of them.
        pick = max(1, -(-capacity // MOST_BLOCKS))
        self._blocks = [
            range(capacity * row // self.rows, capacity * (row + 1) // self.rows, pick) for row in range(self.rows)
        ]

    def __call__(self, replay: Replay) -> None:
        totals, window = replay.totals, self._window
        prefill, decode = self._seen
        cost = replay.last_step_us
        window.steps += 1
        window.busy += cost
        window.longest = max(window.longest, cost)
        window.prefill_tokens += totals.prefill_tokens - prefill
        window.decode_tokens += totals.decode_tokens - decode
        window.ttft += totals.latency.fresh
        self._seen = (totals.prefill_tokens, totals.decode_tokens)
        if window.steps >= self._steps:
            self.end(replay)

    def end(self, replay: Replay) -> None:
        """Closes the window at hand; call it once more when the replay has ended."""
        window, account, scheduler = self._window, replay.account, replay.scheduler
        if not window.steps:
            return
        window.end = replay.totals.time_us
        window.running, window.waiting = scheduler.active_count, scheduler.waiting_count
        window.in_use = account.allocator.in_use
        window.cached_only = 0 if replay.cache is None else replay.cache.evictable
        window.held_tokens = account.num_tokens
        window.preemptions = scheduler.num_preemptions
        window.column = self._column(account.allocator)
        self.windows.append(window)
        self._window = Window(window.end)
        if len(self.windows) >= MOST_WINDOWS:
            self._halve()

    def _halve(self) -> None:
        self._steps *= 2
        for first, second in zip(self.windows[::2], self.windows[1::2], strict=True):
            first.join(second)
        self.windows = self.windows[::2]

    def _column(self, allocator: Any) -> bytes:
        ref_count = allocator.ref_count
        shares = (sum([ref_count(block) > 0 for block in blocks]) / len(blocks) for blocks in self._blocks)
        return bytes(round(255 * share) for share in shares)
