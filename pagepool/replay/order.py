"""In which order the prompts of a trace come where no clock says so: a permutation, the same in every run.

arrival  by recorded time, those of one moment in the order of the file; the default without users
session  one session after the other, in the order of the file
turns    users by turns, a request each; the default with users
think    users by time: a user's next request comes when the recorded api time and think time have passed
random   a random user's next request, by a seed; without users every session has its own
prefix   windows of 64 prompts in the order of arrival, each sorted so that equal prefixes follow one another

A user takes a session, asks its requests one after the other, and then takes the next session of the file that nobody
has taken. A request outside all sessions is a session of one. Requests of one session stay in order, but for `prefix`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heapreplace

from pagepool.replay.ptrace import Trace

__all__ = ["ORDERS", "USER_ORDERS", "in_order", "sessions_of"]

ORDERS = ("arrival", "session", "turns", "think", "random", "prefix")
USER_ORDERS = ("turns", "think", "random")
WINDOW = 64


def sessions_of(trace: Trace) -> list[list[int]]:
    """The requests of each session, sessions in the order of the file; a request outside all of them is one."""
    sessions: dict[int, list[int]] = {}
    alone: list[list[int]] = []
    for index, session in enumerate(trace.session):
        if session:
            sessions.setdefault(session, []).append(index)
        else:
            alone.append([index])
    return [sessions[number] for number in sorted(sessions)] + alone


def in_order(trace: Trace, order: str, users: int | None = None, seed: int = 0) -> list[int]:
    """The indices of all requests in that order. Raises `ValueError` for users where the order has none."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    if users is not None and order not in USER_ORDERS:
        raise ValueError(f"--order {order} has no users; --users goes with {', '.join(USER_ORDERS)}")
    if order == "arrival":
        return list(range(len(trace)))
    if order == "prefix":
        return _by_prefix(trace)
    sessions = sessions_of(trace)
    if order == "session":
        return [index for session in sessions for index in session]
    users = min(users or len(sessions), len(sessions))
    if order == "turns":
        return list(_by_turns(sessions, users))
    if order == "think":
        return list(_by_time(trace, sessions, users))
    return list(_at_random(sessions, users, random.Random(seed)))


def _by_turns(sessions: list[list[int]], users: int) -> Iterator[int]:
    """A user whose session has ended asks the first request of the next one when the turn comes."""
    untaken = iter(sessions[users:])
    line = deque(deque(session) for session in sessions[:users])
    while line:
        user = line.popleft()
        yield user.popleft()
        if user:
            line.append(user)
        elif (session := next(untaken, None)) is not None:
            line.append(deque(session))


def _by_time(trace: Trace, sessions: list[list[int]], users: int) -> Iterator[int]:
    """All users begin at time 0, each with the first request of a session; of two at one time the lower user is first.

    A session that ends and one that begins are apart by the api time of the last request alone.
    """
    untaken = iter(sessions[users:])
    taken = [iter(session) for session in sessions[:users]]
    line = [(0, user, next(requests)) for user, requests in enumerate(taken)]  # in order, so a heap
    while line:
        now, user, index = line[0]
        yield index
        end = now + trace.api_us[index]
        following = next(taken[user], None)
        if following is not None:
            heapreplace(line, (end + trace.think_us[following], user, following))
            continue
        session = next(untaken, None)
        if session is None:
            heappop(line)
        else:
            taken[user] = iter(session)
            heapreplace(line, (end, user, next(taken[user])))


def _at_random(sessions: list[list[int]], users: int, source: random.Random) -> Iterator[int]:
    untaken = iter(sessions[users:])
    taken = [deque(session) for session in sessions[:users]]
    while taken:
        user = source.randrange(len(taken))
        yield taken[user].popleft()
        if not taken[user]:
            session = next(untaken, None)
            if session is None:
                taken[user] = taken[-1]
                taken.pop()
            else:
                taken[user] = deque(session)


def _by_prefix(trace: Trace) -> list[int]:
    runs, order = trace.runs or [], []
    for start in range(0, len(trace), WINDOW):
        window = range(start, min(start + WINDOW, len(trace)))
        order += sorted(window, key=lambda index: (trace.session[index], runs[index]))
    return order
