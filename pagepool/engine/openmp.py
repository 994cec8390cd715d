"""What OpenMP's worker threads do while the engine's thread computes: look for work, or sleep.

torch's loops run on workers of GNU's libgomp, which makes some for each thread that runs a loop. A worker that has
finished its part of a loop looks for the next loop for about a millisecond, then sleeps. While libgomp has more threads
than the process has CPUs, a worker looks only 100 times, and almost every loop must wake it.

The engine computes in a thread of its own. The workers that tried the model in another thread are then too many, and
the engine's steps become 1.25 to 1.6 times as long. Beside other load the opposite holds: a worker that looks for work
takes the CPU from a thread that has some, and steps become several times as long.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from threading import Event, Thread
from time import monotonic

__all__ = ["OpenmpWorkers"]

MAPS = Path("/proc/self/maps")  # the files that this process has loaded; only Linux has it
SOFT = 1  # `omp_pause_soft`
EMPTY_LOOP = ctypes.CDLL(None).free  # of a null pointer: does nothing, and needs no GIL
# "auto": workers sleep for CALM seconds after a time of WINDOW seconds in which the thread had the CPU for less than
# LEAST_SHARE of the time. A step in which all workers run has a share of nearly 1.
WINDOW = 0.5
LEAST_SHARE = 0.7
CALM = 60.0


class OpenmpWorkers:
    """How the workers of libgomp wait, from the making of this object until `close`.

    Does nothing where libgomp is not loaded. With `OMP_WAIT_POLICY=passive` in the environment, workers always sleep.

    Parameters
    ----------
    mode : str
        "spin" ends the workers of the calling thread, so that those of the thread that computes look for work.
        "sleep" keeps a thread with more workers than there are CPUs, so that no worker looks for work.
        "auto" begins with "spin", and changes to "sleep" for a minute whenever `note_step` finds other load.

    Raises
    ------
    ValueError
        The mode is not one of these.
    """

    def __init__(self, mode: str) -> None:
        if mode not in ("auto", "spin", "sleep"):
            raise ValueError(f"openmp must be 'auto', 'spin' or 'sleep', not {mode!r}")
        self._libraries = loaded_libraries()
        self._adapts = mode == "auto" and bool(self._libraries)
        self._sleeping: tuple[Thread, Event] | None = None
        self._until = 0.0  # when workers that sleep because of other load look for work again
        self._seconds = self._cpu_seconds = 0.0  # of the steps in the window
        for library in self._libraries:
            library.omp_pause_resource_all(SOFT)
        if mode == "sleep":
            self._sleep()

    @property
    def is_sleeping(self) -> bool:
        """Whether workers sleep between two loops."""
        return self._sleeping is not None

    def note_step(self, seconds: float, cpu_seconds: float) -> None:
        """Change from looking for work to sleeping, or back, after a step of the thread that computes.

        Parameters
        ----------
        seconds : float
            How long the step took.
        cpu_seconds : float
            How long the thread had a CPU in it.
        """
        if not self._adapts:
            return
        if self.is_sleeping:
            if monotonic() >= self._until:
                self._wake()
            return
        self._seconds += seconds
        self._cpu_seconds += cpu_seconds
        if self._seconds >= WINDOW:
            if self._cpu_seconds < LEAST_SHARE * self._seconds:
                self._sleep()
                self._until = monotonic() + CALM
            self._seconds = self._cpu_seconds = 0.0

    def close(self) -> None:
        """End the thread that lets workers sleep, and its workers. May be called again."""
        self._adapts = False
        self._wake()

    def _sleep(self) -> None:
        if self._libraries:
            begun, ended = Event(), Event()
            thread = Thread(target=self._hold, args=(begun, ended), name="pagepool-openmp", daemon=True)
            thread.start()
            begun.wait()
            self._sleeping = thread, ended

    def _hold(self, begun: Event, ended: Event) -> None:
        """Have workers until `ended`: libgomp ends them with the thread."""
        for library in self._libraries:
            library.GOMP_parallel(EMPTY_LOOP, None, len(os.sched_getaffinity(0)) + 1, 0)
        begun.set()
        ended.wait()

    def _wake(self) -> None:
        if self._sleeping is not None:
            thread, ended = self._sleeping
            ended.set()
            thread.join()
            self._sleeping = None


def loaded_libraries() -> list[ctypes.CDLL]:
    """The libgomps that this process has loaded: a package may bring one of its own."""
    if not MAPS.exists():
        return []
    names = re.findall(r"(/.*/libgomp[^/\n]*\.so[^/\n]*)$", MAPS.read_text(), re.MULTILINE)
    return [ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY) for name in dict.fromkeys(names)]
