"""How idle OpenMP worker threads wait while the engine computes: spin or sleep.

torch runs its loops on the workers of GNU's libgomp, which makes a team of workers for each thread that runs a loop. A
worker that has finished its part of a loop spins for about a millisecond, then sleeps. If libgomp has more threads than
the process has CPUs, a worker spins for only 100 iterations, and almost every loop must wake it.

The engine computes in its own thread. If the model ran in another thread before, that thread's workers are too many,
and the engine's steps take 1.25 to 1.6 times as long. Under other load the opposite holds: a spinning worker takes the
CPU from a thread with work, and steps take several times as long.

While workers spin, attention runs on them. Otherwise they would compete with pagepool's own worker threads.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic

from pagepool.attention.cpu import _use_fork_join, cpu_info

__all__ = ["OpenmpWorkers"]

MAPS = Path("/proc/self/maps")  # the files that this process has loaded; only Linux has it
SOFT = 1  # `omp_pause_soft`
EMPTY_LOOP = ctypes.CDLL(None).free  # `free(NULL)` does nothing and needs no GIL
# "auto": workers sleep if the computing thread had a CPU for less than LEAST_SHARE of the last WINDOW seconds. Without
# other load the share is close to 1. They sleep for LEAST_CALM seconds, and for twice as long as the last time if the
# first window after it shows load again. So lasting load costs WINDOW seconds of slow steps in MOST_CALM.
WINDOW = 0.5
LEAST_SHARE = 0.7
LEAST_CALM = 4.0
MOST_CALM = 64.0
AFTER_WORK = 1.0  # seconds for which workers go on to sleep after a block of `giving_way`


class OpenmpWorkers:
    """Controls how the workers of libgomp wait, from the construction of this object until `close`.

    While they spin, they also run pagepool's kernels of the thread that calls `note_step`, from its first call on.

    Does nothing if libgomp is not loaded. With `OMP_WAIT_POLICY=passive` in the environment, workers always sleep.

    Parameters
    ----------
    mode : str
        "spin" ends the workers of the calling thread, so that the workers of the computing thread spin. "sleep" keeps a
        thread with more workers than CPUs, so that no worker spins. "auto" begins with "spin" and changes to "sleep"
        for 4 to 64 seconds whenever `note_step` detects other load, and around the blocks of `giving_way`.

    Raises
    ------
    ValueError
        If `mode` has another value.
    """

    def __init__(self, mode: str) -> None:
        if mode not in ("auto", "spin", "sleep"):
            raise ValueError(f"openmp must be 'auto', 'spin' or 'sleep', not {mode!r}")
        self._libraries = loaded_libraries()
        self._adapts = mode == "auto" and bool(self._libraries)
        self._sleeping: tuple[Thread, Event] | None = None
        self._until = 0.0  # time at which workers that sleep because of other load spin again
        self._calm = LEAST_CALM  # seconds of the next sleep
        self._seconds = self._cpu_seconds = 0.0  # wall time and CPU time of the steps in the current window
        self._lock = Lock()  # guards the fields above, and the next two
        self._num_blocks = 0  # blocks of `giving_way` that run
        self._placed: bool | None = None  # `is_sleeping` when kernels were placed, None before the first step
        for library in self._libraries:
            library.omp_pause_resource_all(SOFT)
        if mode == "sleep":
            self._sleep()

    @property
    def is_sleeping(self) -> bool:
        """True if workers sleep between two loops."""
        return self._sleeping is not None

    def note_step(self, seconds: float, cpu_seconds: float) -> None:
        """Choose between spinning and sleeping after a step of the computing thread, which calls this.

        Parameters
        ----------
        seconds : float
            Wall time of the step.
        cpu_seconds : float
            CPU time of the computing thread in the step.
        """
        with self._lock:
            if self._adapts:
                self._choose(seconds, cpu_seconds)
            if self._placed is not self.is_sleeping:
                self._place_kernels()

    def _choose(self, seconds: float, cpu_seconds: float) -> None:
        if self.is_sleeping:
            if monotonic() >= self._until and not self._num_blocks:
                self._wake()
            return
        self._seconds += seconds
        self._cpu_seconds += cpu_seconds
        if self._seconds >= WINDOW:
            if self._cpu_seconds < LEAST_SHARE * self._seconds:
                self._sleep()
                self._until = monotonic() + self._calm
                self._calm = min(2 * self._calm, MOST_CALM)
            else:
                self._calm = LEAST_CALM
                self._seconds = self._cpu_seconds = 0.0

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        """Let workers sleep during this block, in the mode "auto". Any thread may use it.

        Use it while another process of the lowest priority works. Workers that spin would leave it no CPU: it would
        take 30 times as long.
        """
        with self._lock:
            if self._adapts and not self.is_sleeping:
                self._sleep()
            self._num_blocks += 1  # the last step: without a thread, `_sleep` raises
        try:
            yield
        finally:
            with self._lock:
                self._num_blocks -= 1
                self._until = max(self._until, monotonic() + AFTER_WORK)

    def close(self) -> None:
        """End the thread that makes workers sleep, and its workers. May be called twice."""
        with self._lock:
            self._adapts = False
            self._wake()

    def _place_kernels(self) -> None:
        """Run the kernels of the calling thread on the workers of libgomp if these spin, otherwise on pagepool's."""
        self._placed, address, size = self.is_sleeping, 0, 0
        if not self.is_sleeping and len(self._libraries) == 1 and not is_passive():
            (library,) = self._libraries
            if library.omp_get_max_threads() >= cpu_info()["num_threads"]:
                size = library.omp_get_max_threads()  # as in the loops of torch
                address = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
        _use_fork_join(address, size)

    def _sleep(self) -> None:
        self._seconds = self._cpu_seconds = 0.0
        if self._libraries:
            begun, ended = Event(), Event()
            thread = Thread(target=self._hold, args=(begun, ended), name="pagepool-openmp", daemon=True)
            thread.start()
            begun.wait()
            self._sleeping = thread, ended

    def _hold(self, begun: Event, ended: Event) -> None:
        """Keep more OpenMP workers than CPUs until `ended`. libgomp stops them when this thread ends."""
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


def is_passive() -> bool:
    """Return whether the environment makes workers sleep between two loops."""
    return os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"


def loaded_libraries() -> list[ctypes.CDLL]:
    """Return all copies of libgomp that this process has loaded. Packages can bundle their own copy."""
    if not MAPS.exists():
        return []
    names = re.findall(r"(/.*/libgomp[^/\n]*\.so[^/\n]*)$", MAPS.read_text(), re.MULTILINE)
    return [ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY) for name in dict.fromkeys(names)]
