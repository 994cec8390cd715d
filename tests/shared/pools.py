"""Shared pools for tests: a unique name, and child processes that end without running handlers of pytest."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import traceback
from pathlib import Path

import pagepool
from pagepool import KvCachePool, KvLayout, PoolError
from pagepool.memory.shared_pages import read_pool

__all__ = [
    "LAYOUT",
    "WHOLE_PAGES",
    "PoolError",
    "allocated",
    "attach",
    "in_child",
    "kill",
    "lock_limit",
    "new_name",
    "remove",
    "run_script",
    "wait",
]

LIMIT_LOCK, LIMIT_OWNER = 30, 4096 + 16  # the byte that is locked, and where the file has the owner of the lock
OFD_SETLK = 37
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
WHOLE_PAGES = KvLayout(num_layers=1, num_kv_heads=1, head_dim=32, block_size=16, dtype="float32")  # 4,096 bytes each


def new_name():
    return f"test-{os.getpid()}-{os.urandom(4).hex()}"


def attach(shared, num_blocks=64, layout=LAYOUT, **options):
    return KvCachePool.from_layout(layout, num_blocks, shared=shared, **options)


def remove(name):
    os.unlink(f"/dev/shm/pagepool-{name}")


def lock_limit(path):
    """Lock the limit of a pool as a process of it does while it changes the limit, until this process ends."""
    fd = os.open(path, os.O_RDWR)
    fcntl.fcntl(fd, OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LIMIT_LOCK, 1, 0))
    slot = [process["pid"] for process in read_pool(fd)["processes"]].index(os.getpid())
    os.pwrite(fd, (1 << slot).to_bytes(8, "little"), LIMIT_OWNER)


def allocated(file):
    """Return the number of pages of 4,096 bytes that a file, given by path or descriptor, has in memory."""
    return os.stat(file).st_blocks // 8


def in_child(function, *arguments):
    """Run a function in a forked child; return its pid."""
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def wait(child):
    """Return the exit status of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(child):
    os.kill(child, signal.SIGKILL)
    return wait(child)


def run_script(name, *arguments):
    """Run a script of this folder with the imported pagepool; return what it printed."""
    command = [sys.executable, str(Path(__file__).parent / name), *arguments]
    paths = map(str, (Path(pagepool.__file__).parents[1], Path(__file__).parents[1]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout
