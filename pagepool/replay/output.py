"""Where results go: files, and standard output as `-`. What cannot be written is said by name."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pagepool.replay.options import UsageError

__all__ = ["STDOUT", "check_writable", "drop_output", "is_closed", "written_to"]

STDOUT = "-"


def is_closed(stream: Any) -> bool:
    """Whether nothing can be written to a stream any more: closed, or its buffer detached. None is not closed."""
    try:
        return bool(getattr(stream, "closed", False))
    except ValueError:  # of one that is detached nothing can be asked
        return True


def check_writable(name: str) -> None:
    """Raise now what would be raised when all work is done."""
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
    """Within it that file is written. A reader of standard output that has gone is a `BrokenPipeError` as ever."""
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
    """Drop what standard output has not taken: Python would complain once more when it flushes at exit."""
    with suppress(AttributeError, OSError, ValueError):  # where it is none, no file or closed, nothing is left
        stream = sys.stdout
        file = stream.fileno()
        kept, nowhere = os.dup(file), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, file)
            stream.flush()
        finally:
            os.dup2(kept, file)
            os.close(kept)
            os.close(nowhere)


def _cannot(name: str, reason: int) -> UsageError:
    return UsageError(f"{'standard output' if name == STDOUT else name}: cannot be written: {os.strerror(reason)}")
