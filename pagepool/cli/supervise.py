"""Supervise a server: handle signals, stop if the engine fails or hangs, log figures every ten seconds."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from threading import Event
from time import monotonic
from typing import Any

__all__ = ["GRACE", "POLL", "Drain", "Figures", "watch"]

POLL = 0.25  # seconds between two checks of the engine and of files
DRAIN_POLL = 0.05  # seconds between two checks whether all requests have been answered
GRACE = 2.0  # seconds for clients to read the error of an aborted request
INTERVAL = 10.0  # seconds between two lines of figures
logger = logging.getLogger("pagepool")


class Drain:
    """Signal handler: the first signal waits `seconds` for requests, then aborts them. A second aborts them at once.

    While it waits, the port stays open, and new requests get status 503. Until `begin` the model is being loaded, and a
    signal ends the process. Python calls signal handlers in the main thread, which runs the event loop.
    """

    def __init__(self, server: Any, seconds: float) -> None:
        self._server, self._seconds = server, seconds
        self._engine: Any = None
        self._state: Any = None
        self._end: float | None = None  # when the port is closed at the latest

    def begin(self, engine: Any, state: Any) -> None:
        """Make signals wait for the requests of this engine. `state` is the one of its app."""
        self._state, self._engine = state, engine

    def __call__(self, number: int, frame: Any) -> None:
        if self._engine is None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        loop = asyncio.get_running_loop()
        if self._end is not None:
            loop.call_soon_threadsafe(self._state.stop)
            loop.call_soon_threadsafe(loop.call_later, GRACE, setattr, self._server, "force_exit", True)
            self._end = min(self._end, monotonic() + GRACE)
            return
        self._end = monotonic() + self._seconds + GRACE
        if count := self._engine.num_requests:
            noun = "1 request runs" if count == 1 else f"{count} requests run"
            sentence = f"pagepool: {noun}, waiting up to {self._seconds} s; a second signal aborts at once"
            print(sentence, file=sys.stderr, flush=True)
        loop.call_soon_threadsafe(self._state.drain)
        loop.call_soon_threadsafe(loop.call_later, self._seconds, self._state.stop)
        loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        """Close the port when all requests have been answered, or at the end of the time."""
        assert self._end is not None
        if not self._server.server_state.tasks or monotonic() > self._end:
            self._server.should_exit = True
        else:
            asyncio.get_running_loop().call_later(DRAIN_POLL, self._look)


class Figures:
    """Log lines about an engine's work since the previous line, with the words of vLLM's log."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._before = engine.stats()
        self._then = monotonic()

    def line(self) -> str | None:
        """Return the line, or None if the engine was idle."""
        now, before = self._engine.stats(), self._before
        seconds = monotonic() - self._then
        if seconds <= 0.0 or (not now["requests"] and now["ended"] == before["ended"]):
            return None
        self._before, self._then = now, self._then + seconds
        prompt, generated = ((now[name] - before[name]) / seconds for name in ("prompt_tokens", "generated_tokens"))
        running, waiting = now["scheduler"]["active"], now["scheduler"]["waiting"]
        used = capacity = 0
        for pool in self._engine.runner.pools:
            found = pool.stats()
            used, capacity = used + found["used"], capacity + found["capacity"]
        hits = now["cached_tokens"] - before["cached_tokens"]
        asked = now["prompt_tokens"] - before["prompt_tokens"]
        return (
            f"Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: {generated:.1f} tokens/s, "
            f"Running: {running} reqs, Waiting: {waiting} reqs, "
            f"KV cache usage: {100 * used / max(capacity, 1):.1f}%, "
            f"Prefix cache hit rate: {100 * min(hits / max(asked, 1), 1.0):.1f}%"
        )


def watch(engine: Any, server: Any, step_timeout: float, ended: Event, reload: Callable[[], None]) -> None:
    """Log figures and call `reload` until `ended`.

    Stops the server if the engine fails, and ends the process if a step hangs.
    """
    figures, due = Figures(engine), monotonic() + INTERVAL
    while not ended.wait(POLL):
        if engine.failure is not None:
            server.should_exit = True
            return
        if engine.seconds_in_step > step_timeout:
            engine.failure = TimeoutError(f"a step has not ended within {step_timeout:g} s")
            engine.is_accepting = False
            logger.critical("a step has not ended within %g s (--step-timeout): the process exits", step_timeout)
            ended.wait(GRACE)  # load balancers can read status 503 of `/health` in this time
            logging.shutdown()
            os._exit(1)  # a normal exit would wait for the stepping thread, which cannot be stopped
        reload()
        if monotonic() >= due:
            due += INTERVAL
            if (line := figures.line()) is not None:
                logger.info(line)
