"""MemoryBudget: a limit in bytes for the memory of several shared pools together."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from pagepool._arguments import integer, wrong
from pagepool.errors import PoolError, refuse_copy
from pagepool.memory import shared_files as files
from pagepool.memory.shared_pages import GRAIN, cost_of, reclaim

__all__ = ["MemoryBudget"]

FRACTION = 64  # a pool grows by this part of the budget, so that it seldom needs the lock
CONTENT = re.compile(rb"pagepool budget 1\nbytes (\d{1,18})\n")
PATIENCE = 10.0  # seconds until a call fails because another process has the lock

_locked: set[int] = set()  # descriptors with the lock, which a child must not keep after fork


def _drop_locks() -> None:
    while _locked:
        os.close(_locked.pop())


os.register_at_fork(after_in_child=_drop_locks)


def _open_pool(path: Path) -> int | None:
    """Return a descriptor of a file of this user, None for other files."""
    try:
        found = path.lstat()
        is_pool = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW) if is_pool else None
    except FileNotFoundError:
        return None


class MemoryBudget:
    """A limit in bytes for the memory of several shared pools together, on one host.

    Pools of different models and processes take their memory from one budget: `KvCachePool.from_layout` has it as
    `budget`. A pool that needs more takes what the budget has left, then memory that other pools do not use: free
    blocks, and cached blocks that no process holds. Their processes need not cooperate. Blocks in use are never taken.

    Parameters
    ----------
    name : str
        1 to 100 letters, digits, `.`, `_` or `-`. The first process with this name makes the file
        `/dev/shm/pagepool.budget-NAME`, which outlives it.
    bytes : int
        The limit. All processes must give the same.

    Attributes
    ----------
    name : str
        The name.
    bytes : int
        The limit.

    Raises
    ------
    ValueError
        The budget exists with another limit. The message has both.
    PoolError
        The file is damaged or belongs to another user.

    Notes
    -----
    A pool counts with all memory of its file: header, index and pages, rounded up to 2 MiB. The kernel counts this
    memory, so a killed process cannot lose any. The bound holds at every moment. It does not include a pool whose file
    was removed while processes had it; such a pool cannot grow.

    Examples
    --------
    >>> import os
    >>> from pagepool import KvCachePool, KvLayout
    >>> budget = MemoryBudget("example", 64 << 20)
    >>> layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64)
    >>> pool = KvCachePool.from_layout(layout, 64, max_blocks=2048, shared="example", budget=budget)
    >>> budget.pools(), budget.used <= budget.bytes
    ({'example': 3145728}, True)
    >>> pool.close()
    >>> os.unlink("/dev/shm/pagepool-example")
    >>> os.unlink("/dev/shm/pagepool.budget-example")
    """

    MOMENT = 0.1  # seconds until an engine gives up to grow

    __reduce__ = refuse_copy

    def __init__(self, name: str, bytes: int) -> None:
        if not isinstance(name, str):
            raise wrong("name", "a str", name)
        self.name = name
        self.bytes = integer("bytes", bytes, 1, 10**18 - 1)
        self._least = max(GRAIN, self.bytes // FRACTION)
        self._path = files.path_of(name, "memory budget", "pagepool.budget-")
        self._unfinished = files.path_of(name, prefix="pagepool.new-")
        os.close(self._open())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.used} of {self.bytes} bytes>"

    @property
    def used(self) -> int:
        """Bytes of memory of all pools now, as the kernel counts them."""
        return sum(self.pools().values())

    def pools(self) -> dict[str, int]:
        """Return the names of the pools with their bytes of memory."""
        return {name: size for name, (_, size, _) in self._members().items()}

    def most_blocks(self, block_bytes: int, block_size: int) -> int:
        """Return how many blocks of so many bytes and tokens a pool can have that has the whole budget."""
        index = 88 + 4 * block_size  # most bytes of a block in header and index
        return max(0, self.bytes - 2 * GRAIN) // (block_bytes + index)

    def _open(self) -> int:
        """Return a new descriptor of the file, which is made if it does not exist."""
        while (fd := files.open_private(self._path)) is None:
            fd = files.unnamed_file()
            try:
                os.write(fd, b"pagepool budget 1\nbytes %d\n" % self.bytes)
                files.publish(fd, self._path)
            finally:
                os.close(fd)
        found = CONTENT.fullmatch(os.pread(fd, 100, 0))
        if found is None:
            os.close(fd)
            raise PoolError(f"{self._path} is not a memory budget of this version of pagepool, or it is damaged")
        if int(found[1]) != self.bytes:
            os.close(fd)
            raise ValueError(f"the memory budget {self.name!r} has {int(found[1])} bytes, not {self.bytes}")
        return fd

    @contextmanager
    def _lock(self, seconds: float | None = None) -> Iterator[bool]:
        """Hold the lock, under which alone the pools grow. False if another process keeps it for so long."""
        fd = self._open()
        _locked.add(fd)
        end, has_it = monotonic() + (PATIENCE if seconds is None else seconds), False
        try:
            while not has_it:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    has_it = True
                except BlockingIOError:
                    if monotonic() > end:
                        break
                    sleep(0.001)
            if has_it:
                self._unfinished.unlink(missing_ok=True)  # its maker was killed
            yield has_it
        finally:
            if has_it:
                self._unfinished.unlink(missing_ok=True)
            _locked.discard(fd)
            os.close(fd)

    def _refuse_wait(self) -> PoolError:
        return PoolError(f"another process has locked the memory budget {self.name!r} for {PATIENCE} s")

    def _new_file(self, wanted: int, pool: str) -> int:
        """Return a descriptor of an empty file for `wanted` bytes. `_lock` removes its name. Requires the lock."""
        room = self._room(wanted, takes=True)
        if room < wanted:
            has = f"the memory budget {self.name!r} of {self.bytes} bytes has {room} left"
            raise OSError(errno.ENOSPC, f"the shared pool {pool!r} needs {wanted} bytes, {has}")
        return os.open(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _members(self) -> dict[str, tuple[int, int, int]]:
        """Return for each pool its bytes of the budget, its bytes of memory and its inode."""
        found = {}
        for entry in os.listdir(files.FOLDER):
            fd = _open_pool(files.FOLDER / entry) if entry.startswith(files.PREFIX) else None
            if fd is not None:
                try:
                    budget, cost = cost_of(fd)
                    if budget == self.name:
                        status = os.fstat(fd)
                        found[entry.removeprefix(files.PREFIX)] = cost, status.st_blocks * 512, status.st_ino
                finally:
                    os.close(fd)
        return found

    def _room(self, wanted: int, takes: bool, own: int | None = None) -> int:
        """Return by how many bytes the file `own`, or a new one, may grow: a multiple of 2 MiB. Requires the lock.

        With `takes`, takes idle memory of other pools until there are `wanted` bytes.
        """
        inode = None if own is None else os.fstat(own).st_ino
        members = self._members()
        room = self._left(members)
        for name in sorted(members, key=lambda name: members[name][0], reverse=True) if takes else ():
            before = -1
            while before < room < wanted:
                fd = _open_pool(files.FOLDER / f"{files.PREFIX}{name}")
                if fd is not None:  # from its own pool, it takes only blocks of killed processes
                    reclaim(fd, 0 if members[name][2] == inode else wanted - room)
                before, room = room, self._left(self._members())
        return room

    def _left(self, members: dict[str, tuple[int, int, int]]) -> int:
        return max(0, self.bytes - sum(cost for cost, _, _ in members.values())) // GRAIN * GRAIN
