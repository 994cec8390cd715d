"""Several threads and one scheduler: only one call is inside at a time; other threads use the inbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import RLock, get_ident

from pagepool.scheduling.request import Sequence

__all__ = ["Guard", "Inbox"]


class Guard:
    """Lets one call at a time into a scheduler, and no call once it is closed.

        with guard:
            ...     check: an exception has changed nothing
            guard.is_changing = True
            ...     change: an exception closes the scheduler

    Raises RuntimeError, with nothing changed, while a call is under way, on this thread or another, and once the
    scheduler is closed.
    """

    def __init__(self) -> None:
        # The call that is under way: "call" leads to its own tuple, of its thread. dict.setdefault is atomic with and
        # without the GIL, so a call is never seen without its thread.
        self._inside: dict[str, tuple[int]] = {}
        self.is_changing = False
        self.is_closed = False
        self.cause: BaseException | None = None  # the exception that has closed it

    def __enter__(self) -> None:
        call = (get_ident(),)
        inside = self._inside.setdefault("call", call)
        if inside is not call:
            if inside != call:
                raise RuntimeError("another thread is inside a call of the scheduler")
            raise RuntimeError("the scheduler is in the middle of a call: a handler calls it, or it was cut short")
        if self.is_closed:
            self._inside.clear()
            self.check_open()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.is_changing:
            self.is_closed, self.cause = True, error
        self.is_changing = False
        self._inside.clear()

    def check_open(self) -> None:
        """Raises RuntimeError, from the exception that has closed the scheduler, if one has."""
        if self.is_closed:
            why = "" if self.cause is None else f": a call was cut short by {type(self.cause).__name__}: {self.cause}"
            raise RuntimeError(f"the scheduler is closed{why}") from self.cause

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Lets a call in that closes the scheduler, also when a call of this thread was cut short on its way out."""
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
    """New sequences and ids to be cancelled, in the order in which they came since the last step: `items`.

    Any thread appends, also a finalizer or a handler in the middle of `number`; only the scheduler takes out.
    """

    def __init__(self) -> None:
        self.items: deque[Sequence | int] = deque()
        self._numbers = count(1)
        # Without a GIL two threads could be given one number.
        self._lock = RLock()

    def number(self) -> int:
        """The id of the next sequence: 1, 2, ..."""
        with self._lock:
            return next(self._numbers)
