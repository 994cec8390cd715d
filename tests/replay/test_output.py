"""Output of the replay: progress on stderr, a table on stdout."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trace_bytes import lines_of

from pagepool import BlockAllocator, SchedulerConfig
from pagepool.cli import main, output
from pagepool.cli import progress as progress_module
from pagepool.cli.progress import Progress
from pagepool.cli.replay import bundled_trace
from pagepool.replay.clock import CostModel
from pagepool.replay.driver import MeteredBlockManager, Replay
from pagepool.replay.ptrace import read_trace


def run(report=lambda replay: None):
    block_manager = MeteredBlockManager(BlockAllocator(500), 16)
    replay = Replay(read_trace(bundled_trace(), 5), SchedulerConfig(), block_manager, CostModel())
    replay.run(report)
    return replay


def test_plain_progress_prints_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    replay = run(Progress(5))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == replay.totals.steps
    assert lines[0].startswith("pagepool: 0 of 5 requests, 1 running, 0 waiting, 16/500 blocks")
    assert lines[-1].startswith("pagepool: 5 of 5 requests, 0 running")


def test_a_short_replay_prints_no_progress(capsys):
    run(Progress(5))
    assert capsys.readouterr().err == ""


def test_python_dash_m_pagepool():
    arguments = [sys.executable, "-m", "pagepool", "replay", "--requests", "2"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 / 0" in done.stdout
    missing = subprocess.run([*arguments[:4], "no.ptrace"], capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == "pagepool: no.ptrace: cannot be read: No such file or directory\n"


def test_a_reader_that_leaves_is_no_traceback():
    command = f"{sys.executable} -m pagepool replay --requests 2 | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">/dev/full", 2, "pagepool: standard output: cannot be written: No space left on device\n"),
        ("--json - >/dev/full", 2, "pagepool: standard output: cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("--json numbers.json >&-", 0, ""),
        ("--json - >&-", 2, "pagepool: standard output: cannot be written: Bad file descriptor\n"),
        ("--json - 2>&-", 0, ""),
        ("--blocks 0 2>&-", 2, ""),
    ],
)
def test_streams_that_are_closed_or_full(redirection, code, said, tmp_path):
    """There is no traceback, and output for a closed stream does not reach another file."""
    command = f"{sys.executable} -m pagepool replay --requests 2 {redirection}"
    path = os.pathsep.join(sys.path)
    # Without PYTHONUNBUFFERED, as for users: Python flushes buffered output again at exit.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (code, said)
    if "2>&-" in redirection:
        assert code == 2 or json.loads(done.stdout)["finished"] == 2
    if "numbers.json" in redirection:
        assert json.loads((tmp_path / "numbers.json").read_text())["finished"] == 2


@pytest.mark.parametrize("how", ["close", "detach"])
@pytest.mark.parametrize("arguments", [[], ["--json", "-"], ["--html", "-"], ["--help"]])
def test_standard_output_that_the_caller_closed_is_one_line(how, arguments, monkeypatch, capfd):
    stream = io.TextIOWrapper(io.BytesIO())
    getattr(stream, how)()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["replay", "--requests", "2", *arguments]) == 2
    assert capfd.readouterr().err == "pagepool: standard output: cannot be written: Bad file descriptor\n"
    assert sys.stdout is stream


@pytest.mark.parametrize("how", ["close", "detach"])
def test_where_both_streams_are_closed_nothing_is_said(how, monkeypatch, capfd):
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(io.BytesIO())
        getattr(stream, how)()
        monkeypatch.setattr(sys, name, stream)
    assert main(["replay", "--requests", "2"]) == 2
    sys.stderr.close()
    assert capfd.readouterr() == ("", "")


def test_names_that_a_terminal_has_no_letters_for_are_written_as_escapes(make_trace):
    path = make_trace(lines_of([[0, 5, 3, []]], name="prägnant"))
    command = [sys.executable, "-m", "pagepool", "replay", str(path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and "replay of pr\\xe4gnant" in done.stdout


def test_passes_say_how_far_they_are(monkeypatch, capsys, make_trace):
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    path = make_trace([[0, 4, 1, [0, 1]]] * 3, block=4)
    assert main(["replay", str(path), "--clock", "none", "--policy", "lru,gittins", "--capacity", "1000"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "pagepool: 0 of 6 requests, lru with 1000 blocks",
        "pagepool: 3 of 6 requests, gittins with 1000 blocks",
    ]


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_caller_can_capture_the_output(option):
    with contextlib.redirect_stdout(io.StringIO()) as taken:
        assert main(["replay", "--requests", "2", option, "-"]) == 0
    assert json.loads(taken.getvalue())["finished"] == 2 if option == "--json" else "</html>" in taken.getvalue()


def test_the_callers_standard_output_is_left_as_it_was(monkeypatch, tmp_path):
    with (tmp_path / "printed").open("w", encoding="ascii", errors="strict") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert main(["replay", "--requests", "2"]) == 0
        assert file.errors == "strict"
    full = Path("/dev/full").open("w", encoding="ascii")
    monkeypatch.setattr(sys, "stdout", full)
    assert main(["replay", "--requests", "2"]) == 2
    full.write("x")
    with pytest.raises(OSError, match="No space left"):  # the same file as before, with an empty buffer
        full.flush()
    output.drop_output()
    full.close()
