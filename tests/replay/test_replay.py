"""The replay: counts computed by hand, the same in every run, with either implementation of the memory."""

import json
import math

import pytest
from refusals import refuses

from pagepool import BlockAllocator, SchedulerConfig
from pagepool.cli import main
from pagepool.cli.replay import bundled_trace
from pagepool.replay import driver
from pagepool.replay.clock import CostModel
from pagepool.replay.driver import MeteredBlockManager, Replay, ReplayFailed
from pagepool.replay.ptrace import read_trace
from pagepool.replay.report import results

WALL = ("wall_s", "ns_per_block_op", "sched_us_per_step", "memory_s", "memory_share", "attention")


def replay(path, blocks=100, block_size=4, cost=None, limit=None, **config):
    config = SchedulerConfig(block_size=block_size, **config)
    block_manager = MeteredBlockManager(BlockAllocator(blocks), block_size)
    run = Replay(read_trace(path, limit), config, block_manager, cost or CostModel())
    run.run()
    return results(run)


def exact(numbers):
    return {key: value for key, value in numbers.items() if key not in WALL}


def test_two_requests_by_hand(make_trace):
    """Cost: 1000 us per step, 10 per prompt token, 100 per decode token; chunks and blocks of 4 tokens.

    step  from     feeds                             cost  to       tokens / places in pages
    1     0        A 4 of 6 prompt tokens            1040  1040      4 / 4
    2     1040     A 2                -> A's first   1020  2060      6 / 8
    3     2060     A 1, B 3 (came at 1500) -> both   1130  3190     7+3 / 8+4
    4     3190     A 1, B 1 -> both; A has 3: ends   1200  4390     8+4 / 8+4
    5     4390     B 1              -> B has 3: ends 1100  5490      5 / 8
    6     idle until C comes at 10000
    6     10000    C 1 -> its only token: ends       1010  11010     1 / 4
    """
    path = make_trace([[0, 6, 3, []], [1500, 3, 3, []], [10000, 1, 1, []]], unit="us")
    numbers = replay(path, cost=CostModel(1000, 10, 100), max_prefill_tokens=4)
    assert (numbers["requests"], numbers["finished"], numbers["refused"], numbers["steps"]) == (3, 3, 0, 6)
    assert (numbers["prefill_tokens"], numbers["decode_tokens"]) == (10, 4)
    assert (numbers["block_allocs"], numbers["block_frees"], numbers["peak_blocks"]) == (5, 5, 3)
    assert numbers["virtual_s"] == 0.01101
    # First tokens: A 2060 - 0, B 3190 - 1500, C 11010 - 10000.
    assert numbers["ttft_ms"] == {"p50": 1.69, "p90": 2.06, "p99": 2.06}
    # Gaps: A 1130, 1200; B 1200, 1100.
    assert numbers["tbt_ms"] == {"p50": 1.13, "p90": 1.2, "p99": 1.2}
    shares = [(1040, 4 / 4), (1020, 6 / 8), (1130, 10 / 12), (1200, 12 / 12), (1100, 5 / 8), (1010, 1 / 4)]
    expected = sum(time * share for time, share in shares) / sum(time for time, _ in shares)
    assert math.isclose(numbers["mean_utilization"], expected)


def test_the_clock_jumps_over_idle_time(make_trace):
    path = make_trace([[5000, 4, 1, []]], unit="s")
    numbers = replay(path, cost=CostModel(1000, 0, 0))
    assert numbers["virtual_s"] == 5000.001 and numbers["ttft_ms"]["p50"] == 1.0


def test_a_request_for_no_output_reads_its_prompt(make_trace):
    numbers = replay(make_trace([[0, 9, 0, []]]))
    assert (numbers["finished"], numbers["prefill_tokens"], numbers["block_allocs"]) == (1, 9, 3)


def test_requests_that_never_fit_are_refused(make_trace):
    numbers = replay(make_trace([[0, 100, 100, []], [0, 5, 3, []], [0, 8, 9, []]]), blocks=4)
    assert (numbers["requests"], numbers["finished"], numbers["refused"]) == (3, 1, 2)
    assert replay(make_trace([[0, 5, 3, []]]), blocks=0)["refused"] == 1


def test_an_empty_trace(make_trace):
    numbers = replay(make_trace([]))
    assert numbers["steps"] == 0 and numbers["mean_utilization"] == 0.0 and numbers["ttft_ms"]["p99"] == 0.0


def test_the_same_counts_twice():
    runs = [
        replay(
            bundled_trace(),
            blocks=700,
            block_size=16,
            limit=150,
            cost=CostModel(20_000, 200, 500),
            max_sequences=32,
            max_batch_sequences=32,
        )
        for _ in range(2)
    ]
    assert exact(runs[0]) == exact(runs[1])
    assert runs[0]["finished"] == 150 and runs[0]["preemptions"] > 0
    assert runs[0]["block_allocs"] == runs[0]["block_frees"] > 0


@pytest.fixture
def leak(monkeypatch):
    """Make the block manager keep states instead of releasing them."""
    kept = []

    def close(self, sequences):
        for seq in sequences:
            kept.append(seq.kv)
            seq.kv = None

    monkeypatch.setattr(MeteredBlockManager, "close", close)


def test_a_leak_fails_the_replay(make_trace, leak):
    with refuses(ReplayFailed, 2, 100):
        replay(make_trace([[0, 5, 1, []]]))


def test_a_replay_that_is_stuck_says_so(make_trace):
    allocator = BlockAllocator(4)
    block_manager = MeteredBlockManager(allocator, 4)
    run = Replay(read_trace(make_trace([[0, 12, 2, []]])), SchedulerConfig(block_size=4), block_manager, CostModel())
    allocator.allocate_n(4)
    with refuses(ReplayFailed, 0, 1):
        run.run()


def test_the_cost_model_takes_three_whole_numbers():
    assert CostModel.parse("1, 2,3") == CostModel(1, 2, 3)
    for text in ("", "1,2", "1,2,3,4", "1,2,x", "-1,2,3", "1.5,2,3", "1,2,", "1,2,²", "1,2," + "9" * 30):
        with refuses(ValueError, "cost"):
            CostModel.parse(text)


# ------------------------------------------------------------------------------------------------ command line


def test_json_has_every_key(make_trace, tmp_path, capsys):
    target = tmp_path / "out.json"
    assert main(["replay", "--requests", "30", "--json", str(target)]) == 0
    numbers = json.loads(target.read_text())
    keys = "requests finished refused steps block_allocs block_frees peak_blocks mean_utilization preemptions"
    assert set(f"{keys} ttft_ms tbt_ms wall_s ns_per_block_op sched_us_per_step attention".split()) <= set(numbers)
    assert set(numbers["ttft_ms"]) == set(numbers["tbt_ms"]) == {"p50", "p90", "p99"}
    assert {"calls", "kv_bytes", "seconds", "gb_per_s"} <= set(numbers["attention"])
    assert numbers["requests"] == numbers["finished"] == 30
    printed = capsys.readouterr()
    assert "30 / 0" in printed.out and "CC-BY-4.0" in printed.out and printed.err == ""


def test_json_to_standard_output(capsys):
    assert main(["replay", "--requests", "3", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 3


@pytest.mark.parametrize("option", ["--reference", "--block-size=5", "--max-batch=1"])
def test_options(option, capsys):
    assert main(["replay", "--requests", "20", option]) == 0
    assert "20 / 0" in capsys.readouterr().out


def test_a_bad_trace_is_one_line_and_exit_2(make_trace, capsys):
    path = make_trace([[0, 5, 3, []], [0, -5, 3, []]])
    assert main(["replay", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"pagepool: {path}:3: the number of prompt tokens")


def test_a_trace_without_a_name_is_not_the_bundled_one(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["replay", ""])
    assert caught.value.code == 2 and "TRACE: the file name must not be empty" in capsys.readouterr().err


def test_results_that_cannot_be_written_are_refused_before_the_replay(tmp_path, capsys):
    (tmp_path / "file").touch()
    for target, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "out.json", "No such file or directory"),
        (tmp_path / "file" / "out.json", "Not a directory"),
    ):
        assert main(["replay", "--json", str(target)]) == 2
        assert capsys.readouterr().err == f"pagepool: {target}: cannot be written: {reason}\n"


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_disk_that_is_full_is_named(option, capsys):
    assert main(["replay", "--requests", "2", option, "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "pagepool: /dev/full: cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--requests", "-1"],
        ["--requests", "0"],
        ["--blocks", "0"],
        ["--blocks", "x"],
        ["--budget", "0"],
        ["--cost", "1,2"],
        ["--attend", "gpt"],
        ["--json", ""],
        ["--html", ""],
        ["--block", "4"],
    ],
)
def test_bad_arguments_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["replay", *arguments])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and arguments[0] in said
    assert said.startswith("pagepool: ") and said.endswith("; see pagepool replay --help\n") and said.count("\n") == 1


def test_a_trace_without_requests_is_said(make_trace, capsys):
    path = str(make_trace([], block=4))
    for arguments in ([], ["--clock", "none"], ["--clock", "none", "--hybrid", "1"]):
        assert main(["replay", path, *arguments]) == 0
        assert capsys.readouterr().err == "pagepool: the trace has no requests\n"


def test_interrupted_is_one_line_and_exit_130(monkeypatch, capsys):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(driver.Replay, "_step", interrupt)
    assert main(["replay"]) == 130
    assert capsys.readouterr().err == "pagepool: interrupted\n"


def test_a_failed_replay_is_one_line_and_exit_1(leak, capsys):
    assert main(["replay", "--requests", "2"]) == 1
    assert "blocks are still in use at the end" in capsys.readouterr().err
