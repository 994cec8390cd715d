"""decode with 2 threads while another process uses one core: limit.py --busy.

A busy-looping process is pinned to each core in turn. It is stopped while the undisturbed times are measured.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import mean, median, quantiles

from sides.common import Case, times_of, write_case
from sides.ours import Side

AT_MOST = 1.5  # limit of the disturbed time, in multiples of the undisturbed single-thread time
CALLS = (20, 5000)  # least and most calls of a round: the slowest calls are the question


def spin(core):
    os.sched_setaffinity(0, {core})
    while True:
        pass


class Spinner:
    """Context manager: a process spins on `core` inside the `with` block, and is stopped outside of it."""

    def __init__(self, core):
        self.process = multiprocessing.get_context("fork").Process(target=spin, args=(core,), daemon=True)
        self.process.start()
        os.kill(self.process.pid, signal.SIGSTOP)

    def __enter__(self):
        os.kill(self.process.pid, signal.SIGCONT)
        time.sleep(0.05)  # lets the process start to run on its core

    def __exit__(self, *_):
        os.kill(self.process.pid, signal.SIGSTOP)
        time.sleep(0.01)

    def quit(self):
        self.process.kill()
        self.process.join()


def busy(options):
    """Prints and returns a row for each shape and dtype."""
    spinners = [Spinner(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    rows = []
    print("shape dtype     times in us: median, mean, 99th percentile")
    try:
        for shape in options.shape:
            with tempfile.TemporaryDirectory() as folder:
                write_case(shape, Path(folder))
                for dtype in options.dtype:
                    rows.append(measure(Side(Case(shape, dtype, folder)), spinners, options))
    finally:
        for spinner in spinners:
            spinner.quit()
    return {"busy": rows}


def measure(side, spinners, options):
    calls = {threads: next(iter(side.calls(threads).values())).run for threads in (1, 2)}
    times = {"1 thread": [], "2 threads": [], "1 thread, one core busy": [], "2 threads, one core busy": []}
    for turn in range(options.rounds):
        for threads, call in calls.items():
            times[f"{threads} thread{'s' * (threads > 1)}"] += times_of(call, turn, options.seconds, *CALLS)[0]
        for spinner in spinners:
            with spinner:
                for threads, call in calls.items():
                    name = f"{threads} thread{'s' * (threads > 1)}, one core busy"
                    times[name] += times_of(call, turn, options.seconds, *CALLS)[0]
    row = {"shape": side.case.shape, "dtype": side.case.dtype, "us": {}}
    for name, spent in times.items():
        found = {"median": median(spent), "mean": mean(spent), "p99": quantiles(spent, n=100)[98]}
        row["us"][name] = {key: 1e6 * value for key, value in found.items()}
        shown = "  ".join(f"{1e6 * value:9.1f}" for value in found.values())
        print(f"{row['shape']:5} {row['dtype']:9} {name:26} {shown}")
    alone, disturbed = row["us"]["1 thread"], row["us"]["2 threads, one core busy"]
    row["ratio"] = disturbed["median"] / alone["median"]
    row["mean_ratio"] = disturbed["mean"] / alone["mean"]
    print(
        f"{'':15} 2 threads with one core busy over 1 thread: {row['ratio']:.2f} by medians, "
        f"{row['mean_ratio']:.2f} by means, at most {AT_MOST}",
        flush=True,
    )
    return row
