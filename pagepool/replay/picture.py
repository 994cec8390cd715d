"""The data of the picture of `--html`, and the HTML page that contains it as JSON.

`Timeline` and `HybridRecord` collect the data in a bounded number of windows while a replay or a pass runs. Every
picture has title, footer, facts (pairs of texts) and table (rows of texts), and one of timeline, curve and hybrid.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from pagepool.replay import report
from pagepool.replay.driver import Replay
from pagepool.replay.latency import percentile
from pagepool.replay.lru_sweep import LruSweep, NotSwept
from pagepool.replay.passes import HybridPass, StateOptions, hybrid_pass
from pagepool.replay.prompts import Prompts

__all__ = [
    "HybridRecord",
    "Timeline",
    "Window",
    "hybrid_picture",
    "lru_curve",
    "page",
    "pass_picture",
    "recorded_passes",
    "replay_picture",
]

TEMPLATE = Path(__file__).parent.parent / "data" / "replay.html"
MOST_WINDOWS = 480
MOST_ROWS = 96
MOST_BLOCKS = 6_144  # maximum number of sampled blocks for one column of the map
MOST_PASS_WINDOWS = 160
CURVE_POINTS = 240
HALVES = 9


def page(picture: dict[str, Any]) -> str:
    """Return the picture as one HTML page that needs no other file and no network.

    The data is JSON in a script element. Each "<" is escaped, so no tag can begin in it.
    """
    data = json.dumps(picture, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    # Split the template before filling it in: the trace's name could contain a placeholder.
    head, _, rest = TEMPLATE.read_text(encoding="utf-8").partition("{{title}}")
    body, _, tail = rest.partition("{{data}}")
    return f"{head}{escape(picture['title'])}{body}{data}{tail}"


def _picture(title: str, footer: str, **parts: Any) -> dict[str, Any]:
    return {
        "title": title,
        "footer": footer,
        "facts": [],
        "timeline": None,
        "table": None,
        "curve": None,
        "hybrid": None,
        **parts,
    }


# ------------------------------------------------------------------------------------- a replay under the virtual clock


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
    return _picture(title, footer, facts=facts, timeline=lines)


# ---------------------------------------------------------------------------------- the prefix cache, without a clock


def pass_picture(numbers: dict[str, Any], prompts: Prompts) -> dict[str, Any]:
    """The picture of passes: for each policy its points (capacity in blocks, hit rate), and LRU's whole curve."""
    rows = report.pass_rows(numbers)
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    curve = lru_curve(prompts) if "lru" in policies else None
    lines = []
    for policy in policies:
        chosen = [row for row in rows if row["policy"] == policy and row["capacity_blocks"] is not None]
        points = sorted((row["capacity_blocks"], report.hit_rate(row)) for row in chosen)
        whole = sorted({*curve, *points}) if curve and policy == "lru" else None  # the line goes through its points
        lines.append({"policy": policy, "points": points, "curve": whole})
    unlimited = next((report.hit_rate(row) for row in rows if row["capacity_blocks"] is None), None)
    if unlimited is None and curve:
        unlimited = curve[-1][1]
    rates = {(row["policy"], row["capacity_blocks"]): f"{report.hit_rate(row):.2%}" for row in rows}
    table = [
        ["unlimited" if capacity is None else f"{capacity:,}", *(rates[policy, capacity] for policy in policies)]
        for capacity in dict.fromkeys(row["capacity_blocks"] for row in rows)
    ]
    return _picture(
        report.title(numbers),
        report.footer(numbers),
        table=[["capacity, blocks", *policies], *table],
        curve={"lines": lines, "unlimited": unlimited},
    )


def lru_curve(prompts: Prompts) -> list[tuple[int, float]] | None:
    """Return LRU's hit rate at up to CURVE_POINTS capacities at which it changes.

    None if a sweep is not possible or the trace has no hits.
    """
    try:
        lru = LruSweep(prompts)
    except NotSwept:
        return None
    if not len(lru.distances) or not prompts.full_blocks:
        return None
    distances = lru.distances.tolist()
    # Logarithmic spacing, as on the axis. Always includes the last point.
    points: list[tuple[int, float]] = []
    ratio = (distances[-1] / distances[0]) ** (1 / CURVE_POINTS)
    wanted = float(distances[0])
    for distance in distances:
        if distance >= wanted or distance == distances[-1]:
            points.append((distance, lru.hits(distance) / prompts.full_blocks))
            wanted = max(wanted, distance) * ratio
    return points


# ---------------------------------------------------------------------------------------------------- hybrid models


class HybridRecord:
    """Counts of one pass in windows of equally many prompts, and its usable blocks with smaller budgets.

    full_blocks == sum(full), hit_blocks == sum(hit), usable_blocks == sum(usable)
    """

    def __init__(self, prompts: int) -> None:
        self.per_window = max(1, -(-prompts // MOST_PASS_WINDOWS))
        self.prompts = 0
        self.full: list[int] = []
        self.hit: list[int] = []
        self.usable: list[int] = []
        self.states: list[int] = []  # number of states at the end of each window
        self.every_block: list[int] = []  # the same with a state at the end of every cached block
        self.budgets: list[tuple[int, int]] = []  # bytes of all states, usable blocks

    def __call__(self, full: int, hit: int, usable: int, states: int, cached: int) -> None:
        """Count a prompt. Called by `hybrid_pass`."""
        if self.prompts % self.per_window == 0:
            for values in (self.full, self.hit, self.usable, self.states, self.every_block):
                values.append(0)
        self.prompts += 1
        self.full[-1] += full
        self.hit[-1] += hit
        self.usable[-1] += usable
        self.states[-1], self.every_block[-1] = states, cached

    def ends(self) -> list[int]:
        """Return the number of prompts at the end of each window."""
        return [min((at + 1) * self.per_window, self.prompts) for at in range(len(self.full))]


def recorded_passes(
    memory: Any,
    prompts: Prompts,
    policies: list[str],
    capacities: list[int | None],
    options: StateOptions,
    progress: Callable[[int, str], None],
) -> list[tuple[HybridPass, HybridRecord]]:
    """Run every pass and return each with its record. `progress` gets the number of finished prompts and the pass."""
    found = []
    for policy, capacity in product(policies, capacities):
        record = HybridRecord(len(prompts))
        one = hybrid_pass(memory, prompts, policy, capacity, options, record)
        record.budgets = _budgets(memory, prompts, one, options)
        found.append((one, record))
        progress(len(found) * len(prompts), _name(one, True))
    return found


def _budgets(memory: Any, prompts: Prompts, one: HybridPass, options: StateOptions) -> list[tuple[int, int]]:
    """Return usable blocks of the same pass for several budgets: the peak bytes of `one`, then half, and so on."""
    most = one.states["peak_states"] * options.state_bytes
    found = [(most, one.usable_blocks)] if most else []
    for budget in [most >> halves for halves in range(1, HALVES + 1)]:
        if budget >= options.state_bytes:
            smaller = replace(options, budget_bytes=budget)
            found.append((budget, hybrid_pass(memory, prompts, one.policy, one.capacity, smaller).usable_blocks))
    return found[::-1]


def hybrid_picture(numbers: dict[str, Any], found: list[tuple[HybridPass, HybridRecord]]) -> dict[str, Any]:
    """Return the picture of passes with states.

    For each pass it shows the share of usable full blocks over the budget and over the trace. It also compares the
    number of states with one state at the end of every cached block.
    """
    several = len({one.policy for one, _ in found}) > 1
    lines = [
        {
            "name": _name(one, several or len(found) == 1),
            "hit_rate": _share(one.hit_blocks, one.full_blocks),
            "budgets": [(room, _share(usable, one.full_blocks)) for room, usable in record.budgets],
            "hit": list(map(_share, record.hit, record.full)),
            "usable": list(map(_share, record.usable, record.full)),
            "states": record.states,
            "every_block": record.every_block,
        }
        for one, record in found
    ]
    return _picture(
        report.title(numbers),
        f"{report.footer(numbers)} In this picture: {report.about_states(numbers)}.",
        table=report.hybrid_table(numbers),
        hybrid={"ends": found[0][1].ends() if found else [], "lines": lines},
    )


def _name(one: HybridPass, with_policy: bool) -> str:
    room = "no bound" if one.capacity is None else f"{one.capacity:,} blocks"
    return f"{one.policy}, {room}" if with_policy else room


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
