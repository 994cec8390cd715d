"""Thread safety of a scheduler: only one call runs in it; other threads use the inbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import RLock, get_ident

from pagepool.scheduling.request import Sequence

__all__ = ["Guard", "Inbox"]


class Guard:
    """Allows only one call in a scheduler, and no call after it was closed.

        with guard:
            ...     check arguments: an exception changes nothing
            guard.is_changing = True
            ...     change: an exception closes the scheduler

    Raises RuntimeError, and changes nothing, if another call of any thread is running or the scheduler is closed.
    """

    def __init__(self) -> None:
        # The running call: "call" maps to a tuple with its thread id. Each call makes a new tuple, so identity tells
        # whether this call has entered. dict.setdefault is atomic with and without the GIL.
        self._inside: dict[str, tuple[int]] = {}
        self.is_changing = False
        self.is_closed = False
        self.cause: BaseException | None = None  # the exception that closed the scheduler

    def __enter__(self) -> None:
        call = (get_ident(),)
        inside = self._inside.setdefault("call", call)
        if inside is not call:
            if inside != call:
                raise RuntimeError("another thread is inside a call of the scheduler")
            raise RuntimeError("the scheduler is in the middle of a call: called by a handler, or interrupted")
        if self.is_closed:
            self._inside.clear()
            self.check_open()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.is_changing:
            self.is_closed, self.cause = True, error
        self.is_changing = False
        self._inside.clear()

    def check_open(self) -> None:
        """Raise RuntimeError if the scheduler is closed, from the exception that closed it."""
        if self.is_closed:
            why = "" if self.cause is None else f": a call was interrupted by {type(self.cause).__name__}: {self.cause}"
            raise RuntimeError(f"the scheduler is closed{why}") from self.cause

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Enter a call that closes the scheduler. Allowed even if an earlier call of this thread was interrupted."""
        call = (get_ident(),)
        if self._inside.setdefault("call", call) != call:
            raise RuntimeError("another thread is inside a call of the scheduler")
        try:
            self.is_closed = True
            yield
        finally:
            self.is_changing = False
            self._inside.clear()


class Inbox:
    """`items`: new sequences and ids to cancel since the last step, in the order of arrival.

    Any thread may append, also in a finalizer or a signal handler during `number`. Only the scheduler removes items.
    """

    def __init__(self) -> None:
        self.items: deque[Sequence | int] = deque()
        self._numbers = count(1)
        # Without the GIL, two threads could get the same number.
        self._lock = RLock()

    def number(self) -> int:
        """Return the id of the next sequence: 1, 2, ..."""
        with self._lock:
            return next(self._numbers)
