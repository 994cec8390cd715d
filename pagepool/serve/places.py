"""Limit the number of choices that run, wait or are being tokenized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from starlette.requests import ClientDisconnect

from pagepool.engine.protocol import TextEngine
from pagepool.serve.errors import RequestError

__all__ = ["Places", "Waiting"]


class Places:
    """Counts the choices that run, wait or are being tokenized, up to a limit."""

    def __init__(self, engine: TextEngine, limit: int) -> None:
        self.engine, self.limit = engine, limit
        self.lock = Lock()
        self.num_waiting = 0  # choices that are not submitted to the engine yet

    def take(self, count: int) -> Waiting:
        """Count `count` more choices. Raises `RequestError` if this would exceed the limit."""
        if count > self.limit:
            raise RequestError(400, f"prompts times n must be at most {self.limit} choices, not {count}", param="n")
        with self.lock:
            running = self.engine.num_requests + self.num_waiting
            if running + count > self.limit:
                sentence = f"the server is full: {running} requests run or wait, {count} more exceed {self.limit}"
                raise RequestError(429, sentence)
            self.num_waiting += count
        return Waiting(self, count)


class Waiting:
    """The choices of one HTTP request that are not submitted to the engine yet."""

    def __init__(self, places: Places, count: int) -> None:
        self._places, self._count = places, count

    @contextmanager
    def hand_over(self) -> Iterator[None]:
        """Hold the lock while one choice is submitted to the engine. Raises `ClientDisconnect` after `end`."""
        with self._places.lock:
            if self._count == 0:
                raise ClientDisconnect
            yield
            self._count -= 1
            self._places.num_waiting -= 1

    def end(self) -> None:
        """Stop counting the choices that were not submitted."""
        with self._places.lock:
            self._places.num_waiting -= self._count
            self._count = 0
