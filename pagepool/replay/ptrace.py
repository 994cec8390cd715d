"""Reads `ptrace-1` traces: JSON lines, plain or xz. Traces are untrusted input.

    {"fmt":"ptrace-1","name":"azure2023_conv","block":0,"unit":"ms","licence":"CC-BY-4.0","n":19366}
    [arrival, prompt tokens, output tokens, [start, length, start, length, ...]]
    ...

`unit` is "s", "ms", "us" or null (no arrivals: all requests arrive at time 0). `n` is the number of records. A recorder
writes null until it is closed; then every complete line counts. The runs are the ids of the prompt's prefix blocks.

A file of sessions has one session per line, `{"s", "tool", "sys", "r": [[arrival, in, out, think, api, [runs]], ...]}`.
Its requests arrive at their recorded times, even if the previous request has not ended. `think` is the pause before a
request, and `api` its duration, in seconds.

Every fault is a `TraceError` that names the file and the line. The limits below bound time and memory for every input:
length of a line, decompressed size, digits of a number, requests, tokens, times.
"""

from __future__ import annotations

import json
import lzma
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

__all__ = ["MAX_TOKENS", "Fault", "JsonLines", "Trace", "TraceError", "parse", "read_trace", "short"]

MAX_LINE = 16 << 20
MAX_TEXT = 1 << 30
MAX_DIGITS = 18

XZ_MAGIC = b"\xfd7zXZ\x00"

MAX_REQUESTS = 5_000_000
MAX_TOKENS = 1 << 24  # limit for the prompt and for the output of a request
MAX_TIME_US = 10**15  # 31 years

MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1, None: 0}


class TraceError(ValueError):
    """A file cannot be read. The message is one sentence with the file and, if known, the line."""


class Fault(Exception):
    """A fault of the current line. `JsonLines` adds the file and the line number."""


class JsonLines:
    """The lines of a file, plain or xz, as bytes: at most MAX_LINE bytes per line, at most MAX_TEXT bytes in total.

    It is a context manager. It turns a `Fault` or a read error in its body into a `TraceError`.

    Attributes
    ----------
    number : int
        Number of the last line, counted from 1. At the end of the file: the number of lines + 1.
    is_whole : bool
        True if the last line ends with a line break. The last line of a file may be cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self.number = 0
        self.is_whole = True
        self._path = path
        self._total = 0

    def __enter__(self) -> JsonLines:
        try:
            self._raw = open(self._path, "rb")
            self.number = 0
            self._stream: BinaryIO | lzma.LZMAFile = self._raw
            packed = self._raw.peek(len(XZ_MAGIC)).startswith(XZ_MAGIC)
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            raise self._unreadable(error) from None
        if packed:
            self._stream = lzma.LZMAFile(self._raw)
        elif str(self._path).endswith(".xz"):
            self._raw.close()
            self.number = 1
            raise self._at("this is not an xz file")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._raw.close()
        if isinstance(error, Fault):
            raise self._at(str(error)) from None
        if isinstance(error, EOFError):
            raise self._at("the xz stream is cut off") from None
        if isinstance(error, lzma.LZMAError):
            raise self._at(f"the xz stream is damaged ({error})") from None
        if isinstance(error, MemoryError):
            raise self._at("out of memory") from None
        if isinstance(error, OSError):
            raise self._unreadable(error) from None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self.number += 1
        line = self._stream.readline(MAX_LINE + 1)
        if not line:
            raise StopIteration
        self._total += len(line)
        if len(line) > MAX_LINE:
            raise Fault(f"a line must have at most {MAX_LINE} bytes")
        if self._total > MAX_TEXT:
            raise Fault(f"a trace must have at most {MAX_TEXT} bytes")
        self.is_whole = line.endswith(b"\n")
        return line

    def _shown(self) -> str:
        where = str(self._path)
        return where if where.isprintable() else ascii(where)

    def _at(self, message: str) -> TraceError:
        return TraceError(f"{self._shown()}:{self.number}: {message}")

    def _unreadable(self, error: Exception) -> TraceError:
        return TraceError(f"{self._shown()}: cannot be read: {getattr(error, 'strerror', None) or error}")


def _no_constant(name: str) -> NoReturn:
    raise Fault(f"{name} is not a JSON number")


def _short_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise Fault(f"a number must have at most {MAX_DIGITS} digits, not {len(digits)}")
    return int(digits)


_decode = json.JSONDecoder(parse_constant=_no_constant, parse_int=_short_int).decode


def parse(line: bytes) -> Any:
    """Return the value of a line. Raises `Fault`."""
    try:
        return _decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Fault(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Fault(f"not JSON: {error.msg} at column {error.colno}" if line.strip() else "the line is empty") from None
    except RecursionError:
        raise Fault("the JSON is nested too deeply") from None


def short(value: Any) -> str:
    """Shorten a value from the file for a message."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = ascii(value)
    return text if len(text) <= 40 else text[:37] + "..."


@dataclass
class Trace:
    """A trace in memory, in the order of arrival: `arrival_us[i]`, `prompt[i]` and `output[i]` are one request."""

    name: str
    licence: str
    block: int
    arrival_us: array[int] = field(default_factory=lambda: array("q"))
    prompt: array[int] = field(default_factory=lambda: array("i"))
    output: array[int] = field(default_factory=lambda: array("i"))
    session: array[int] = field(default_factory=lambda: array("i"))  # the session of request i; 0: none
    think_us: array[int] = field(default_factory=lambda: array("q"))  # from the end of the session's previous request
    runs: list[list[int]] | None = None  # block ids of each prompt as [start, length, ...], if they were read

    def __len__(self) -> int:
        return len(self.arrival_us)

    def sessions(self) -> list[list[int]]:
        """Return the requests of each session, in the order of the file, then each request without a session."""
        sessions: dict[int, list[int]] = {}
        for index, session in enumerate(self.session):
            sessions.setdefault(session, []).append(index)
        alone = sessions.pop(0, [])
        return [sessions[number] for number in sorted(sessions)] + [[index] for index in alone]

    def longest(self) -> int:
        """Return the maximum number of tokens of one request, prompt and output together; 0 for an empty trace."""
        return max(map(int.__add__, self.prompt, self.output), default=0)


def read_trace(path: str | Path, limit: int | None = None, *, prefixes: bool = False) -> Trace:
    """Read the trace at `path`, or its first `limit` requests. `prefixes` includes the runs of their blocks.

    Raises `TraceError`.
    """
    with JsonLines(path) as lines:
        trace, count, scale = _header(next(lines, b""))
        if prefixes:
            trace.runs = []
        record = 0
        while count is None or record < count:
            if limit is not None and len(trace) >= limit:
                break
            line = next(lines, None)
            if line is None:
                if count is None:
                    break
                raise Fault(f"the header announces {count} records, but the file ends after {record}")
            if count is None and not lines.is_whole:
                break  # the recorder was interrupted while it wrote this line
            _record(trace, parse(line), record, scale, limit)
            record += 1
        else:
            if next(lines, None) is not None:
                raise Fault(f"the header announces {count} records, but the file has more")
    return _by_arrival(trace)


def _header(line: bytes) -> tuple[Trace, int | None, int]:
    """Return an empty trace, the number of records (None: every complete line), and the microseconds per unit."""
    if not line:
        raise Fault("the file is empty")
    head = parse(line)
    if not isinstance(head, dict) or head.get("fmt") != "ptrace-1":
        raise Fault('the first line must be a header with "fmt":"ptrace-1"')
    unit = head.get("unit")
    if not (unit is None or isinstance(unit, str)) or unit not in MICROSECONDS:
        raise Fault('unit must be "s", "ms", "us" or null')
    for key in ("name", "licence"):
        text = head.get(key)
        if not isinstance(text, str) or len(text) > 200 or not text.isprintable():
            raise Fault(f"{key} must be a printable text of at most 200 characters")
    block = _whole("block", head.get("block"), 0, 1 << 20)
    count = None if head.get("n", 0) is None else _whole("n", head.get("n"), 0, MAX_REQUESTS)
    return Trace(head["name"], head["licence"], block), count, MICROSECONDS[unit]


def _whole(what: str, value: Any, low: int, high: int) -> int:
    """Return `value`. Raises `Fault` if it is not an int from `low` to `high`."""
    if type(value) is not int:
        raise Fault(f"{what} must be a whole number, not {short(value)}")
    if not low <= value <= high:
        raise Fault(f"{what} must be from {low} to {high}, not {value}")
    return value


def _record(trace: Trace, record: Any, number: int, scale: int, limit: int | None) -> None:
    """Add record `number` of the file, a request or a session, until the trace has `limit` requests."""
    if isinstance(record, dict):
        requests = record.get("r")
        if not isinstance(requests, list):
            raise Fault('a session must have a list of requests, "r"')
        room = MAX_REQUESTS if limit is None else limit
        for index, request in enumerate(requests[: room - len(trace)]):
            if not isinstance(request, list) or len(request) != 6:
                raise Fault(f"request {index + 1} of the session must be [arrival, in, out, think, api, [runs]]")
            _request(trace, [*request[:3], request[5]], number + 1, scale)
            trace.think_us.append(_microseconds(request[3], 1_000_000, "the think time"))
    elif isinstance(record, list) and len(record) == 4:
        _request(trace, record, 0, scale)
        trace.think_us.append(0)
    else:
        raise Fault("a request must be [arrival, prompt tokens, output tokens, [runs]]")


def _request(trace: Trace, record: list[Any], session: int, scale: int) -> None:
    """Add one request to `trace`."""
    arrival, prompt, output, runs = record
    if not isinstance(runs, list) or len(runs) % 2:
        raise Fault("the runs must be a list of pairs [start, length, ...]")
    for value in runs:
        if type(value) is not int or value < 0:
            raise Fault(f"the runs must be whole numbers from 0 up, not {short(value)}")
    if len(trace) >= MAX_REQUESTS:
        raise Fault(f"a trace must have at most {MAX_REQUESTS} requests")
    prompt = _whole("the number of prompt tokens", prompt, 1, MAX_TOKENS)
    output = _whole("the number of output tokens", output, 0, MAX_TOKENS)
    trace.arrival_us.append(_microseconds(arrival, scale))
    trace.prompt.append(prompt)
    trace.output.append(output)
    trace.session.append(session)
    if trace.runs is not None:
        if trace.block and sum(runs[1::2]) > -(-prompt // trace.block):
            raise Fault(f"{prompt} tokens cannot have {sum(runs[1::2])} blocks of {trace.block}")
        trace.runs.append(runs)


def _microseconds(time: Any, scale: int, what: str = "the arrival") -> int:
    if time is None:
        return 0
    if type(time) is not int and type(time) is not float:
        raise Fault(f"{what} must be a number or null, not {short(time)}")
    if not scale:
        raise Fault("the header must have a unit, because the request has an arrival")
    if not math.isfinite(time) or not 0 <= time * scale <= MAX_TIME_US:
        raise Fault(f"{what} must be from 0 to {MAX_TIME_US // scale}, not {time}")
    return round(time * scale)


def _by_arrival(trace: Trace) -> Trace:
    """Sort by arrival. Requests with the same time keep the order of the file."""
    times = trace.arrival_us
    order = sorted(range(len(times)), key=times.__getitem__)
    if trace.runs is not None:
        trace.runs = [trace.runs[i] for i in order]
    for column in ("arrival_us", "prompt", "output", "session", "think_us"):
        values = getattr(trace, column)
        setattr(trace, column, array(values.typecode, (values[i] for i in order)))
    return trace


# DOC
