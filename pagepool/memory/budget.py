"""MemoryBudget: a limit in bytes for the memory of several shared pools together."""

from __future__ import annotations

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

FRACTION = 64  # a pool grows by this part of the budget, so that it seldom needs the lock,
MOST_AT_ONCE = 64 << 20  # but not by more: a step of its engine waits until the system has allocated the memory
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
    except (FileNotFoundError, PermissionError):  # it was removed meanwhile, and another user has made one
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

    __reduce__ = refuse_copy

    def __init__(self, name: str, bytes: int) -> None:
        if not isinstance(name, str):
            raise wrong("name", "a str", name)
        self.name = name
        self.bytes = integer("bytes", bytes, 1, 10**18 - 1)
        self.step = max(GRAIN, min(self.bytes // FRACTION, MOST_AT_ONCE))  # bytes by which a pool grows
        self._path = files.path_of(name, "memory budget", "pagepool.budget-")
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
            except OSError as error:
                left = os.fstatvfs(fd)
                room = f"{files.FOLDER} has {left.f_bavail * left.f_frsize} bytes available"
                raise OSError(error.errno, f"cannot make {self._path}: {error.strerror}; {room}") from error
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
    def grant(self, fd: int | None, wanted: int, takes: bool = True, seconds: float | None = None) -> Iterator[int]:
        """Lock the budget; yield by how many bytes the pool of `fd`, or a new one, may grow until the block ends.

        The number is a multiple of 2 MiB and can be above or below `wanted`; with 0, the pool may fill its last 2 MiB.
        With `takes`, takes idle memory of other pools until there are `wanted` bytes. The number is -1 if the file of
        the pool was removed, or if another process keeps the lock for `seconds`. Without `seconds`, that raises
        `PoolError` after 10 s. Internal.
        """
        lock = self._open()
        _locked.add(lock)
        try:
            if self._acquire(lock, PATIENCE if seconds is None else seconds):
                yield self._room(wanted, takes, fd)
            elif seconds is None:
                raise PoolError(f"another process has locked the memory budget {self.name!r} for {PATIENCE} s")
            else:
                yield -1
        finally:
            _locked.discard(lock)
            os.close(lock)

    def _acquire(self, fd: int, seconds: float) -> bool:
        end = monotonic() + seconds
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if monotonic() > end:
                    return False
                sleep(0.001)

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

    def _room(self, wanted: int, takes: bool, own: int | None) -> int:
        """See `grant`. Requires the lock."""
        status = None if own is None else os.fstat(own)
        if status is not None and status.st_nlink == 0:
            return -1
        inode = None if status is None else status.st_ino
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
