"""PageFile: the bytes of pages, in slots of a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagepool.prefix.page_index import Entry, PageSum, write_all
from pagepool.prefix.stored_pages import load_pages, punch, read_page

if TYPE_CHECKING:
    from pagepool.memory.allocator import BlockAllocator

__all__ = ["Page", "PageFile"]


class Page(NamedTuple):
    """A page to write. A look-up compares the 16 bytes of `tag`. The parent is the id of another page, or any bytes."""

    id: bytes
    parent: bytes
    tag: bytes
    data: Any


class PageFile:
    """Slots of equal size in a file, and the sums of the pages in them. A page has one slot or several.

    Parameters
    ----------
    file : int
        The descriptor. The caller closes it.
    sums : PageSum
        The sums of this file.
    slot_bytes : int
        Size of a slot.
    """

    def __init__(self, file: int, sums: PageSum, slot_bytes: int) -> None:
        self.file, self.slot_bytes, self._sums = file, slot_bytes, sums

    @property
    def num_slots(self) -> int:
        """Number of slots of the file."""
        return os.fstat(self.file).st_size // self.slot_bytes

    def slots_of(self, num_bytes: int) -> int:
        """Return how many slots a page takes. An empty page has one, so that slots bound the entries."""
        return max(1, -(-num_bytes // self.slot_bytes))

    def write(self, id_: bytes, data: memoryview, slots: Sequence[int]) -> bytes:
        """Write a page into slots; return its sum. Raises `OSError`."""
        for place, slot in enumerate(slots):
            write_all(self.file, self._piece(data, place), slot * self.slot_bytes)
        return self._sums.of(id_, data)

    def _piece(self, page: memoryview, place: int) -> memoryview:
        return page[place * self.slot_bytes : (place + 1) * self.slot_bytes]

    def read(self, entry: Entry, page: memoryview) -> bool:
        """Read the page of an entry; return whether its sum is right. Raises `OSError`."""
        if entry.length != page.nbytes:
            return False
        found = []
        for place, slot in enumerate(entry.slots):
            sums = read_page(self.file, slot * self.slot_bytes, self._piece(page, place), self._sums.words)
            if isinstance(sums, int):
                raise OSError(sums, os.strerror(sums))
            found.append(sums)
        return self._sums.of_sums(entry.id, page.nbytes, b"".join(found)) == entry.sum

    def load(
        self, entries: Sequence[Entry], allocator: BlockAllocator, blocks: Sequence[int], size: int
    ) -> tuple[int, int]:
        """Read pages of `size` bytes into blocks.

        Returns how many of the first pages have right sums, and the errno of a failed read of the next one, or 0.
        """
        good = list(takewhile(lambda entry: len(entry.slots) == 1 and entry.length == size, entries))
        places = np.array([entry.slots[0] for entry in good], np.int64) * self.slot_bytes
        ids = np.array(blocks[: len(good)], np.int32)
        loaded = load_pages(allocator, self.file, places[: len(ids)], ids, self._sums.words, size)
        for count, (entry, sums) in enumerate(zip(good, loaded, strict=False)):
            if isinstance(sums, int):
                return count, sums
            if self._sums.of_sums(entry.id, size, sums) != entry.sum:
                return count, 0
        return len(loaded), 0

    def punch(self, slots: Iterable[int]) -> None:
        """Remove the bytes of slots. Raises `OSError`."""
        for slot in slots:
            punch(self.file, slot * self.slot_bytes, self.slot_bytes)

    def punch_all(self) -> None:
        """Remove all bytes. The file keeps its size. Raises `OSError`."""
        punch(self.file, 0, os.fstat(self.file).st_size)

    def resize(self, num_slots: int) -> None:
        """Change the number of slots. Raises `OSError`."""
        os.ftruncate(self.file, num_slots * self.slot_bytes)
