"""What `--plot` and `--html` draw, as plain data, and the page that carries it as JSON.

`Timeline` and `HybridRecord` gather it, in a bounded number of windows, while a replay or a pass runs.
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

from pagepool.replay.driver import Replay
from pagepool.replay.latency import percentile
from pagepool.replay.lru_sweep import LruSweep, NotSwept
from pagepool.replay.passes import HybridPass, StateOptions, hybrid_pass
from pagepool.replay.prompts import Prompts
from pagepool.replay.report import headings

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
MOST_PASS_WINDOWS = 160
HALVES = 9
CURVE_POINTS = 240
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


def replay_picture(numbers: dict[str, Any], timeline: Timeline) -> dict[str, Any]:
    """Of a replay under the virtual clock. Times are seconds, or milliseconds where a name ends with `_ms`; each list
    has a value for each window. `map` has a column of `rows` bytes for each window, 255 for a row all in use."""
    title, facts, footer = headings(numbers)
    windows = timeline.windows
    ttft = [Counter(window.ttft) for window in windows]
    return {
        "title": title,
        "footer": footer,
        "facts": facts,
        "timeline": {
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
        },
        "table": None,
        "curve": None,
        "hybrid": None,
    }


def pass_picture(
    title: str, footer: str, rows: list[dict[str, Any]], curve: list[tuple[int, float]] | None
) -> dict[str, Any]:
    """Of passes without a clock: for each policy its points (capacity in blocks, hit rate), and LRU's whole curve."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    lines = []
    for policy in policies:
        chosen = [row for row in rows if row["policy"] == policy and row["capacity_blocks"] is not None]
        points = sorted((row["capacity_blocks"], _rate(row)) for row in chosen)
        whole = sorted({*curve, *points}) if curve and policy == "lru" else None  # its line meets its points
        lines.append({"policy": policy, "points": points, "curve": whole})
    unlimited = next((_rate(row) for row in rows if row["capacity_blocks"] is None), curve[-1][1] if curve else None)
    rates = {(row["policy"], row["capacity_blocks"]): f"{_rate(row):.2%}" for row in rows}
    capacities = dict.fromkeys(row["capacity_blocks"] for row in rows)
    table = [
        ["unlimited" if room is None else f"{room:,}", *(rates[policy, room] for policy in policies)]
        for room in capacities
    ]
    return {
        "title": title,
        "footer": footer,
        "facts": [],
        "timeline": None,
        "table": [["capacity, blocks", *policies], *table],
        "curve": {"lines": lines, "unlimited": unlimited},
        "hybrid": None,
    }


def lru_curve(prompts: Prompts) -> list[tuple[int, float]] | None:
    """LRU's hit rate over capacity, at up to CURVE_POINTS capacities where it changes; None where no sweep can tell."""
    try:
        lru = LruSweep(prompts)
    except NotSwept:
        return None
    if not len(lru.distances) or not prompts.full_blocks:
        return None
    distances = lru.distances.tolist()
    # Evenly over the ratio of capacities, as the axis is logarithmic; the last one always.
    points: list[tuple[int, float]] = []
    ratio = (distances[-1] / distances[0]) ** (1 / CURVE_POINTS)
    wanted = float(distances[0])
    for distance in distances:
        if distance >= wanted or distance == distances[-1]:
            points.append((distance, lru.hits(distance) / prompts.full_blocks))
            wanted = max(wanted, distance) * ratio
    return points


def _rate(row: dict[str, Any]) -> float:
    return row["hit_blocks"] / row["full_blocks"] if row["full_blocks"] else 0.0


class HybridRecord:
    """What one pass did over the trace, in windows of as many prompts each, and what others of it would have had.

    full_blocks == sum(full), hit_blocks == sum(hit), usable_blocks == sum(usable): nothing is left out.
    """

    def __init__(self, prompts: int) -> None:
        self.per_window = max(1, -(-prompts // MOST_PASS_WINDOWS))
        self.prompts = 0
        self.full: list[int] = []
        self.hit: list[int] = []
        self.usable: list[int] = []
        self.states: list[int] = []  # at the end of a window
        self.every_block: list[int] = []
        self.budgets: list[tuple[int, int]] = []  # bytes of all states, usable blocks

    def __call__(self, full: int, hit: int, usable: int, states: int, cached: int) -> None:
        """After a prompt, as `hybrid_pass` tells it."""
        if self.prompts % self.per_window == 0:
            for values in (self.full, self.hit, self.usable, self.states, self.every_block):
                values.append(0)
        self.prompts += 1
        self.full[-1] += full
        self.hit[-1] += hit
        self.usable[-1] += usable
        self.states[-1], self.every_block[-1] = states, cached

    def ends(self) -> list[int]:
        """The number of prompts at the end of each window."""
        return [min((at + 1) * self.per_window, self.prompts) for at in range(len(self.full))]


def recorded_passes(
    memory: Any,
    prompts: Prompts,
    policies: list[str],
    capacities: list[int | None],
    options: StateOptions,
    tell: Callable[[int, str], None],
) -> list[tuple[HybridPass, HybridRecord]]:
    """Each pass with its record, and with what smaller budgets leave of it. `tell` is told how many
    prompts are done, each pass counted once."""
    found = []
    for policy, capacity in product(policies, capacities):
        record = HybridRecord(len(prompts))
        one = hybrid_pass(memory, prompts, policy, capacity, options, record)
        record.budgets = _budgets(memory, prompts, one, options)
        found.append((one, record))
        tell(len(found) * len(prompts), _name(one, True))
    return found


def _budgets(memory: Any, prompts: Prompts, one: HybridPass, options: StateOptions) -> list[tuple[int, int]]:
    """The usable blocks of the same pass over budgets: all bytes that its states take without one, down by halves."""

    def usable(budget: int | None) -> HybridPass:
        smaller = replace(options, budget_bytes=budget)
        return one if smaller == options else hybrid_pass(memory, prompts, one.policy, one.capacity, smaller)

    free = usable(None)
    most = free.states["peak_states"] * options.state_bytes
    found = {most: free.usable_blocks}
    if options.budget_bytes is not None:
        found[min(most, options.budget_bytes)] = one.usable_blocks
    for halves in range(1, HALVES + 1):
        if most >> halves >= options.state_bytes:
            found[most >> halves] = usable(most >> halves).usable_blocks
    found.pop(0, None)  # no state was ever kept
    return sorted(found.items())


def hybrid_picture(
    title: str, footer: str, table: list[list[str]], found: list[tuple[HybridPass, HybridRecord]]
) -> dict[str, Any]:
    """Of each pass: shares of full blocks, of all of them over the budget and of those of a window over the trace, and
    the states that are kept, beside a state at the end of every cached block."""
    several = len({one.policy for one, _ in found}) > 1
    return {
        "title": title,
        "footer": footer,
        "facts": [],
        "timeline": None,
        "table": table,
        "curve": None,
        "hybrid": {
            "ends": found[0][1].ends() if found else [],
            "lines": [
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
            ],
        },
    }


def _name(one: HybridPass, with_policy: bool) -> str:
    room = "no bound" if one.capacity is None else f"{one.capacity:,} blocks"
    return f"{one.policy}, {room}" if with_policy else room


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def page(picture: dict[str, Any]) -> str:
    """The page as text: the template, with the title and the data in it.

    The data is JSON within a script element, where no "<" may begin a tag, so each is written as an escape.
    """
    data = json.dumps(picture, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    # Cut before anything is put in, as a trace may be called like a place of the template.
    head, _, rest = TEMPLATE.read_text(encoding="utf-8").partition("{{title}}")
    body, _, tail = rest.partition("{{data}}")
    return f"{head}{escape(picture['title'])}{body}{data}{tail}"
