"""What keeps the calls of several threads apart: one at a time is inside a scheduler, the others use its inbox."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container
from itertools import count
from threading import RLock, get_ident

from pagepool.scheduling.request import Sequence

__all__ = ["Guard", "Inbox"]


class Guard:
    """Lets one call at a time into a scheduler, and none after one that an exception has cut short.

        with guard:
            guard.undo = ...    how `recover` takes back what the call has done so far, where that is not to stay
            ...

    While `is_checking` is set, the call has changed nothing yet: an exception does not cut it short. Raises
    RuntimeError, with nothing changed, when a call is under way, on this thread or another, or was cut short.
    """

    def __init__(self) -> None:
        # The call that is under way: "call" leads to its own tuple, of its thread. dict.setdefault is atomic with and
        # without the GIL, and nobody sees a call whose thread is not known; a lock could not be copied.
        self._inside: dict[str, tuple[int]] = {}
        self.is_interrupted = False
        self.is_checking = False
        self.undo: Callable[[], object] | None = None

    def __enter__(self) -> None:
        call = (get_ident(),)
        inside = self._inside.setdefault("call", call)
        if inside is not call:
            raise RuntimeError(self._reason(inside, call))

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None or self.is_checking:
            self.undo = None
            self.is_interrupted = self.is_checking = False
            self._inside.clear()
        else:
            self.is_interrupted = True

    def take_over(self) -> None:
        """Enter although an exception has cut a call short. RuntimeError while another thread is inside a call."""
        call = (get_ident(),)
        inside = self._inside.setdefault("call", call)
        if inside != call and not self.is_interrupted:
            raise RuntimeError(self._reason(inside, call))
        self._inside["call"] = call
        self.is_interrupted = self.is_checking = False

    def _reason(self, inside: tuple[int], call: tuple[int]) -> str:
        if self.is_interrupted:
            return "an exception has cut a call of the scheduler short: call recover()"
        if inside != call:
            return "another thread is inside a call of the scheduler"
        return "the scheduler is in the middle of a call: a finalizer or handler calls it, or the call was cut short"


class Inbox:
    """What was handed in since the last step, in its order: `items` has new sequences and ids that are to be cancelled.

    Any thread appends, also a finalizer or a handler in the middle of `number`; only the scheduler takes out.
    """

    def __init__(self, first: int = 1) -> None:
        self.items: deque[Sequence | int] = deque()
        self._numbers = count(first)
        # Without a GIL two threads could be given one number.
        self._lock = RLock()

    def number(self) -> int:
        """The id of the next sequence: 1, 2, ..."""
        with self._lock:
            return next(self._numbers)

    def drop_known(self, known: Container[int]) -> None:
        """Drop the first item if the scheduler knows it already: the call that took it in was cut short."""
        if self.items and isinstance(self.items[0], Sequence) and self.items[0].id in known:
            self.items.popleft()

    def __deepcopy__(self, memo: dict[int, object]) -> Inbox:
        with self._lock:
            first = next(self._numbers)
            self._numbers = count(first)
        other = Inbox(first)
        other.items = copy.deepcopy(self.items, memo)
        return other
