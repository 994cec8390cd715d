"""`--clock none`: prompts through the prefix cache alone, against counts computed by hand or published."""

import json
from pathlib import Path

import pytest

from pagepool import BlockAllocator, PrefixCache, cli
from pagepool.replay.prompts import Prompts
from pagepool.replay.ptrace import read_trace

DATA = Path(__file__).parents[3] / "shared" / "data"
MOONCAKE = DATA / "mooncake_synthetic.ptrace.xz"
needs_traces = pytest.mark.skipif(not MOONCAKE.is_file(), reason="needs the recorded traces next to the checkout")

# Blocks of 4 tokens. The third block of the last prompt, block 4, has 2 tokens.
RECORDS = [
    [0, 12, 1, [0, 3]],
    [1, 12, 1, [0, 2, 3, 1]],
    [2, 12, 1, [0, 3]],
    [3, 10, 1, [0, 2, 4, 1]],
]


def run(capsys, path, *arguments):
    assert cli.main(["replay", str(path), "--clock", "none", "--json", "-", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("memory", [[], ["--reference"]])
@pytest.mark.parametrize(
    ("arguments", "full", "hits", "evictions"),
    [
        ([], 11, 7, 0),
        (["--capacity", "4"], 11, 7, 0),
        (["--capacity", "3"], 11, 6, 2),
        (["--capacity", "2"], 11, 0, 9),
        (["--capacity", "0"], 11, 0, 0),
        (["--capacity", "6", "--block-size", "2"], 23, 12, 5),
        (["--requests", "2"], 6, 2, 0),
    ],
)
def test_lru_worked_out_by_hand(make_trace, capsys, memory, arguments, full, hits, evictions):
    found = run(capsys, make_trace(RECORDS, block=4), *arguments, *memory)["prefix"]
    assert (found["full_blocks"], found["hit_blocks"], found["evictions"]) == (full, hits, evictions)


def test_ids_of_another_session_are_other_blocks(make_trace, capsys):
    session = {"s": "a", "tool": 0, "sys": 0, "r": [[0, 8, 1, 0, 0, [0, 2]], [1, 8, 1, 0, 0, [0, 2]]]}
    found = run(capsys, make_trace([session, session], block=4))["prefix"]
    assert (found["full_blocks"], found["hit_blocks"]) == (8, 4)


def test_several_policies_and_capacities_make_a_list(make_trace, capsys):
    path = make_trace(RECORDS, block=4)
    found = run(capsys, path, "--policy", "lru,gittins", "--capacity", "2,3")["prefix"]
    assert [(row["policy"], row["capacity_blocks"]) for row in found] == [
        ("lru", 2),
        ("lru", 3),
        ("gittins", 2),
        ("gittins", 3),
    ]
    assert cli.main(["replay", str(path), "--clock", "none", "--capacity", "3"]) == 0
    printed = capsys.readouterr().out
    assert "54.5%" in printed and "Trace: test, none." in printed


@pytest.mark.parametrize(
    ("block", "arguments", "message"),
    [
        (0, [], "the trace has no prefix blocks, which --clock none needs"),
        (4, ["--block-size", "3"], "--block-size must divide the trace's block size, 4 tokens, and 3 does not"),
        (4, ["--users", "2"], "--users cannot be used with --clock none"),
        (4, ["--html", "page.html"], "--html cannot be used with --clock none"),
        (4, ["--blocks", "3"], "--blocks cannot be used with --clock none"),
    ],
)
def test_invalid_options_of_a_pass_are_refused_in_one_sentence(make_trace, capsys, block, arguments, message):
    assert cli.main(["replay", str(make_trace(RECORDS, block=block)), "--clock", "none", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_too_many_or_too_large_block_ids_are_refused(make_trace, capsys):
    for runs, message in (([0, 4], "12 tokens cannot have 4 blocks of 4"), ([2**31, 1], "exceed 2147483648")):
        assert cli.main(["replay", str(make_trace([[0, 12, 1, runs]], block=4)), "--clock", "none"]) == 2
        assert message in capsys.readouterr().err


def test_the_options_of_the_pass_need_it(make_trace, capsys):
    assert cli.main(["replay", str(make_trace(RECORDS, block=4)), "--capacity", "9"]) == 2
    assert "--capacity needs --clock none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["replay", "--clock", "none", "--policy", "lru,fifo"])
    assert "'fifo' is not one of lru, gittins" in capsys.readouterr().err


@needs_traces
def test_lru_on_mooncake_is_exact(capsys):
    expected = {
        1000: (10_210, 106_678),
        3000: (23_350, 91_538),
        5859: (38_303, 73_726),
        10000: (52_888, 55_000),
        20000: (70_797, 27_091),
        30000: (76_350, 11_538),
        1_000_000_000: (77_740, 0),
    }
    found = run(capsys, MOONCAKE, "--capacity", ",".join(map(str, expected)))["prefix"]
    assert {row["full_blocks"] for row in found} == {117_888}
    assert {row["capacity_blocks"]: (row["hit_blocks"], row["evictions"]) for row in found} == expected
    assert run(capsys, MOONCAKE)["prefix"]["hit_blocks"] == 77_740
    for capacity in ("5859", "1000000000"):
        row = run(capsys, MOONCAKE, "--capacity", capacity)["prefix"]
        assert (row["hit_blocks"], row["evictions"]) == expected[int(capacity)] and row["ns_per_block"] > 0


@needs_traces
def test_the_curve_of_the_paper():
    """The paper's cache also stores partial last blocks."""
    curve = json.loads((DATA / "mooncake_fig9_synthetic.json").read_text())["synthetic"]
    assert len(curve) == 12
    prompts = Prompts(read_trace(MOONCAKE, prefixes=True))
    for tokens, rate in curve:
        cache, hits = PrefixCache(BlockAllocator(round(tokens / 512)), 1, "lru"), 0
        for index in range(len(prompts)):
            hits += min(cache.touch(prompts.row(index, True)), prompts.trace.prompt[index] // 512)
        assert abs(hits / prompts.full_blocks - rate) <= 0.005, tokens
