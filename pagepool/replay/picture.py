"""What `--plot` and `--html` draw, as plain data: nothing is worked out twice, and the page carries it as JSON."""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

from pagepool.replay.latency import percentile
from pagepool.replay.lru_sweep import LruSweep, NotSwept
from pagepool.replay.prompts import Prompts
from pagepool.replay.report import headings
from pagepool.replay.timeline import Timeline

__all__ = ["lru_curve", "pass_picture", "replay_picture"]

CURVE_POINTS = 240


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
