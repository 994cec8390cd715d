"""Closed-loop users under the virtual clock: each sends its next request exactly after answer and think time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from share import examples

from pagepool import BlockAllocator, SchedulerConfig
from pagepool.cli import main
from pagepool.replay.clock import CostModel, OpenLoop, Users
from pagepool.replay.driver import MeteredBlockManager, Replay
from pagepool.replay.picture import Timeline
from pagepool.replay.ptrace import read_trace


def session(*requests):
    """Return a session of requests (prompt, output, think seconds)."""
    return {"s": "a", "tool": 0, "sys": 0, "r": [[at, *r[:2], r[2], 1, []] for at, r in enumerate(requests)]}


def drain(arrivals, takes):
    """Serve each request in `takes` microseconds, independent of the load; return (index, arrival) of each."""
    found, running, now = [], [], 0
    while True:
        time = arrivals.next_time()
        if time is not None and (not running or time <= running[0][0]):
            now = max(now, time)
            index, came = arrivals.take()
            assert came == time
            found.append((index, came))
            running = sorted([*running, (now + takes, index)])
        elif running:
            now, index = running.pop(0)
            arrivals.ended(index, now)
        else:
            return found


@pytest.fixture
def trace(make_trace):
    """Indices by arrival: a0=0, b0=1, c0=2, a1=3, b1=4; think times of 2 and 5 seconds."""
    records = [session((8, 2, 0), (9, 2, 2)), session((7, 2, 0), (9, 2, 5)), session((6, 2, 0))]
    return read_trace(make_trace(records, unit="s"))


def test_users_wait_for_answers_and_think(trace):
    second = 1_000_000
    assert drain(Users(trace, 1), second) == [
        (0, 0),
        (3, 3 * second),
        (1, 4 * second),
        (4, 10 * second),
        (2, 11 * second),
    ]
    assert drain(Users(trace, 2), second) == [(0, 0), (1, 0), (3, 3 * second), (2, 4 * second), (4, 6 * second)]
    assert [index for index, _ in drain(Users(trace, 100), second)] == [0, 1, 2, 3, 4]
    assert drain(OpenLoop(trace), second) == list(enumerate(trace.arrival_us))


@examples(60)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=8), st.integers(1, 9), st.integers(1, 9))
def test_no_more_than_the_users_are_served_at_once(tmp_path_factory, thinks, users, takes):
    from trace_bytes import lines_of

    path = tmp_path_factory.mktemp("users") / "trace"
    path.write_bytes(lines_of([session(*((4, 1, think) for think in one)) for one in thinks], unit="s"))
    trace = read_trace(path)
    found = drain(Users(trace, users), takes)
    assert sorted(index for index, _ in found) == list(range(len(trace)))
    came = dict(found)
    for _, time in found:
        assert sum(start <= time < start + takes for start in came.values()) <= users
    by_session = {}
    for index, time in found:
        before = by_session.get(trace.session[index])
        assert before is None or time == before + takes + trace.think_us[index]
        by_session[trace.session[index]] = time


@pytest.mark.parametrize("users", [1, 2, 3])
def test_a_replay_with_users_serves_everything(make_trace, users):
    records = [session((40, 9, 0), (60, 3, 1), (80, 5, 2)) for _ in range(5)]
    block_manager = MeteredBlockManager(BlockAllocator(40), 4)
    trace = read_trace(make_trace(records, unit="s"))
    replay = Replay(trace, SchedulerConfig(block_size=4), block_manager, CostModel(), arrivals=Users(trace, users))
    most = []
    replay.run(lambda replay: most.append(replay.scheduler.active_count + replay.scheduler.waiting_count))
    assert replay.totals.finished == 15 and max(most) <= users
    assert replay.totals.time_us > 5 * 3_000_000 // users


def test_a_refused_request_lets_its_user_go_on(make_trace):
    trace = read_trace(make_trace([session((9, 1, 0), (900, 1, 0), (9, 1, 0)), session((9, 1, 0))], unit="s"))
    block_manager = MeteredBlockManager(BlockAllocator(10), 4)
    replay = Replay(trace, SchedulerConfig(block_size=4), block_manager, CostModel(), arrivals=Users(trace, 1))
    replay.run(Timeline(10))
    assert (replay.totals.finished, replay.totals.refused) == (3, 1)


def test_the_command_takes_users(make_trace, capsys):
    path = make_trace([session((40, 9, 0), (60, 3, 100)) for _ in range(4)], unit="s")
    times = []
    for users in ("1", "4"):
        assert main(["replay", str(path), "--users", users, "--json", "-"]) == 0
        numbers = json.loads(capsys.readouterr().out)
        assert numbers["finished"] == 8 and numbers["users"] == int(users)
        times.append(numbers["virtual_s"])
    assert times[0] > 400 > 2 * times[1]
    assert main(["replay", "--requests", "9", "--users", "3"]) == 0
    assert "closed loop of 3 users" in capsys.readouterr().out
