"""The order of prompts without a clock, against orders computed by hand: each request occurs once, and the requests of
a session keep their order."""

import json

import pytest

from pagepool import cli
from pagepool.replay.order import in_order, sessions_of
from pagepool.replay.ptrace import read_trace


def session(*requests):
    """Return a session of requests (arrival, think, api)."""
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
    ("users", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1, [0, 2, 5, 1, 4, 3, 6, 7]),
        # Two sessions run side by side, first a and b. Session c begins when b has ended, and d when a has ended.
        (2, [0, 1, 2, 4, 5, 3, 7, 6]),
        (100, [0, 1, 3, 7, 2, 4, 6, 5]),
    ],
)
def test_orders_by_hand(trace, users, expected):
    assert in_order(trace, users) == expected


@pytest.mark.parametrize("users", [None, 1, 3, 100])
def test_every_request_comes_once_and_sessions_stay_in_order(trace, users):
    found = in_order(trace, users)
    assert sorted(found) == list(range(8))
    for requests in sessions_of(trace):
        assert [index for index in found if index in requests] == requests


def test_requests_outside_sessions_are_sessions_of_one(make_trace):
    trace = read_trace(make_trace([[index, 4, 1, [0, 1]] for index in range(5)], block=4), prefixes=True)
    assert sessions_of(trace) == [[0], [1], [2], [3], [4]]
    assert in_order(trace, 2) == [0, 1, 2, 3, 4]
    assert in_order(read_trace(make_trace([], block=4), prefixes=True), 2) == []


def test_users_change_the_hits(make_trace, capsys):
    """Two sessions of two blocks each: one user runs them one after another in 2 blocks; two users need more."""
    path = make_trace([session((0, 0, 1), (1, 1, 1)), session((0, 0, 1), (1, 1, 1))], unit="s", block=4)
    hits = []
    for users in ("1", "2"):
        arguments = ["replay", str(path), "--clock", "none", "--capacity", "2", "--users", users, "--json", "-"]
        assert cli.main(arguments) == 0
        numbers = json.loads(capsys.readouterr().out)
        assert numbers["users"] == int(users)
        hits.append(numbers["prefix"]["hit_blocks"])
    assert hits == [4, 0]
