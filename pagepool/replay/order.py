"""The order of a trace's prompts without a clock: a permutation, the same in every run.

Without users, prompts are ordered by arrival; requests with the same time keep the order of the file. With users, the
users take turns and send one request each. A user sends all requests of a session, then takes the next free session of
the file. A request without a session is a session of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pagepool.replay.ptrace import Trace

__all__ = ["in_order", "sessions_of"]


def sessions_of(trace: Trace) -> list[list[int]]:
    """Return the requests of each session, in the order of the file, then each request without a session."""
    sessions: dict[int, list[int]] = {}
    alone: list[list[int]] = []
    for index, session in enumerate(trace.session):
        if session:
            sessions.setdefault(session, []).append(index)
        else:
            alone.append([index])
    return [sessions[number] for number in sorted(sessions)] + alone


def in_order(trace: Trace, users: int | None = None) -> list[int]:
    """Return the indices of all requests in the order of the replay."""
    if users is None:
        return list(range(len(trace)))
    sessions = sessions_of(trace)
    return list(_by_turns(sessions, min(users, len(sessions))))


def _by_turns(sessions: list[list[int]], users: int) -> Iterator[int]:
    """Yield requests by turns. After a session, the user takes the next session at the next turn."""
    free = iter(sessions[users:])
    line = deque(deque(session) for session in sessions[:users])
    while line:
        requests = line.popleft()
        yield requests.popleft()
        if requests:
            line.append(requests)
        elif (session := next(free, None)) is not None:
            line.append(deque(session))
