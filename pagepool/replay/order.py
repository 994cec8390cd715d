"""The order of a trace's prompts where no clock decides it: a permutation, the same in every run.

arrival  by recorded time, requests of one moment in the order of the file; the default without users
session  one session after the other, in the order of the file
turns    users take turns, one request each; the default with users
think    users by time: a user's next request comes after the recorded api time and think time
random   the next request of a random user, by a seed; without users every session has its own
prefix   windows of 64 prompts in the order of arrival, each sorted so that equal prefixes follow one another

A user takes a session, asks its requests one after the other, and then takes the next free session of the file. A
request outside all sessions is a session of its own. Every order but `prefix` keeps the requests of a session in order.
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
    """The requests of each session, in the order of the file; requests outside all sessions follow, one each."""
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
    """A user whose session has ended asks the first request of the next one when its turn comes."""
    free = iter(sessions[users:])
    line = deque(deque(session) for session in sessions[:users])
    while line:
        requests = line.popleft()
        yield requests.popleft()
        if requests:
            line.append(requests)
        elif (session := next(free, None)) is not None:
            line.append(deque(session))


def _by_time(trace: Trace, sessions: list[list[int]], users: int) -> Iterator[int]:
    """All users start at time 0, each with the first request of a session; at equal times the lower user is first.

    A user starts the next session without a think time, when the api time of its last request has passed.
    """
    free = iter(sessions[users:])
    taken = [iter(session) for session in sessions[:users]]
    line = [(0, user, next(requests)) for user, requests in enumerate(taken)]  # sorted, so it is a heap
    while line:
        now, user, index = line[0]
        yield index
        end = now + trace.api_us[index]
        following = next(taken[user], None)
        if following is not None:
            heapreplace(line, (end + trace.think_us[following], user, following))
            continue
        session = next(free, None)
        if session is None:
            heappop(line)
        else:
            taken[user] = iter(session)
            heapreplace(line, (end, user, next(taken[user])))


def _at_random(sessions: list[list[int]], users: int, source: random.Random) -> Iterator[int]:
    free = iter(sessions[users:])
    taken = [deque(session) for session in sessions[:users]]
    while taken:
        user = source.randrange(len(taken))
        yield taken[user].popleft()
        if not taken[user]:
            session = next(free, None)
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
