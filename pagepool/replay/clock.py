"""Virtual time: what a step costs, and when requests arrive.

All times are whole microseconds that follow from the work of each step, so every run gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from pagepool.replay.order import sessions_of
from pagepool.replay.ptrace import Trace

__all__ = ["Arrivals", "CostModel", "OpenLoop", "Users"]

MAX_COST = 10**12


@dataclass(frozen=True)
class CostModel:
    """What a step costs: `step` microseconds, and `prefill` or `decode` more for each token of the kind.

    >>> CostModel.parse("10000,60,150").of(prefill_tokens=100, decode_tokens=8)
    17200
    """

    step: int = 10_000
    prefill: int = 60
    decode: int = 150

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """From "step,prefill,decode". Raises ValueError."""
        parts = text.split(",")
        if len(parts) != 3 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            raise ValueError(f"a cost is three whole numbers of microseconds, step,prefill,decode, not {text!r}")
        costs = [int(part) if len(part) < 20 else MAX_COST + 1 for part in parts]
        if max(costs) > MAX_COST:
            raise ValueError(f"a cost of {max(costs)} microseconds is above the limit of {MAX_COST}")
        return cls(*costs)

    def of(self, prefill_tokens: int, decode_tokens: int) -> int:
        """Microseconds of a step with these tokens."""
        return self.step + self.prefill * prefill_tokens + self.decode * decode_tokens


class Arrivals(Protocol):
    """Requests, each taken once, by their indices in a trace. Times are microseconds."""

    def next_time(self) -> int | None:
        """When the next request comes; None when none does until one ends, or ever."""

    def take(self) -> tuple[int, int]:
        """The request that comes next, and when: only where `next_time` has one."""

    def ended(self, index: int, time: int) -> None:
        """Request `index` has its answer, or was refused."""


class OpenLoop:
    """Recorded times, whether or not anything has ended."""

    def __init__(self, trace: Trace) -> None:
        self._times = trace.arrival_us
        self._taken = 0

    def next_time(self) -> int | None:
        return self._times[self._taken] if self._taken < len(self._times) else None

    def take(self) -> tuple[int, int]:
        index = self._taken
        self._taken += 1
        return index, self._times[index]

    def ended(self, index: int, time: int) -> None:
        return None


class Users:
    """`users` people at once: each takes a session, asks its first request, and the next one when the answer has come
    and the recorded think time has passed; then the next session that nobody has taken, at once. All begin at time 0.
    """

    def __init__(self, trace: Trace, users: int) -> None:
        self._think = trace.think_us
        self._sessions = sessions_of(trace)[::-1]
        self._later: dict[int, list[int]] = {}  # by the request that is asked: those of its session behind it
        self._line: list[tuple[int, int, int]] = []  # when, which of those at that time, and what is asked next
        self._number = 0
        for _ in range(min(users, len(self._sessions))):
            self._begin(0)

    def next_time(self) -> int | None:
        return self._line[0][0] if self._line else None

    def take(self) -> tuple[int, int]:
        time, _, index = heappop(self._line)
        return index, time

    def ended(self, index: int, time: int) -> None:
        later = self._later.pop(index)
        if later:
            following = later.pop()
            self._ask(following, later, time + self._think[following])
        elif self._sessions:
            self._begin(time)

    def _begin(self, time: int) -> None:
        session = self._sessions.pop()[::-1]
        self._ask(session.pop(), session, time)

    def _ask(self, index: int, later: list[int], time: int) -> None:
        self._later[index] = later
        self._number += 1
        heappush(self._line, (time, self._number, index))
