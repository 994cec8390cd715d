"""LRU by stack distances: the same counts as the cache at every capacity, for any tree of prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from share import examples

import pagepool
from pagepool import cli
from pagepool.prefix.eviction import POLICIES
from pagepool.replay.lru_sweep import LruSweep, NotSwept
from pagepool.replay.passes import PLAIN_POLICIES, cache_pass, cache_passes
from pagepool.replay.prompts import Prompts
from pagepool.replay.ptrace import Trace


def trace_of(prompts, block=4):
    """Make prompts from (session, path, tokens after the last full block); a path is a tuple of small numbers."""
    trace = Trace("test", "none", block, runs=[])
    ids = {}
    for session, path, rest in prompts:
        trace.arrival_us.append(0)
        trace.output.append(1)
        trace.session.append(session)
        trace.prompt.append(max(1, block * (len(path) - bool(rest)) + rest))
        known = ids.setdefault(session, {})
        trace.runs.append(
            [number for end in range(1, len(path) + 1) for number in (known.setdefault(path[:end], len(known)), 1)]
        )
    return trace


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
TRACES = st.lists(st.tuples(st.integers(1, 2), PATHS, st.integers(0, 3)), max_size=30).map(trace_of)


@examples(150)
@given(TRACES, st.sampled_from([None, 2, 1]))
def test_every_capacity_as_the_cache_has_it(trace, block_size):
    prompts = Prompts(trace, block_size)
    lru = LruSweep(prompts)
    for capacity in [0, 1, 2, 3, 4, 5, 7, 9, 12, 20, 1000, None]:
        real = cache_pass(pagepool, prompts, "lru", capacity)
        assert (lru.hits(capacity), lru.evictions(capacity)) == (real.hit_blocks, real.evictions), capacity
        assert lru.touches == real.blocks


@pytest.mark.parametrize(
    "runs",
    [[[0, 1, 5, 1], [1, 1, 5, 1]], [[0, 1, 1, 1, 0, 1]], [[0, 2], [1, 1]], [[10**6, 2], [0, 1]]],
    ids=["two parents", "twice in a prompt", "inside and head", "sparse"],
)
def test_ids_that_form_no_tree_are_left_to_the_cache(runs):
    trace = trace_of([(1, (0,) * 3, 0)] * len(runs))
    trace.runs = runs
    prompts = Prompts(trace)
    with pytest.raises(NotSwept):
        LruSweep(prompts)
    capacities = [1, 2, None]
    assert [one.hit_blocks for one in cache_passes(pagepool, prompts, ["lru"], capacities)] == [
        cache_pass(pagepool, prompts, "lru", capacity).hit_blocks for capacity in capacities
    ]


def test_a_sweep_says_that_no_cache_was_timed(make_trace, capsys):
    path = make_trace([[0, 12, 1, [0, 3]], [0, 12, 1, [0, 3]]], block=4)
    assert cli.main(["replay", str(path), "--clock", "none", "--capacity", "2,3"]) == 0
    assert capsys.readouterr().out.count("swept") == 2


def test_policies_side_by_side(make_trace, capsys):
    path = make_trace([[0, 12, 1, [0, 3]], [1, 8, 1, [7, 2]], [2, 12, 1, [0, 3]]], block=4)
    assert cli.main(["replay", str(path), "--clock", "none", "--compare", "lru,arc", "--capacity", "2,5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["capacity", "lru", "arc"]
    assert lines[3].split() == ["5", "37.50%*", "37.50%*"]
    assert cli.main(["replay", str(path), "--clock", "none", "--compare", "lru,arc"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-1]] == ["1", "2", "4", "8"]
    assert cli.main(["replay", str(path), "--clock", "none", "--compare", "lru", "--policy", "arc"]) == 2
    assert "--policy and --compare cannot be used together" in capsys.readouterr().err


@examples(50)
@given(TRACES, st.integers(0, 25))
def test_no_policy_passes_belady(trace, capacity):
    prompts = Prompts(trace)
    bound, *others = cache_passes(pagepool, prompts, ["belady", *POLICIES, *PLAIN_POLICIES], [capacity])
    assert bound.hit_blocks >= max(one.hit_blocks for one in others)
    unlimited = cache_passes(pagepool, prompts, ["belady", "lru"], [None])
    assert unlimited[0].hit_blocks == unlimited[1].hit_blocks and unlimited[0].evictions == 0


def test_the_share_of_the_head_room(make_trace, capsys):
    """A loop of three blocks in a cache of two: LRU has no hits, the optimum always keeps two blocks."""
    path = make_trace([[at, 4, 1, [at % 3, 1]] for at in range(30)], block=4)
    arguments = ["replay", str(path), "--clock", "none", "--compare", "lru,belady", "--capacity", "2,3"]
    assert cli.main(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2] == ["2", "0.00%*", "60.00%"] and lines[6] == ["2", "0.0%", "100.0%"]
    assert lines[3] == ["3", "90.00%*", "90.00%"] and lines[7] == ["3", "0.0%", "0.0%"]
    assert cli.main([*arguments, "--hybrid", "1"]) == 2
    assert "belady cannot be used with --hybrid" in capsys.readouterr().err


def test_ids_too_many_for_belady_are_one_sentence(make_trace, capsys):
    sessions = [{"s": "a", "r": [[0, 4, 1, 0, 0, [2**31 - 2, 1]]]} for _ in range(3)]
    assert cli.main(["replay", str(make_trace(sessions, block=4)), "--clock", "none", "--policy", "belady"]) == 2
    assert "at most 2147483648 block ids, not 6442450941" in capsys.readouterr().err
