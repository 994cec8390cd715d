"""The swap file: holds the pages of preempted sequences until they run again."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from pagepool.arguments import integer
from pagepool.errors import SwapError, refuse_copy

__all__ = ["SwapFile", "Swapped", "Ticket"]

NOBODY = (None, None)


class Ticket(NamedTuple):
    """Where the pages of a run of blocks are: `places[i]` and the checksum of what was written there."""

    places: tuple[int, ...]
    checksums: tuple[int, ...]

    def followed_by(self, later: Ticket) -> Ticket:
        """One ticket for the blocks of both."""
        return Ticket(self.places + later.places, self.checksums + later.checksums)


class Swapped(NamedTuple):
    """The tokens from `first` up to `end` of a sequence are in the swap file."""

    first: int
    ticket: Ticket
    end: int


class SwapFile:
    """Keeps pages in a file, so that a preempted sequence need not be computed again.

    pools       all `KvCachePool`s that are attached to the allocator, in a list; or the only one
    directory   where to make the file; it has no name there, so nothing stays behind. None: the system's default
    num_blocks  the most blocks that it holds; the file grows up to there

    Every page is checked against its checksum when it comes back: a file that was cut short or changed gives
    `SwapError`, never wrong keys and values. One thread at a time may use it.

    Invariant: `free_blocks + sum(blocks of tickets that are out) == num_blocks`.

    >>> from pagepool import KvCachePool, KvLayout
    >>> pool = KvCachePool.from_layout(KvLayout(num_layers=1, num_kv_heads=1, head_dim=8), 4)
    >>> swap = SwapFile(pool, num_blocks=2)
    >>> pool.page(1)[:] = 7
    >>> ticket = swap.store([1])
    >>> swap.load(ticket, [3])
    >>> int(pool.page(3)[0]), swap.free_blocks
    (7, 2)
    """

    __reduce__ = refuse_copy

    def __init__(self, pools: Any, directory: str | os.PathLike[str] | None = None, *, num_blocks: int) -> None:
        self.pools = list(pools) if isinstance(pools, (list, tuple)) else [pools]
        if not self.pools or not all(hasattr(pool, "page") and hasattr(pool, "allocator") for pool in self.pools):
            raise TypeError("a swap file is for one KvCachePool or a list of them")
        if any(pool.allocator is not self.pools[0].allocator for pool in self.pools):
            raise ValueError("the pools of a swap file must share one allocator")
        self.num_blocks = integer("num_blocks", num_blocks, low=0)
        self._block_bytes = sum(self._bytes_of(pool) for pool in self.pools)
        self._free: list[int] = []
        self._held: dict[int, tuple[int, Any]] = {}  # place of a block in the file: its checksum and its owner
        self._fresh = 0
        import tempfile  # here: it takes as long to import as the scheduler

        try:
            descriptor, name = tempfile.mkstemp(prefix="pagepool", dir=directory)
            os.unlink(name)
        except OSError as error:
            raise SwapError(f"no swap file can be made in {directory or tempfile.gettempdir()}: {error}") from error
        self._file = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    @property
    def free_blocks(self) -> int:
        """Blocks that still fit."""
        return self.num_blocks - self._fresh + len(self._free)

    def store(self, blocks: Iterable[int], owner: Any = None) -> Ticket:
        """Writes the pages of blocks into the file; returns the `Ticket` that `load` and `drop` take.

        blocks  ids of the blocks, in any order, each in all pools; they may be freed and written to afterwards
        owner   any object that `reclaim` and `audit` can name later, compared by identity; None: nobody

        Raises `SwapError` when fewer blocks are free in the file or the file cannot be written, `TypeError` for what is
        no integer, `InvalidBlock` for an id out of range; then the file holds what it held before.
        """
        ids = [operator.index(block) for block in blocks]
        if len(ids) > self.free_blocks:
            raise SwapError(f"{len(ids)} blocks do not fit into the swap file: {self.free_blocks} are free")
        again = min(len(ids), len(self._free))
        fresh = self._fresh + len(ids) - again
        places = self._free[len(self._free) - again :][::-1] + list(range(self._fresh, fresh))
        try:
            checksums = [self._write(block, place) for block, place in zip(ids, places, strict=True)]
        except OSError as error:
            raise SwapError(f"{len(ids)} blocks cannot be written to the swap file: {error}") from error
        ticket = Ticket(tuple(places), tuple(checksums))
        self._held.update((place, (checksum, owner)) for place, checksum in zip(places, checksums, strict=True))
        del self._free[len(self._free) - again :]
        self._fresh = fresh
        return ticket

    def reclaim(self, owner: Any, tickets: Iterable[Ticket]) -> None:
        """Forgets every block that was stored for an owner and is in none of the tickets that it still has.

        owner    the object that was given to `store`
        tickets  all tickets that it has; what they hold stays

        Call it when an exception has cut `store`, `load` or `drop` short: then a ticket may never have been returned,
        or a place of the file be both free and in use. Counts the free places anew; blocks of other owners stay. Raises
        nothing.
        """
        known = {place for ticket in tickets for place in ticket.places}
        for place in [place for place, (_, who) in self._held.items() if who is owner and place not in known]:
            del self._held[place]
        self._fresh = max([self._fresh, *(place + 1 for place in self._held)])
        self._free = [place for place in reversed(range(self._fresh)) if place not in self._held]

    def load(self, ticket: Ticket, blocks: Iterable[int]) -> None:
        """Read what `ticket` holds into the pages of as many `blocks`, in order, and forget it.

        Raises `SwapError` when the file is short, unreadable or changed: the ticket is forgotten too, and the contents
        of `blocks` are undefined. Raises `SwapError` for a forgotten ticket; then nothing has changed.
        """
        self._check_held(ticket)
        try:
            for place, checksum, block in zip(ticket.places, ticket.checksums, blocks, strict=True):
                self._read(place, checksum, int(block))
        except OSError as error:
            raise SwapError(f"{len(ticket.places)} blocks cannot be read from the swap file: {error}") from error
        finally:
            self.drop(ticket)

    def drop(self, ticket: Ticket) -> None:
        """Forget what `ticket` holds. Raises `SwapError` for a ticket that was forgotten before."""
        self._check_held(ticket)
        for place in ticket.places:
            del self._held[place]
        self._free += reversed(ticket.places)

    def audit(self, owner: Any, tickets: Iterable[Ticket]) -> str | None:
        """Whether what was stored for `owner` is what `tickets` hold, as a sentence if not."""
        held = sorted(place for place, (_, who) in self._held.items() if who is owner)
        places = sorted(place for ticket in tickets for place in ticket.places)
        return None if places == held else f"tickets have {len(places)} places of the swap file, {len(held)} are held"

    def close(self) -> None:
        """Give the file back. Loading a ticket afterwards raises `SwapError`."""
        self._closing()

    def _check_held(self, ticket: Ticket) -> None:
        """A place that is given back twice would be two tickets' at once."""
        for place, checksum in zip(ticket.places, ticket.checksums, strict=True):
            if self._held.get(place, NOBODY)[0] != checksum:
                raise SwapError(f"the ticket of {len(ticket.places)} blocks was forgotten: it has no place {place}")

    def _write(self, block: int, place: int) -> int:
        checksum, offset = 0, place * self._block_bytes
        for pool in self.pools:
            page = memoryview(pool.page(block).view(np.uint8))
            checksum = crc32(page, checksum)
            while page:
                written = os.pwrite(self._descriptor(), page, offset)
                page, offset = page[written:], offset + written
        return checksum

    def _read(self, place: int, checksum: int, block: int) -> None:
        found, offset = 0, place * self._block_bytes
        for pool in self.pools:
            page = memoryview(pool.page(block).view(np.uint8))
            rest = page
            while rest:
                count = os.preadv(self._descriptor(), [rest], offset)
                if count == 0:
                    raise SwapError(f"the swap file ends before block {place} of {self._fresh}")
                rest, offset = rest[count:], offset + count
            found = crc32(page, found)
        if found != checksum:
            raise SwapError(f"block {place} of the swap file was changed: its checksum is {found}, not {checksum}")

    def _descriptor(self) -> int:
        if not self._closing.alive:
            raise OSError("it is closed")
        return self._file

    @staticmethod
    def _bytes_of(pool: Any) -> int:
        return pool.page(0).nbytes if getattr(pool, "max_blocks", pool.total_pages) else 0
