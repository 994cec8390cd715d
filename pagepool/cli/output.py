"""Output of the commands: tables on standard output, and files. The file name `-` means standard output."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pagepool.cli.usage import UsageError

__all__ = [
    "STDOUT",
    "check_writable",
    "drop_output",
    "is_closed",
    "leaves",
    "parsed",
    "printable",
    "show",
    "size_text",
    "written_to",
]

STDOUT = "-"


def is_closed(stream: Any) -> bool:
    """Return true if a stream is closed or its buffer is detached. False for None."""
    try:
        return bool(getattr(stream, "closed", False))
    except ValueError:  # every attribute of a detached stream raises it
        return True


def check_writable(name: str) -> None:
    """Raise `UsageError` if a file cannot be written. Called before the work, so that no results are lost."""
    path = Path(name)
    if name == STDOUT:
        reason = 0 if sys.stdout is not None and not is_closed(sys.stdout) else errno.EBADF
    elif path.is_dir():
        reason = errno.EISDIR
    elif not path.parent.exists():
        reason = errno.ENOENT
    elif not path.parent.is_dir():
        reason = errno.ENOTDIR
    else:
        reason = 0 if os.access(path if path.exists() else path.parent, os.W_OK) else errno.EACCES
    if reason:
        raise _cannot(name, reason)


@contextmanager
def written_to(name: str) -> Iterator[None]:
    """Turn an `OSError` in the body into a `UsageError` with the file's name.

    `BrokenPipeError` is not changed: the reader of standard output has closed it.
    """
    try:
        yield
        if name == STDOUT and sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if name == STDOUT:
            drop_output()
        raise _cannot(name, error.errno or errno.EIO) from None


def drop_output() -> None:
    """Drop the buffer of standard output. Otherwise Python would fail again when it flushes the buffer at exit."""
    with suppress(AttributeError, OSError, ValueError):  # None, not a file, or closed: nothing is buffered
        stream = sys.stdout
        file = stream.fileno()
        saved, nowhere = os.dup(file), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, file)
            stream.flush()
        finally:
            os.dup2(saved, file)
            os.close(saved)
            os.close(nowhere)


def _cannot(name: str, reason: int) -> UsageError:
    return UsageError(f"{'standard output' if name == STDOUT else name}: cannot be written: {os.strerror(reason)}")


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], footer: str = "") -> None:
    """Print a table on stdout.

    The first column is aligned to the left, all other columns to the right. An empty `header` is not printed.
    """
    if sys.stdout is None:
        return  # the parent process has closed it
    lines = [header, *rows] if header else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  " + "  ".join(cells).rstrip())
    if footer:
        print(footer)


def parsed(fingerprint: bytes) -> Any:
    """Return a fingerprint as JSON value, or as text if it is not JSON.

    >>> parsed(b'{"rope": 1}'), parsed(b"model 7")
    ({'rope': 1}, 'model 7')
    """
    text = fingerprint.decode("utf-8", "backslashreplace")
    try:
        value = json.loads(text)
        json.dumps(value, indent=2)  # needs more of the stack than `loads`
    except (ValueError, RecursionError):
        return text
    return value


def printable(value: Any) -> str:
    """Return a value as text of one line without control characters: other programs may have written it."""
    text = value if isinstance(value, str) else json.dumps(value)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as text, in MiB."""
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def leaves(value: Any, name: str = "", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Return the values in a fingerprint, with the keys that lead to each.

    >>> list(leaves({"rope": {"theta": 1}, "sizes": [1, 2]}))
    [('rope.theta', 1), ('sizes', [1, 2])]
    """
    if isinstance(value, dict) and value and depth:
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else key, depth - 1)
    else:
        yield name, value
