"""Calls of one kind in a row, each timed: what the tables of bench/ are made of."""

import time

__all__ = ["times_of"]


def times_of(call, turn, seconds, least=3, most=300):
    """Seconds of each call of a round, and the turn of the next: `call(turn)` until `seconds` are spent, at least
    `least` and at most `most` times, after one that is not counted."""
    call(turn)
    times, spent = [], 0.0
    while len(times) < least or (spent < seconds and len(times) < most):
        turn += 1
        begin = time.perf_counter()
        call(turn)
        times.append(time.perf_counter() - begin)
        spent += times[-1]
    return times, turn
