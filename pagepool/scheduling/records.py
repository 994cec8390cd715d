"""What happened when blocks ran out: every step down the ladder, with its reason."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

__all__ = ["PressureLog", "PressureRecord"]


class PressureRecord(NamedTuple):
    """One step down the ladder.

    step     the number of the `schedule()` call, from 1
    rung     "evict", "partial", "swap", "recompute"; "restore" and "lost" when a swapped sequence comes back
    seq_id   who gave way; 0 for cached prefixes
    blocks   how many blocks that one gave; for "restore" and "lost": how many were in the file
    wanted   how many new blocks the step needed; for "restore" and "lost": as `blocks`
    free     how many could be taken before
    reason   why this rung
    """

    step: int
    rung: str
    seq_id: int
    blocks: int
    wanted: int
    free: int
    reason: str


class PressureLog:
    """The last records, and totals of all of them.

    records   a deque of `PressureRecord`, the newest last
    counts    how often each rung was taken
    blocks    how many blocks each rung gave
    """

    def __init__(self, max_records: int) -> None:
        self.records: deque[PressureRecord] = deque(maxlen=max_records)
        self.counts: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()

    def add(self, record: PressureRecord) -> None:
        """Note one step."""
        self.records.append(record)
        self.counts[record.rung] += 1
        self.blocks[record.rung] += record.blocks
