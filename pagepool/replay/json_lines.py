"""Lines of JSON from a file that nobody vouches for, plain or xz.

Every fault is a `TraceError` that names the file and the line. The limits bound time and memory whatever the file
holds: a line, the whole text after decompression, the digits of a number.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

__all__ = ["Fault", "JsonLines", "TraceError", "parse", "short"]

MAX_LINE = 16 << 20
MAX_TEXT = 1 << 30
MAX_DIGITS = 18

XZ_MAGIC = b"\xfd7zXZ\x00"


class TraceError(ValueError):
    """A file cannot be read; the message is one line with the file and, where there is one, the line."""


class Fault(Exception):
    """What is wrong with the line at hand; `JsonLines` adds where."""


class JsonLines:
    """The lines of a file, as bytes, each of bounded length, and no more than MAX_TEXT in all.

    As a context manager it turns whatever goes wrong inside, `Fault`s included, into `TraceError`.

    number    of the line read last, or asked for last, from 1 on
    is_whole  whether that one ends with a line break: the last of a file may be cut off
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
            raise self._at("needs more memory than there is") from None
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
            raise Fault(f"the line is longer than {MAX_LINE} bytes")
        if self._total > MAX_TEXT:
            raise Fault(f"the trace is larger than {MAX_TEXT} bytes")
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
    raise Fault(f"{name} is not a number of JSON")


def _short_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise Fault(f"a number of {len(digits)} digits is too large")
    return int(digits)


_decode = json.JSONDecoder(parse_constant=_no_constant, parse_int=_short_int).decode


def parse(line: bytes) -> Any:
    """The value of a line. Raises `Fault`."""
    try:
        return _decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Fault(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Fault(f"not JSON: {error.msg} at column {error.colno}" if line.strip() else "the line is empty") from None
    except RecursionError:
        raise Fault("the JSON is nested too deeply") from None


def short(value: Any) -> str:
    """A value from the file for a message: what it is, and a little of it."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = ascii(value)
    return text if len(text) <= 40 else text[:37] + "..."
