"""Traces of other origin: valid ones are read exactly, invalid ones give one line with file and line number."""

import json
import lzma
import os

import pytest
from trace_bytes import HEADER, lines_of

from pagepool.cli.replay import bundled_trace
from pagepool.replay import ptrace
from pagepool.replay.ptrace import TraceError, read_trace

GOOD = [0, 5, 3, []]


def rows(trace):
    return list(zip(trace.arrival_us, trace.prompt, trace.output, strict=True))


@pytest.mark.parametrize("compress", [False, True])
def test_plain_and_xz(make_trace, compress):
    path = make_trace([[0.0, 374, 44, []], [1.5, 396, 109, [0, 3, 9, 1]]], block=512, compress=compress)
    trace = read_trace(path)
    assert (trace.name, trace.licence, trace.block) == ("test", "none", 512)
    assert rows(trace) == [(0, 374, 44), (1500, 396, 109)]
    assert trace.longest() == 505


@pytest.mark.parametrize(("unit", "factor"), [("s", 1_000_000), ("ms", 1_000), ("us", 1)])
def test_units(make_trace, unit, factor):
    assert list(read_trace(make_trace([[2.25, 1, 1, []], [4, 1, 1, []]], unit=unit)).arrival_us) == [
        round(2.25 * factor),
        4 * factor,
    ]


def test_without_arrivals_everything_is_there_at_time_0(make_trace):
    assert rows(read_trace(make_trace([[None, 7, 2, []], [None, 8, 0, []]], unit=None))) == [(0, 7, 2), (0, 8, 0)]


def test_requests_come_in_the_order_of_arrival(make_trace):
    trace = read_trace(make_trace([[5, 1, 1, []], [0, 2, 1, []], [5, 3, 1, []], [1, 4, 1, []]]))
    assert rows(trace) == [(0, 2, 1), (1000, 4, 1), (5000, 1, 1), (5000, 3, 1)]


def test_sessions_arrive_at_their_recorded_times(make_trace):
    one = {"s": "a", "tool": 3, "sys": 4, "r": [[0, 10, 1, 0, 1.5, [1, 2]], [7, 20, 2, 3.0, 1.5, []]]}
    two = {"s": "b", "tool": 3, "sys": 4, "r": [[1, 30, 3, 0, 1.5, []]]}
    path = make_trace([one, two], unit="s", block=64, requests=3)
    assert rows(read_trace(path)) == [(0, 10, 1), (1_000_000, 30, 3), (7_000_000, 20, 2)]
    assert rows(read_trace(path, limit=1)) == [(0, 10, 1)]


def test_a_limit_reads_no_further(make_trace):
    data = lines_of([GOOD, GOOD, GOOD]).replace(b"[0, 5, 3, []]\n" * 2, b"[0, 5, 3, []]\n[0, 5, 3, []]\nrubbish\n", 1)
    assert len(read_trace(make_trace(data), limit=2)) == 2


def test_an_empty_trace_is_a_trace(make_trace):
    trace = read_trace(make_trace([]))
    assert len(trace) == 0 and trace.longest() == 0


def test_the_bundled_trace():
    trace = read_trace(bundled_trace())
    assert (trace.name, trace.licence, len(trace)) == ("azure2023_conv", "CC-BY-4.0", 2000)
    assert rows(trace)[:2] == [(0, 374, 44), (4_314_579, 396, 109)]
    notice = (bundled_trace().parent / "NOTICE").read_text()
    for word in ("Azure/AzurePublicDataset", "AzureLLMInferenceTrace_conv", "Splitwise", "Attribution 4.0"):
        assert word in notice


def header(**fields):
    return lines_of([], **fields)


def second(text):
    """Return a trace with a header for one record, and this text as the record."""
    return lines_of([], n=1) + (text if isinstance(text, bytes) else text.encode()) + b"\n"


HOSTILE = {
    "empty file": (b"", 1, "the file is empty"),
    "header is not JSON": (b"hello\n", 1, "not JSON: Expecting value at column 1"),
    "header is a list": (b"[1]\n", 1, 'header with "fmt":"ptrace-1"'),
    "other format": (header(fmt="ptrace-2"), 1, 'header with "fmt":"ptrace-1"'),
    "unknown unit": (header(unit="hours"), 1, "unit must be"),
    "unit is a list": (header(unit=["s"]), 1, "unit must be"),
    "unit is a bool": (header(unit=True), 1, "unit must be"),
    "no name": (header(name=None), 1, "name must be a printable text"),
    "name drives the terminal": (header(name="\x1b[2Jgone"), 1, "name must be a printable text"),
    "huge licence": (header(licence="x" * 300), 1, "licence must be a printable text"),
    "n is a float": (header(n=1.0), 1, "n must be a whole number, not 1.0"),
    "n is a bool": (header(n=True), 1, "n must be a whole number, not True"),
    "n is negative": (header(n=-1), 1, "n must be from 0 to"),
    "n is absurd": (header(n=10**12), 1, "n must be from 0 to"),
    "block is a text": (header(block="16"), 1, "block must be a whole number, not '16'"),
    "header nested deeply": (b'{"fmt":' + b"[" * 200_000 + b"\n", 1, "nested too deeply"),
    "too few records": (lines_of([GOOD], n=3), 3, "announces 3 records, but the file ends after 1"),
    "too many records": (lines_of([GOOD, GOOD], n=1), 3, "announces 1 records, but the file has more"),
    "cut in a record": (lines_of([GOOD, GOOD])[:-6], 3, "not JSON"),
    "empty line": (second(""), 2, "the line is empty"),
    "record is a number": (second("7"), 2, "a request must be"),
    "record is too short": (second("[0, 5, 3]"), 2, "a request must be"),
    "record is too long": (second("[0, 5, 3, [], 1]"), 2, "a request must be"),
    "null": (second("null"), 2, "a request must be"),
    "prompt is zero": (second("[0, 0, 3, []]"), 2, "the number of prompt tokens must be from 1 to"),
    "prompt is negative": (second("[0, -5, 3, []]"), 2, "the number of prompt tokens must be from 1 to"),
    "prompt is absurd": (second("[0, 99999999999, 3, []]"), 2, "not 99999999999"),
    "prompt is a float": (second("[0, 5.0, 3, []]"), 2, "must be a whole number, not 5.0"),
    "prompt is a bool": (second("[0, true, 3, []]"), 2, "must be a whole number, not True"),
    "prompt is a text": (second('[0, "5", 3, []]'), 2, "must be a whole number, not '5'"),
    "prompt is a list": (second("[0, [5], 3, []]"), 2, "must be a whole number, not a list"),
    "prompt is null": (second("[0, null, 3, []]"), 2, "must be a whole number, not None"),
    "output is negative": (second("[0, 5, -1, []]"), 2, "the number of output tokens must be from 0 to"),
    "a number of a million digits": (second("[0, " + "9" * 1_000_000 + ", 3, []]"), 2, "digits, not 1000000"),
    "arrival is negative": (second("[-0.5, 5, 3, []]"), 2, "the arrival must be from 0 to"),
    "arrival is NaN": (second("[NaN, 5, 3, []]"), 2, "NaN is not a JSON number"),
    "arrival is Infinity": (second("[Infinity, 5, 3, []]"), 2, "Infinity is not a JSON number"),
    "arrival overflows": (second("[1e999, 5, 3, []]"), 2, "the arrival must be from 0 to"),
    "arrival is absurd": (second("[1e300, 5, 3, []]"), 2, "the arrival must be from 0 to"),
    "arrival is a bool": (second("[false, 5, 3, []]"), 2, "must be a number or null, not False"),
    "arrival is a text": (second('["now", 5, 3, []]'), 2, "must be a number or null, not 'now'"),
    "arrival without a unit": (lines_of([GOOD], unit=None), 2, "must have a unit"),
    "runs are a number": (second("[0, 5, 3, 1]"), 2, "a list of pairs"),
    "runs are odd": (second("[0, 5, 3, [1]]"), 2, "a list of pairs"),
    "runs hold a text": (second('[0, 5, 3, [1, "2"]]'), 2, "whole numbers from 0 up, not '2'"),
    "runs hold a negative": (second("[0, 5, 3, [-1, 2]]"), 2, "whole numbers from 0 up, not -1"),
    "record nested deeply": (second("[" * 100_000 + "]" * 100_000), 2, "nested too deeply"),
    "not UTF-8": (second(b'[0, 5, 3, ["\xff"]]'), 2, "byte 13 is not UTF-8"),
    "UTF-16": (json.dumps(HEADER).encode("utf-16"), 1, "not UTF-8"),
    "session without requests": (second('{"s": "a"}'), 2, "a list of requests"),
    "session with a bad request": (second('{"s": "a", "r": [[0, 1, 2]]}'), 2, "request 1 of the session must be"),
    "session with bad numbers": (second('{"s": "a", "r": [[0, -1, 2, 0, 0, []]]}'), 2, "the number of prompt tokens"),
    "negative think": (second('{"s": "a", "r": [[0, 1, 2, -1, 0, []]]}'), 2, "the think time must be from 0 to"),
    "endless think": (second('{"s": "a", "r": [[0, 1, 2, 1e999, 0, []]]}'), 2, "the think time must be from 0 to"),
    "think in words": (second('{"s": "a", "r": [[0, 1, 2, "long", 0, []]]}'), 2, "the think time must be a number"),
    "bad count": (lines_of([GOOD], n=1.5), 1, "n must be a whole number"),
    "zeros": (b"\0" * 1000, 1, "not JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_traces_give_one_line(make_trace, case):
    data, line, words = HOSTILE[case]
    path = make_trace(data)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ") and words in message
    assert len(message) < 400 and message.isprintable()


def test_without_a_count_whole_lines_are_records(make_trace):
    """The trace of a killed recorder: the last line may be cut off anywhere, the complete lines count."""
    whole = lines_of([[index, 5, 3, []] for index in range(3)], n=None)
    end = whole.rindex(b"[")
    for cut in range(end, len(whole)):
        assert len(read_trace(make_trace(whole[:cut]))) == 2
    assert len(read_trace(make_trace(whole))) == 3 and len(read_trace(make_trace(whole), limit=1)) == 1
    with pytest.raises(TraceError, match=":4: not JSON"):
        read_trace(make_trace(whole[:end] + b"rubbish\n"))
    assert len(read_trace(make_trace([], n=None))) == 0


def test_damaged_xz(make_trace, tmp_path):
    whole = lzma.compress(lines_of([[index, 5, 3, []] for index in range(2000)]))
    cut = make_trace(whole[: len(whole) // 2], "cut.ptrace.xz")
    with pytest.raises(TraceError, match=r"cut\.ptrace\.xz:\d+: the xz stream is cut off"):
        read_trace(cut)
    for where in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[where] ^= 0x55
        path = make_trace(bytes(damaged), "bad.ptrace.xz")
        with pytest.raises(TraceError, match=r"bad\.ptrace\.xz:\d+: "):
            read_trace(path)
    plain = make_trace([GOOD], "plain.ptrace.xz")
    with pytest.raises(TraceError, match=r"plain\.ptrace\.xz:1: this is not an xz file"):
        read_trace(plain)


def test_giant_lines_and_bombs_end_at_the_limits(make_trace, monkeypatch):
    monkeypatch.setattr(ptrace, "MAX_LINE", 1000)
    monkeypatch.setattr(ptrace, "MAX_TEXT", 20_000)
    bomb = make_trace(b" " * 50_000_000, compress=True)
    with pytest.raises(TraceError, match=":1: a line must have at most 1000 bytes"):
        read_trace(bomb)
    long = make_trace([[index, 5, 3, []] for index in range(5000)], compress=True)
    with pytest.raises(TraceError, match=r":\d+: a trace must have at most 20000 bytes"):
        read_trace(long)


def test_what_is_not_a_readable_file(tmp_path):
    with pytest.raises(TraceError, match=r"missing\.ptrace: cannot be read: No such file or directory"):
        read_trace(tmp_path / "missing.ptrace")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match=r"cannot be read: embedded null"):
        read_trace("bad\0name")
    locked = tmp_path / "locked.ptrace"
    locked.write_bytes(b"")
    locked.chmod(0)
    if os.geteuid() != 0:  # root reads everything
        with pytest.raises(TraceError, match="cannot be read: Permission denied"):
            read_trace(locked)
