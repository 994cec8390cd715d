"""The order of a trace's prompts where no clock decides it: a permutation, the same in every run.

Without users prompts come by recorded time, requests of one moment in the order of the file. Users take turns, one
request each: a user takes a session, asks its requests one after the other, and then takes the next free session of the
file. A request outside all sessions is a session of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pagepool.replay.ptrace import Trace

__all__ = ["in_order", "sessions_of"]


def sessions_of(trace: Trace) -> list[list[int]]:
    """The requests of each session, in the order of the file; requests outside all sessions follow, one each."""
    sessions: dict[int, list[int]] = {}
    alone: list[list[int]] = []
    for index, session in enumerate(trace.session):
        if session:
            sessions.setdefault(session, []).append(index)
        else:
            alone.append([index])
    return [sessions[number] for number in sorted(sessions)] + alone


def in_order(trace: Trace, users: int | None = None) -> list[int]:
    """The indices of all requests in that order."""
    if users is None:
        return list(range(len(trace)))
    sessions = sessions_of(trace)
    return list(_by_turns(sessions, min(users, len(sessions))))


def _by_turns(sessions: list[list[int]], users: int) -> Iterator[int]:
    """At the end of a session the user asks the first request of the next session at the next turn."""
    free = iter(sessions[users:])
    line = deque(deque(session) for session in sessions[:users])
    while line:
        requests = line.popleft()
        yield requests.popleft()
        if requests:
            line.append(requests)
        elif (session := next(free, None)) is not None:
            line.append(deque(session))
