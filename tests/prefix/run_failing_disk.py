"""Run with failing_disk preloaded: kill a process at changes of a store's files, or let these changes fail.

    run_failing_disk.py FOLDER SAMPLE ERRNO

ERRNO 0: a child is killed at one change, at every one or at SAMPLE of them, and the store is opened and read. Otherwise
this and all later changes fail with ERRNO for a while. Prints a JSON object with counts.
"""

import ctypes
import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
from store_world import SMALL, World, prompt

DISK = ctypes.CDLL(None)
SEED = 4


def number(name):
    return ctypes.c_long.in_dll(DISK, name)


def serve(path, chosen, error):
    """Serve prompts; the store evicts pages, forgets some and is closed. Returns the number of log lines."""
    number("disk_errno").value = error
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("pagepool").handlers = [handler]
    number("disk_countdown").value = chosen
    number("disk_changes").value = 0
    world = World(path, max_bytes=SMALL)
    random = np.random.default_rng(SEED)
    for step in range(30):
        world.run(prompt(random))
        if step % 3 == 0:
            world.cache.evict(16)
        world.cache.flush()
        if step == 11:
            world.cache.discard(world.cache.references()[:2])
        if step == 20:
            world.store.flush()
    if error:
        number("disk_countdown").value = 0  # the disk works again
        world.run(range(100_000, 100_020))
        world.cache.flush()
    world.cache.check()
    world.allocator.check(others=0)
    world.stop()
    return len(lines)


def in_child(function):
    """Return the status of a child that runs a function, and the JSON that it returns."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(read)
            found = function()
            os.write(write, json.dumps(found).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, json.loads(text) if text else None


def check(path):
    """Open the store and read every prompt. Returns the number of right pages; a wrong one raises."""
    world = World(path, num_blocks=64, max_bytes=SMALL)
    random = np.random.default_rng(SEED)
    found = sum(world.run(prompt(random)) for _ in range(30))
    world.cache.check()
    assert world.store.stats()["bytes"] <= SMALL
    world.stop()
    return found


def main():
    folder, sample, error = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    status, changes = in_child(lambda: (serve(folder / "whole", 0, 0), number("disk_changes").value)[1])
    assert status == 0 and changes > 100, (status, changes)
    places = np.unique(np.linspace(1, changes, min(sample, changes)).astype(int)).tolist()
    counts = {"changes": changes, "places": len(places), "killed": 0, "found": 0, "lines": []}
    for place in places:
        path = folder / "store"
        shutil.rmtree(path, ignore_errors=True)
        status, lines = in_child(lambda path=path, place=place: serve(path, place, error))
        assert status == 0 or (status == -signal.SIGKILL and not error), f"status {status} at change {place}"
        counts["killed"] += status == -signal.SIGKILL
        counts["lines"] += [lines] if error else []
        status, found = in_child(lambda path=path: check(path))
        assert status == 0, f"the store is wrong after change {place}"
        counts["found"] += found
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
