"""Files of shared pools: named files in /dev/shm, and memfds."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from pagepool._arguments import wrong
from pagepool.errors import PoolError

__all__ = [
    "check_room",
    "differing",
    "open_memfd",
    "open_named",
    "open_private",
    "path_of",
    "publish",
    "read_fingerprint",
    "unnamed_file",
]

FOLDER = Path("/dev/shm")
PREFIX = "pagepool-"
MOST_FINGERPRINT = 3584  # bytes; PP_SHARED_FINGERPRINT of csrc/shared/pool.h
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def path_of(name: str, kind: str = "shared pool", prefix: str = PREFIX) -> Path:
    """Return the path of the named pool. Raises `ValueError` for a name that is not 1 to 100 letters, digits, `._-`.

    >>> path_of("llama")
    PosixPath('/dev/shm/pagepool-llama')
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"the name of a {kind} must have 1 to 100 letters, digits or ._-, not {name!r}")
    return FOLDER / f"{prefix}{name}"


def open_named(name: str) -> int | None:
    """Return a descriptor of the named pool, or None if there is no such file. Raises as `open_private`."""
    return open_private(path_of(name))


def open_private(path: Path) -> int | None:
    """Return a descriptor of a file, or None if there is no such file.

    Raises `PoolError` if the file is not a regular file of this user that no other user can open.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except PermissionError:
        fd = -1
    found = path.lstat() if fd < 0 else os.fstat(fd)
    if fd < 0 or not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        if fd >= 0:
            os.close(fd)
        mode = stat.filemode(found.st_mode)
        raise PoolError(
            f"{path} must be a regular file of user {os.geteuid()} with mode 0600; it belongs to user "
            f"{found.st_uid} and has mode {mode}"
        )
    return fd


def unnamed_file() -> int:
    """Return a descriptor of a new file without a name. It vanishes if this process ends before `publish`."""
    return os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def publish(fd: int, path: Path) -> bool:
    """Add a name to a file, which may have another name or none. Return False if a file has this name already."""
    try:
        # With a src_dir_fd the system call follows the link, which leads to the file.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


def check_room(fd: int, num_bytes: int, what: str) -> None:
    """Raise `OSError` (ENOSPC) if a file cannot have so many bytes more: allocating them could end other processes."""
    found = os.fstatvfs(fd)
    room = {"its file system": found.f_bavail * found.f_frsize} if found.f_blocks else {}  # a memfd has no limit
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            room["memory"] = int(line.split()[1]) << 10
    for where, most in room.items():
        if num_bytes > most:
            raise OSError(errno.ENOSPC, f"{what} needs {num_bytes} bytes, {where} has {most} available")


def open_memfd(fd: int) -> int:
    """Return a copy of the descriptor of a memfd, sealed so that no process can truncate it later.

    Raises `ValueError` if the file does not allow seals.
    """
    import fcntl

    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    try:
        seals = fcntl.fcntl(copy, fcntl.F_GET_SEALS)
        if os.fstat(copy).st_size and not seals & fcntl.F_SEAL_SHRINK:
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        elif seals & fcntl.F_SEAL_SEAL:
            raise PermissionError("no seals")
    except OSError as error:
        os.close(copy)
        raise ValueError(
            f"shared must be a name or a memfd that allows seals (os.memfd_create(name, os.MFD_ALLOW_SEALING)), "
            f"not descriptor {fd}"
        ) from error
    return copy


def read_fingerprint(fingerprint: Any) -> bytes:
    """Return a fingerprint as bytes. Raises `TypeError` and `ValueError`."""
    if isinstance(fingerprint, str):
        fingerprint = fingerprint.encode()
    if not isinstance(fingerprint, bytes):
        raise wrong("fingerprint", "str or bytes", fingerprint)
    if len(fingerprint) > MOST_FINGERPRINT:
        raise ValueError(f"fingerprint must have at most {MOST_FINGERPRINT} bytes, not {len(fingerprint)}")
    return fingerprint


def differing(known: bytes, given: bytes) -> tuple[str, Any, Any]:
    """Return the name of the first part in which two fingerprints differ, and both values.

    >>> differing(b'{"weights": "a", "rope": 1}', b'{"weights": "a", "rope": 2}')
    ('fingerprint.rope', 1, 2)
    >>> differing(b"a", b"b")
    ('fingerprint', 'a', 'b')
    """
    name = "fingerprint"
    left, right = known.decode("utf-8", "backslashreplace"), given.decode("utf-8", "backslashreplace")
    try:
        ours, theirs = json.loads(left), json.loads(right)
    except (ValueError, RecursionError):
        return name, left, right
    while isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        if not keys:
            break
        name, ours, theirs = f"{name}.{keys[0]}", ours.get(keys[0]), theirs.get(keys[0])
    return name, ours, theirs
