"""The data of the picture of `--html`, and the HTML page that contains it as JSON.

`Timeline` collects the data in a bounded number of windows while a replay runs.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from pagepool.replay import report
from pagepool.replay.driver import Replay
from pagepool.replay.latency import percentile

__all__ = ["Timeline", "Window", "page", "replay_picture"]

TEMPLATE = Path(__file__).parent.parent / "data" / "replay.html"
MOST_WINDOWS = 480
MOST_ROWS = 96
MOST_BLOCKS = 6_144  # maximum number of sampled blocks for one column of the map


def page(picture: dict[str, Any]) -> str:
    """Return the picture as one HTML page that needs no other file and no network.

    The data is JSON in a script element. Each "<" is escaped, so no tag can begin in it.
    """
    data = json.dumps(picture, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    # Split the template before filling it in: the trace's name could contain a placeholder.
    head, _, rest = TEMPLATE.read_text(encoding="utf-8").partition("{{title}}")
    body, _, tail = rest.partition("{{data}}")
    return f"{head}{escape(picture['title'])}{body}{data}{tail}"


@dataclass
class Window:
    """Counts of successive steps. Times are virtual microseconds. Fields without a comment are values at the end."""

    begin: int
    end: int = 0
    steps: int = 0
    busy: int = 0  # microseconds of the steps; the rest of the window is idle
    longest: int = 0  # microseconds of the longest step
    prefill_tokens: int = 0  # sum over the steps
    decode_tokens: int = 0  # sum over the steps
    running: int = 0
    waiting: int = 0
    in_use: int = 0
    cached_only: int = 0  # blocks in use by the prefix cache alone
    held_tokens: int = 0
    preemptions: int = 0  # since the start of the replay
    ttft: list[int] = field(default_factory=list)
    column: bytes = b""  # a column of the map: one byte per row, the share of its blocks in use

    def join(self, later: Window) -> None:
        """Extend this window by the next one."""
        self.steps += later.steps
        self.busy += later.busy
        self.longest = max(self.longest, later.longest)
        self.prefill_tokens += later.prefill_tokens
        self.decode_tokens += later.decode_tokens
        self.ttft += later.ttft
        for name in ("end", "running", "waiting", "in_use", "cached_only", "held_tokens", "preemptions", "column"):
            setattr(self, name, getattr(later, name))


class Timeline:
    """Records a replay; call it with the replay after each step.

    It has fewer than MOST_WINDOWS windows of equally many steps. Whenever they are full, pairs of windows join, and
    from then on a window takes twice as many steps.
    """

    def __init__(self, capacity: int) -> None:
        self.windows: list[Window] = []
        self.capacity = capacity
        self.rows = min(MOST_ROWS, capacity)
        self._steps = 1
        self._seen = (0, 0)  # prefill and decode tokens before the step
        self._window = Window(0)
        # The blocks of each row, evenly sampled where there are too many to look at all of them.
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
        """Close the current window; call it once more when the replay has ended."""
        window, block_manager, scheduler = self._window, replay.block_manager, replay.scheduler
        if not window.steps:
            return
        window.end = replay.totals.time_us
        window.running, window.waiting = scheduler.active_count, scheduler.waiting_count
        window.in_use = block_manager.allocator.in_use
        window.cached_only = 0 if replay.cache is None else replay.cache.evictable
        window.held_tokens = block_manager.num_tokens
        window.preemptions = scheduler.num_preemptions
        window.column = self._column(block_manager.allocator)
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


def replay_picture(numbers: dict[str, Any], timeline: Timeline) -> dict[str, Any]:
    """The picture of a replay. Times are seconds, or milliseconds where a name ends with `_ms`; each list has a value
    for each window. `map` has a column of `rows` bytes for each window, 255 for a row with every block in use."""
    title, facts, footer = report.headings(numbers)
    windows = timeline.windows
    ttft = [Counter(window.ttft) for window in windows]
    lines = {
        "capacity": timeline.capacity,
        "rows": timeline.rows,
        "map": base64.b64encode(b"".join(window.column for window in windows)).decode(),
        "begin": [window.begin / 1e6 for window in windows],
        "end": [window.end / 1e6 for window in windows],
        "in_use": [window.in_use for window in windows],
        "cached_only": [window.cached_only for window in windows],
        "held_tokens": [window.held_tokens for window in windows],
        "running": [window.running for window in windows],
        "waiting": [window.waiting for window in windows],
        "prefill_tokens": [round(window.prefill_tokens / window.steps, 1) for window in windows],
        "decode_tokens": [round(window.decode_tokens / window.steps, 1) for window in windows],
        "step_ms": [round(window.busy / window.steps / 1e3, 3) for window in windows],
        "longest_ms": [window.longest / 1e3 for window in windows],
        "ttft_ms": [percentile(counts, 0.5) / 1e3 if counts else None for counts in ttft],
        "ttft_p99_ms": [percentile(counts, 0.99) / 1e3 if counts else None for counts in ttft],
        "preemptions": [window.preemptions for window in windows],
    }
    return {"title": title, "footer": footer, "facts": facts, "timeline": lines}
