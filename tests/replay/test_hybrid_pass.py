"""`--hybrid`: the hits that a hybrid model can use, computed by hand and on the recorded trace."""

import json
from pathlib import Path

import pytest

import pagepool
from pagepool import cli, reference
from pagepool.replay.passes import StateOptions, hybrid_pass
from pagepool.replay.prompts import Prompts
from pagepool.replay.ptrace import read_trace

MOONCAKE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_synthetic.ptrace.xz"
needs_traces = pytest.mark.skipif(not MOONCAKE.is_file(), reason="needs the recorded traces next to the checkout")

# Blocks of 4 tokens. A is unrelated. B, C and D share blocks 10 to 12 and then diverge. E continues D.
RECORDS = [
    [0, 14, 1, [0, 4]],
    [1, 22, 1, [10, 3, 20, 3]],
    [2, 22, 1, [10, 3, 30, 3]],
    [3, 22, 1, [10, 3, 40, 3]],
    [4, 34, 1, [10, 3, 40, 2, 50, 4]],
]


def run(capsys, path, *arguments):
    assert cli.main(["replay", str(path), "--clock", "none", "--json", "-", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("memory", [pagepool, reference], ids=["compiled", "reference"])
@pytest.mark.parametrize(
    ("options", "capacity", "hits", "usable", "saved"),
    [
        # C finds 3 blocks and no state. D finds C's state at the branch. E finds the state at the end of D.
        ({"grid": 0}, None, 11, 8, {"branch": 1, "end": 5, "grid": 0}),
        # A grid of 2 blocks: C finds the state after block 2. The end of E is on the grid.
        ({"grid": 8}, None, 11, 10, {"branch": 1, "end": 4, "grid": 7}),
        # The budget holds one state. Only the first one, at the end of A, is worth more than its successor.
        ({"grid": 0, "budget_bytes": 4096}, None, 11, 0, None),
        ({}, 0, 0, 0, None),
    ],
)
def test_counts_computed_by_hand(make_trace, memory, options, capacity, hits, usable, saved):
    prompts = Prompts(read_trace(make_trace(RECORDS, block=4), prefixes=True))
    found = hybrid_pass(memory, prompts, "lru", capacity, StateOptions(4096, **options))
    assert (found.full_blocks, found.hit_blocks, found.usable_blocks) == (26, hits, usable)
    assert saved is None or found.states["saved"] == saved


def test_every_block_counts_the_inserted_blocks(make_trace, capsys):
    numbers = run(capsys, make_trace(RECORDS, block=4), "--hybrid", "1", "--capacity", "4,100")
    few, many = numbers["hybrid"]
    # With 4 blocks, prompts of 5 and more blocks evict their own prefixes: no hits, and every block is inserted.
    assert (many["every_block_states"], few["every_block_states"]) == (15, 26)
    assert many["peak_states"] == many["states_saved"] and many["state_share"] == many["states_saved"] / 15


def test_the_table(make_trace, capsys):
    path = make_trace(RECORDS, block=4)
    assert cli.main(["replay", str(path), "--clock", "none", "--hybrid", "16M"]) == 0
    printed = capsys.readouterr().out
    assert "states of 16.00 MiB, no bound; a grid of 16,384 tokens" in printed and "72.7%" in printed
    assert "1 / 1" in printed and "states kept / times used" in printed


@pytest.mark.parametrize("text", ["", "0", "x", "-1", "1.5G", "16MB", "9" * 13, "999999999T", "٣"])
def test_sizes(text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["replay", "--clock", "none", f"--hybrid={text}"])
    assert "must be a size such as" in capsys.readouterr().err


@pytest.mark.one_in(3)
@needs_traces
@pytest.mark.parametrize("policy", ["lru", "gittins"])
@pytest.mark.parametrize("capacity", [[], ["--capacity", "5859"], ["--capacity", "20000"]])
def test_most_of_the_hits_with_few_of_the_states(capsys, capacity, policy):
    found = run(capsys, MOONCAKE, "--hybrid", "16M", "--policy", policy, *capacity)["hybrid"]
    assert found["usable_share"] >= 0.95 and found["state_share"] <= 0.10


@needs_traces
def test_the_same_with_a_budget_of_a_fortieth_of_the_states():
    prompts = Prompts(read_trace(MOONCAKE, prefixes=True))
    found = hybrid_pass(pagepool, prompts, "lru", None, StateOptions(16 << 20, 1000 * 17 << 20))
    assert found.usable_blocks >= 0.95 * found.hit_blocks
    assert found.states["peak_states"] <= 0.027 * found.peak_blocks
