"""The directory of stores: permissions, the lock of the process that writes, and one bound in bytes for all stores."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = [
    "bytes_of",
    "bytes_on_disk",
    "claim",
    "last_use",
    "lock",
    "note_reader",
    "remove",
    "reserve",
    "stores_in",
    "unlock",
]

FILES = ("index", "pages", "FINGERPRINT", "lock")
OLDER_FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal")
NAME = re.compile("[0-9a-f]{32}")
RECENT_SECONDS = 600.0  # stores used since then are kept for the sake of a server that restarts
LOCK_TRIES, LOCK_SECONDS = 5, 0.0005  # for the lock of the whole directory, which processes hold for a moment


def claim(folder: Path) -> bool:
    """Return whether this user may write to a directory, False if it can only be read.

    Raises `PermissionError` for a directory that another user than root can change: wrong pages under right sums are
    not detected. A directory of another user is accepted if it is on a read-only mount.
    """
    status = os.stat(folder, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} must be a directory, its mode is {stat.filemode(status.st_mode)}")
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return False
    if status.st_mode & 0o022:
        mode = stat.filemode(status.st_mode)
        raise PermissionError(f"{folder} must be a directory that only its owner can write to, its mode is {mode}")
    if status.st_uid == os.geteuid():
        return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
    if status.st_uid:
        raise PermissionError(
            f"{folder} belongs to user {status.st_uid}, and a store must belong to {os.geteuid()}. To read it, copy it "
            "or mount it read-only"
        )
    return False


def lock(folder: Path) -> int | None:
    """Return a descriptor that holds the lock of the process that writes, None while another store has it."""
    path = folder / "lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # another process can have removed the file in between
                if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
                    return descriptor
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        os.close(descriptor)


def unlock(descriptor: int) -> None:
    """Give the lock up. To close the descriptor is not enough: a child that was just forked can still have it."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def stores_in(root: Path) -> Iterator[Path]:
    """Yield the directory of each fingerprint."""
    with suppress(FileNotFoundError):
        for path in sorted(root.iterdir()):
            if NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield path


def bytes_on_disk(folder: Path) -> int:
    """Return the bytes that the files of a store take on disk."""
    return sum(512 * status.st_blocks for status in _files_of(folder))


def bytes_of(folder: Path) -> int:
    """Return the bytes that the files of a store may take without asking again: their sizes, or more if they do."""
    return sum(max(status.st_size, 512 * status.st_blocks) for status in _files_of(folder))


def _files_of(folder: Path) -> Iterator[os.stat_result]:
    with suppress(FileNotFoundError), os.scandir(folder) as files:
        for file in files:
            with suppress(FileNotFoundError):
                yield file.stat(follow_symlinks=False)


def last_use(folder: Path) -> float:
    """Return when a store was last written to, in seconds since the epoch."""
    for path in (folder / "index", folder):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def remove(folder: Path) -> bool:
    """Remove the files of a store. Returns false while a process has it open. Raises `OSError`."""
    descriptor = lock(folder)
    if descriptor is None:
        return False
    try:
        with _no_reader(folder / "index") as is_unread:
            if not is_unread:
                return False
            for name in (*FILES, *OLDER_FILES):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
    finally:
        os.close(descriptor)
    return True


def note_reader(index: int) -> None:
    """Keep a store from being removed while the descriptor of its index is open. Raises `BlockingIOError`."""
    fcntl.flock(index, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextmanager
def _no_reader(index: Path) -> Iterator[bool]:
    """Keep new readers out, and yield True, unless a process reads this index."""
    if not index.is_file() or index.is_symlink():
        yield True
        return
    descriptor = os.open(index, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield _try_lock(descriptor, 1)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Hold the lock of the whole directory. False if another process does for more than about 2 ms."""
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield _try_lock(descriptor, LOCK_TRIES)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, tries: int) -> bool:
    for number in range(tries):
        if number:
            time.sleep(LOCK_SECONDS)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def reserve(folder: Path, wanted: int, max_bytes: int, grow: Callable[[], None], *, keeps_recent: bool = True) -> bool:
    """Call `grow` if the store in `folder` may take `wanted` bytes, and all stores next to it `max_bytes` together.

    Removes other stores that no process has open, the oldest first. If `keeps_recent`, it keeps stores that were used
    in the last `RECENT_SECONDS`.
    """
    with _locked(folder.parent) as is_locked:
        if not is_locked:
            return False
        others = {path: bytes_of(path) for path in stores_in(folder.parent) if path != folder}
        before = time.time() - RECENT_SECONDS if keeps_recent else float("inf")
        for path in sorted((path for path in others if last_use(path) < before), key=last_use):
            if wanted + sum(others.values()) <= max_bytes:
                break
            if remove(path):
                del others[path]
        if wanted + sum(others.values()) > max_bytes:
            return False
        grow()
    return True
