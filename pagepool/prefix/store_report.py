"""Describes and verifies a store by its files, also while a process writes to it. Changes nothing."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pagepool.prefix.page_file import PageFile
from pagepool.prefix.page_index import HEAD_BYTES, Entry, PageIndex, PageSum, parsed_head
from pagepool.prefix.store_folder import bytes_on_disk, last_use

__all__ = ["describe", "verify"]


def describe(folder: Path) -> dict[str, Any]:
    """Return what is known about a store, with an `error` if its index is missing, damaged or of another version."""
    found: dict[str, Any] = {
        "name": folder.name,
        "fingerprint": b"",
        "bytes": bytes_on_disk(folder),
        "last_use": last_use(folder),
        "in_use": _is_locked(folder),
    }
    with suppress(OSError):
        found["fingerprint"] = (folder / "FINGERPRINT").read_bytes().strip()
    try:
        with _opened(folder) as (index, _):
            pages = list(index.entries.values())
            found["pages"] = len(pages)
            found["page_bytes"] = sum(entry.length for entry in pages)
    except (OSError, ValueError) as error:
        found["error"] = str(error)
    return found


def verify(folder: Path) -> dict[str, int]:
    """Read every page of a store and compare its sum. Returns the number of right and of wrong pages.

    Raises `OSError` and `ValueError` if the store has no index, or a damaged one.
    """
    right = wrong = 0
    with _opened(folder) as (index, pages):
        for entry in list(index.entries.values()):
            if _is_right(entry, pages):
                right += 1
                continue
            index.refresh(pages.num_slots)
            now = index.entries.get(entry.id)  # can have changed meanwhile
            wrong += now is not None and now.sum == entry.sum and not _is_right(now, pages)
    return {"right": right, "wrong": wrong}


def _is_right(entry: Entry, pages: PageFile) -> bool:
    try:
        return pages.read(entry, memoryview(bytearray(entry.length)))
    except OSError:
        return False


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[PageIndex, PageFile]]:
    files: list[int] = []
    try:
        for name in ("index", "pages"):
            files.append(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        head = parsed_head(os.pread(files[0], HEAD_BYTES, 0))
        if head is None:
            raise ValueError(f"{folder / 'index'} is damaged or of another version of pagepool")
        seed, digest, slot_bytes = head
        sums = PageSum(digest, seed)
        index, pages = PageIndex(files[0], sums, slot_bytes), PageFile(files[1], sums, slot_bytes)
        index.load(pages.num_slots, is_writer=False)
        yield index, pages
    finally:
        for file in files:
            os.close(file)


def _is_locked(folder: Path) -> bool:
    """Whether a process writes to a store."""
    try:
        file = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
