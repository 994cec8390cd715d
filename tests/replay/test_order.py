"""The orders of prompts without a clock: each request once, those of a session in order, worked out by hand."""

import json

import pytest
from refusals import refuses

from pagepool import cli
from pagepool.replay.order import ORDERS, USER_ORDERS, in_order, sessions_of
from pagepool.replay.ptrace import read_trace


def session(*requests):
    """Requests as (arrival, think, api)."""
    return {"s": "a", "tool": 0, "sys": 0, "r": [[at, 8, 1, think, api, [0, 2]] for at, think, api in requests]}


@pytest.fixture
def trace(make_trace):
    """By arrival: a0=0, b0=1, a1=2, c0=3, b1=4, a2=5, c1=6, d0=7."""
    records = [
        session((0, 0, 5), (2, 1, 5), (5, 1, 5)),
        session((1, 0, 1), (4, 1, 1)),
        session((3, 0, 1), (6, 1, 1)),
        session((7, 0, 1)),
    ]
    return read_trace(make_trace(records, unit="s", block=4), prefixes=True)


@pytest.mark.parametrize(
    ("order", "users", "expected"),
    [
        ("arrival", None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("session", None, [0, 2, 5, 1, 4, 3, 6, 7]),
        ("turns", 1, [0, 2, 5, 1, 4, 3, 6, 7]),
        # A asks a0 a1 a2, B asks b0 b1, then c0 as its user is next, then d0 after a2.
        ("turns", 2, [0, 1, 2, 4, 5, 3, 7, 6]),
        ("turns", None, [0, 1, 3, 7, 2, 4, 6, 5]),
        # User 0: a0 at 0, a1 at 0+5+1, a2 at 12, then none. User 1: b0 at 0, b1 at 2, c0 at 3, c1 at 5, d0 at 6.
        ("think", 2, [0, 1, 4, 3, 6, 2, 7, 5]),
    ],
)
def test_orders_by_hand(trace, order, users, expected):
    assert in_order(trace, order, users) == expected


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("users", [None, 1, 3, 100])
def test_every_request_comes_once_and_sessions_stay_in_order(trace, order, users):
    if users and order not in USER_ORDERS:
        with refuses(ValueError, order):
            in_order(trace, order, users)
        return
    found = in_order(trace, order, users, seed=7)
    assert sorted(found) == list(range(8)) and found == in_order(trace, order, users, seed=7)
    if order != "prefix":
        for requests in sessions_of(trace):
            assert [index for index in found if index in requests] == requests


def test_a_seed_is_another_order(trace):
    assert len({tuple(in_order(trace, "random", None, seed)) for seed in range(20)}) > 10


def test_equal_prefixes_follow_one_another_within_a_window(make_trace):
    runs = [[0, 3], [5, 2], [0, 2, 9, 1], [5, 1, 20, 1], [0, 3]]
    trace = read_trace(make_trace([[at, 12, 1, run] for at, run in enumerate(runs)], block=4), prefixes=True)
    assert in_order(trace, "prefix") == [2, 0, 4, 3, 1]


def test_requests_outside_sessions_are_sessions_of_one(make_trace):
    trace = read_trace(make_trace([[index, 4, 1, [0, 1]] for index in range(5)], block=4), prefixes=True)
    assert sessions_of(trace) == [[0], [1], [2], [3], [4]]
    assert in_order(trace, "turns", 2) == [0, 1, 2, 3, 4]
    assert in_order(read_trace(make_trace([], block=4), prefixes=True), "turns", 2) == []


def test_users_change_the_hits(make_trace, capsys):
    """Two sessions of two blocks each: one user asks one after the other and fits into 2 blocks, two users do not."""
    path = make_trace([session((0, 0, 1), (1, 1, 1)), session((0, 0, 1), (1, 1, 1))], unit="s", block=4)
    hits = []
    for users in ("1", "2"):
        arguments = ["replay", str(path), "--clock", "none", "--capacity", "2", "--users", users, "--json", "-"]
        assert cli.main(arguments) == 0
        numbers = json.loads(capsys.readouterr().out)
        assert (numbers["users"], numbers["order"]) == (int(users), "turns")
        hits.append(numbers["prefix"]["hit_blocks"])
    assert hits == [4, 0]
    assert cli.main(["replay", str(path), "--clock", "none", "--users", "2", "--order", "session"]) == 2
    assert "--order session has no users; --users goes with turns, think, random" in capsys.readouterr().err
