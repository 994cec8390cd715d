"""Virtual time: the cost of a step, and the arrival times of requests.

All times are whole microseconds that follow from the work of each step, so every run gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from pagepool.replay.ptrace import Trace

__all__ = ["Arrivals", "CostModel", "OpenLoop", "Users"]

MAX_COST = 10**12


@dataclass(frozen=True)
class CostModel:
    """Cost of a step in microseconds: `step`, plus `prefill` per prefill token and `decode` per decode token.

    >>> CostModel.parse("10000,60,150").of(prefill_tokens=100, decode_tokens=8)
    17200
    """

    step: int = 10_000
    prefill: int = 60
    decode: int = 150

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """Read "step,prefill,decode". Raises ValueError."""
        parts = text.split(",")
        if len(parts) != 3 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            raise ValueError(f"cost must be step,prefill,decode: 3 whole numbers of microseconds, not {text!r}")
        costs = [int(part) if len(part) < 20 else MAX_COST + 1 for part in parts]
        if max(costs) > MAX_COST:
            raise ValueError(f"cost must be at most {MAX_COST} microseconds, not {max(costs)}")
        return cls(*costs)

    def of(self, prefill_tokens: int, decode_tokens: int) -> int:
        """Return the microseconds of a step with these tokens."""
        return self.step + self.prefill * prefill_tokens + self.decode * decode_tokens


class Arrivals(Protocol):
    """The arrivals of a replay. Requests are indices into the trace; each one is taken once."""

    def next_time(self) -> int | None:
        """Return the time of the next arrival. None at the end, or if it depends on a running request."""

    def take(self) -> tuple[int, int]:
        """Take the next request and return its index and arrival time. `next_time` must not be None."""

    def ended(self, index: int, time: int) -> None:
        """Note that request `index` was answered or refused at `time`."""


class OpenLoop:
    """Requests arrive at their recorded times, whether or not earlier ones have ended."""

    def __init__(self, trace: Trace) -> None:
        self._times = trace.arrival_us
        self._taken = 0

    def next_time(self) -> int | None:
        """Return the time of the next arrival, or None after the last one."""
        return self._times[self._taken] if self._taken < len(self._times) else None

    def take(self) -> tuple[int, int]:
        """Take the next request and return its index and arrival time. `next_time` must not be None."""
        index = self._taken
        self._taken += 1
        return index, self._times[index]

    def ended(self, index: int, time: int) -> None:
        """Do nothing: no arrival depends on the end of another request."""


class Users:
    """A closed loop of `users` users, all starting at time 0.

    A user takes a session of `trace` and sends its requests in order. Before each request, the user waits for the
    previous answer and the recorded think time. After a session, the user takes the next free session at once.
    """

    def __init__(self, trace: Trace, users: int) -> None:
        self._think = trace.think_us
        self._sessions = trace.sessions()[::-1]  # the next one to take is last
        self._rest: dict[int, list[int]] = {}  # the request that a user waits for -> the rest of its session, reversed
        self._arrivals: list[tuple[int, int, int]] = []  # a heap of (time, a running number, request)
        self._number = 0
        for _ in range(min(users, len(self._sessions))):
            self._start_session(0)

    def next_time(self) -> int | None:
        """Return the time of the next arrival, or None until a running request has ended."""
        return self._arrivals[0][0] if self._arrivals else None

    def take(self) -> tuple[int, int]:
        """Take the next request and return its index and arrival time. `next_time` must not be None."""
        time, _, index = heappop(self._arrivals)
        return index, time

    def ended(self, index: int, time: int) -> None:
        """Note that request `index` was answered or refused at `time`. Its user sends the next request."""
        rest = self._rest.pop(index)
        if rest:
            following = rest.pop()
            self._ask(following, rest, time + self._think[following])
        elif self._sessions:
            self._start_session(time)

    def _start_session(self, time: int) -> None:
        session = self._sessions.pop()[::-1]
        self._ask(session.pop(), session, time)

    def _ask(self, index: int, rest: list[int], time: int) -> None:
        self._rest[index] = rest
        self._number += 1
        heappush(self._arrivals, (time, self._number, index))
