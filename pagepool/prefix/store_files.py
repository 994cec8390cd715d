"""The two files of a store, `index` and `pages`: their sizes, and how they are opened."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.page_index import HEAD_BYTES, NO_SLOT, RECORD_BYTES, SEED_BYTES, head_of, parsed_head, write_all
from pagepool.prefix.store_folder import note_reader

__all__ = ["RESERVED", "bytes_for", "close_all", "open_reader", "open_writer", "slots_within"]

ALIGNMENT = 4096
RESERVED = 256 << 10  # bytes of a store without pages: the head of the index and the small files
LEAST_SLOTS = 4


def bytes_for(num_slots: int, slot_bytes: int) -> int:
    """Return the bytes of a store with so many slots."""
    return RESERVED + num_slots * (slot_bytes + RECORD_BYTES)


def slots_within(max_bytes: int, fingerprint: Fingerprint) -> tuple[int, int]:
    """Return the size and the number of the slots of a store. Raises `ValueError` without room for four pages."""
    slot_bytes = max(1, -(-fingerprint.page_bytes // ALIGNMENT)) * ALIGNMENT
    num_slots = min((max_bytes - RESERVED) // (slot_bytes + RECORD_BYTES), NO_SLOT)
    least = LEAST_SLOTS * (1 + -(-fingerprint.state_bytes // slot_bytes))
    if num_slots < least:
        kept = f"{LEAST_SLOTS} pages and states" if fingerprint.state_bytes else f"{LEAST_SLOTS} pages"
        raise ValueError(f"max_bytes must be at least {bytes_for(least, slot_bytes)}, for {kept}, not {max_bytes}")
    return slot_bytes, num_slots


def open_writer(
    folder: Path, fingerprint: Fingerprint, slot_bytes: int, num_slots: int, seed: bytes
) -> tuple[list[int], bytes, bool]:
    """Open the files for writing, with `num_slots` slots at most.

    Empties them if the index is damaged, or has another fingerprint or seed. `seed` is the seed that this process
    needs, or empty for any.

    Returns
    -------
    tuple
        The descriptors of index and pages, the seed of the files, and whether a damaged index was replaced.
    """
    _write_once(folder / "FINGERPRINT", fingerprint.text + "\n")
    files: list[int] = []
    try:
        for name in ("index", "pages"):
            files.append(_open(folder / name, os.O_RDWR | os.O_CREAT))
        found, is_empty = _seed_in(files[0], fingerprint, slot_bytes), not os.fstat(files[0]).st_size
        if found is not None and seed in (b"", found):
            if os.fstat(files[1]).st_size > num_slots * slot_bytes:
                os.ftruncate(files[1], num_slots * slot_bytes)
                os.ftruncate(files[0], HEAD_BYTES + RECORD_BYTES * num_slots)
            return files, found, False
        found = seed or os.urandom(SEED_BYTES)
        for file in files:
            os.ftruncate(file, 0)
        os.ftruncate(files[0], HEAD_BYTES)
        write_all(files[0], head_of(found, fingerprint.digest, slot_bytes), 0)
        return files, found, not is_empty
    except BaseException:
        close_all(files)
        raise


def open_reader(folder: Path, fingerprint: Fingerprint, slot_bytes: int) -> tuple[list[int], bytes]:
    """Open the files for reading; return their descriptors and their seed.

    Raises `ValueError` if the index is damaged or has another fingerprint.
    """
    files: list[int] = []
    try:
        for name in ("index", "pages"):
            files.append(_open(folder / name, os.O_RDONLY))
        note_reader(files[0])
        seed = _seed_in(files[0], fingerprint, slot_bytes)
        if seed is None:
            raise ValueError(f"{folder / 'index'} is damaged or has another fingerprint")
        return files, seed
    except BaseException:
        close_all(files)
        raise


def close_all(files: list[int]) -> None:
    """Close the descriptors of a list that are not -1, and empty it."""
    while files:
        if (file := files.pop()) >= 0:
            os.close(file)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _seed_in(index: int, fingerprint: Fingerprint, slot_bytes: int) -> bytes | None:
    """Return the seed of an index, None if its head is damaged or of another fingerprint."""
    found = parsed_head(os.pread(index, HEAD_BYTES, 0))
    return found[0] if found is not None and found[1:] == (fingerprint.digest, slot_bytes) else None


def _write_once(path: Path, text: str) -> None:
    """Write a file unless it has this text already. Raises `OSError`, also for a symbolic link."""
    data = text.encode()
    with suppress(FileNotFoundError), open(_open(path, os.O_RDONLY), "rb") as file:
        if file.read() == data:
            return
    with open(_open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(data)
