"""Lets the other threads fall asleep before a fork, if AddressSanitizer has replaced malloc.

The library of gcc 12 does not take the locks of its malloc for a fork, as the C library does. If another thread is in
malloc at that moment, for example because it begins, the child waits for ever at its first allocation. A thread that
sleeps is not in malloc.
"""

import ctypes
import os
import time
from pathlib import Path

LIMIT = 0.5  # s: threads of some tests never sleep


def is_asleep(task):
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"
    except (FileNotFoundError, ProcessLookupError):
        return True  # the thread has ended


def await_sleep():
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        # One thread is awake: the one that forks.
        awake = [task for task in Path("/proc/self/task").iterdir() if not is_asleep(task)]
        if len(awake) <= 1:
            return
        time.sleep(0.001)


if hasattr(ctypes.CDLL(None), "__asan_init"):
    os.register_at_fork(before=await_sleep)
