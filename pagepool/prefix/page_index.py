"""PageIndex: the entries of a page file, in memory. Each slot of the file has one record in a second file."""

from __future__ import annotations

import heapq
import os
import struct
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b, shake_256

import numpy as np

from pagepool.prefix.stored_pages import SUM_KEY_BYTES, page_sums, record_sums

__all__ = [
    "ID_BYTES",
    "RECORD_BYTES",
    "SUM_BYTES",
    "Entry",
    "PageIndex",
    "PageSum",
    "head_of",
    "parsed_head",
    "write_all",
]

ID_BYTES = SUM_BYTES = SEED_BYTES = 16
MAGIC = b"pagepool pages 1\n"
HEAD = struct.Struct("<24s16s16sQ")  # magic, seed, digest of the fingerprint, bytes of a slot
COUNT_AT = 128  # how many changes of records were ever noted
RING_AT, RING = 4096, 7168  # the slots of the last changes, for processes that read
HEAD_BYTES = RING_AT + 4 * RING
COUNTS = RING << 40  # counts of changes begin again here
RECORD_BYTES = 128
RECORD = struct.Struct("<16s16s16s16sQII")  # id, parent, tag, sum, length, next slot, number of the slot in its page
CHECK_BYTES = 16  # before it: the sum of these fields
USED_AT = CHECK_BYTES + RECORD.size  # the last use is not part of the sum: it changes alone
NO_SLOT = (1 << 32) - 1
MOST_USED = 1 << 62
FIELDS = np.dtype(
    [
        ("check", "V16"),
        ("id", "V16"),
        ("parent", "V16"),
        ("tag", "V16"),
        ("sum", "V16"),
        ("length", "<u8"),
        ("next", "<u4"),
        ("number", "<u4"),
        ("used", "<u8"),
        ("rest", "V24"),
    ]
)


class PageSum:
    """The keyed 128-bit sum of a page: of its bytes and its id, under a fingerprint and the seed of a file.

    NH reduces each 4,096 bytes to 32 bytes, then BLAKE2b reduces these to 16 bytes: about 50 us for 576 KiB. The sum
    detects accidents: torn writes, old files, files of another model. It does not protect against an attacker with
    write access to the file.
    """

    def __init__(self, digest: bytes, seed: bytes) -> None:
        key = blake2b(digest + seed).digest()
        self._empty = blake2b(key=key, digest_size=SUM_BYTES)
        self.words = shake_256(key).digest(SUM_KEY_BYTES)

    def of(self, name: bytes, page: bytes | bytearray | memoryview) -> bytes:
        """Return the 16 bytes of a page."""
        return self.of_sums(name, memoryview(page).nbytes, page_sums(self.words, page))

    def of_sums(self, name: bytes, num_bytes: int, sums: bytes) -> bytes:
        """Return the 16 bytes of a page of `num_bytes` with these sums of its chunks, under the key `words`."""
        head = len(name).to_bytes(8, "little") + name + num_bytes.to_bytes(8, "little")
        found = self._empty.copy()
        found.update(head + sums)
        return found.digest()


class Entry:
    """A page in the file: its id, its parent's id, its slots, its bytes and its sum. `tag` belongs to the caller."""

    __slots__ = ("id", "length", "number", "parent", "slots", "sum", "tag", "used")

    def __init__(
        self, id: bytes, parent: bytes, tag: bytes, sum: bytes, length: int, slots: Sequence[int], used: int
    ) -> None:
        self.id, self.parent, self.tag, self.sum = id, parent, tag, sum
        self.length, self.slots, self.used, self.number = length, slots, used, 0


def head_of(seed: bytes, digest: bytes, slot_bytes: int) -> bytes:
    """Return the first bytes of an index."""
    head = HEAD.pack(MAGIC, seed, digest, slot_bytes)
    return head + blake2b(head, digest_size=SUM_BYTES).digest()


def parsed_head(head: bytes) -> tuple[bytes, bytes, int] | None:
    """Return seed, digest of the fingerprint and bytes of a slot in the first bytes of an index, None if damaged."""
    if len(head) < HEAD.size:
        return None
    _, seed, digest, slot_bytes = HEAD.unpack_from(head)
    return (seed, digest, slot_bytes) if head.startswith(head_of(seed, digest, slot_bytes)) and slot_bytes else None


def write_all(file: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at an offset. Raises `OSError`."""
    if os.pwrite(file, data, offset) != len(data):
        raise OSError("the disk took only a part of the data")


class PageIndex:
    """Which page each slot of a page file has. The owner of a store guards it by a lock; files have no locks.

    A record is right if its sum is right. One process changes records, and any number of processes read them meanwhile:
    each record has the sum of its fields, and each page has the sum in its record. So a record or page that is torn,
    old or missing is not found, and files need no order of writes and no sync.

    Invariant: `sum(len(entry.slots) for entry in entries) + len(free) == num_slots` in the process that writes.

    Eviction takes the entry that was used longest ago and has no child. Its use then counts as a use of its parent. So
    a use of the last page of a prefix is a use of all pages before it, and marks one record.

    Parameters
    ----------
    file : int
        The descriptor of the index.
    sums : PageSum
        The sums of this file.
    slot_bytes : int
        Size of a slot of the page file.
    """

    def __init__(self, file: int, sums: PageSum, slot_bytes: int) -> None:
        self.file, self._words, self.slot_bytes = file, sums.words, slot_bytes
        self.num_slots = 0
        self._count = 0  # of changes that are in memory
        self._clear()

    def _clear(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self._children: dict[bytes, int] = {}  # id of a parent, stored or not -> number of entries
        self._leaves: list[tuple[int, int, bytes]] = []  # heap of (use, -number, id); rows that are outdated stay in it
        self._owners: dict[int, bytes] = {}  # slot -> id of its entry; for readers
        self._next_number = 0
        self.free: list[int] = []

    # What every process does.

    def load(self, num_slots: int, *, is_writer: bool) -> list[int]:
        """Read all records of the first `num_slots` slots. Return slots with a record that belongs to no entry."""
        self._clear()
        self.num_slots = num_slots
        self._count = self._read_count()
        data = self._pread(RECORD_BYTES * num_slots, HEAD_BYTES)
        data = data[: len(data) // RECORD_BYTES * RECORD_BYTES]
        rows = np.frombuffer(data, FIELDS)
        sums = np.frombuffer(record_sums(self._words, data), np.uint64).reshape(-1, 2)
        checks = np.ascontiguousarray(rows["check"]).view(np.uint64).reshape(-1, 2)
        right = np.flatnonzero((sums == checks).all(axis=1))
        found = rows[right]
        names = ("id", "parent", "tag", "sum", "length", "next", "number", "used")
        columns = [found[name].tolist() for name in names]
        slots = right.tolist()
        parts = dict(zip(slots, zip(columns[0], columns[5], columns[6], strict=True), strict=True))
        free = bytearray(b"\1") * num_slots
        wrong = set(slots)
        for slot, id_, parent, tag, sum_, length, next_slot, number, used in zip(slots, *columns, strict=True):
            if number or id_ in self.entries:
                continue
            chain = self._chain(parts, slot, id_, length, next_slot)
            if chain is None or not all(free[each] for each in chain):
                continue
            for each in chain:
                free[each] = 0
                wrong.remove(each)
            self._insert(Entry(id_, parent, tag, sum_, length, chain, min(used, MOST_USED)), is_heaped=False)
            if not is_writer:
                self._owners.update(dict.fromkeys(chain, id_))
        if is_writer:
            self.free = [slot for slot in range(num_slots - 1, -1, -1) if free[slot]]
            self._rebuild_heap()
        return sorted(wrong)

    def _pread(self, size: int, offset: int) -> bytes:
        pieces = []
        while size and (piece := os.pread(self.file, min(size, 1 << 26), offset)):
            pieces.append(piece)
            size -= len(piece)
            offset += len(piece)
        return b"".join(pieces)

    def _read_count(self) -> int:
        return int.from_bytes(os.pread(self.file, 8, COUNT_AT), "little") % COUNTS

    def _chain(
        self, parts: dict[int, tuple[bytes, int, int]], slot: int, id_: bytes, length: int, next_slot: int
    ) -> Sequence[int] | None:
        """Return the slots of a page that begins in `slot`, None if a record of it is missing or of another page."""
        count = max(1, -(-length // self.slot_bytes))
        if count == 1 and next_slot == NO_SLOT:
            return (slot,)
        slots = array("I", [slot])
        while next_slot != NO_SLOT and len(slots) < count:
            part = parts.get(next_slot)
            if part is None or part[0] != id_ or part[2] != len(slots):
                return None
            slots.append(next_slot)
            next_slot = part[1]
        return slots if next_slot == NO_SLOT and len(slots) == count else None

    def is_behind(self) -> bool:
        """Return whether `refresh` would read all records. Raises `OSError`."""
        return (self._read_count() - self._count) % COUNTS >= RING

    def refresh(self, num_slots: int) -> None:
        """Follow the process that writes: read the records that it has changed since the last call."""
        count = self._read_count()
        num_changed = (count - self._count) % COUNTS
        if not num_changed and num_slots == self.num_slots:
            return
        data = os.pread(self.file, 4 * RING, RING_AT) if num_changed < RING else b""
        ring = np.frombuffer(data[: len(data) // 4 * 4], np.uint32)
        if len(ring) < RING or (self._read_count() - self._count) % COUNTS >= RING:
            self.load(num_slots, is_writer=False)
            return
        places = {int(ring[(self._count + n) % RING]) for n in range(num_changed)}
        self._count, self.num_slots = count, num_slots
        for slot in places:
            if (owner := self._owners.get(slot)) is not None:
                self._forget_owner(owner)
        for slot in places:
            self._read_entry(slot)

    def _forget_owner(self, id_: bytes) -> None:
        for slot in self.entries[id_].slots:
            del self._owners[slot]
        self._remove(id_)

    def _read_entry(self, slot: int) -> None:
        """Read the records of the page that begins in `slot`, if one does."""
        parts: dict[int, tuple[bytes, int, int]] = {}
        at, first = slot, None
        while at < self.num_slots and at not in parts:
            record = os.pread(self.file, RECORD_BYTES, HEAD_BYTES + RECORD_BYTES * at)
            if len(record) < RECORD_BYTES or record_sums(self._words, record) != record[:CHECK_BYTES]:
                break
            fields = RECORD.unpack_from(record, CHECK_BYTES)
            first = first or fields
            parts[at] = (fields[0], fields[5], fields[6])
            at = fields[5]
        if first is None or first[6]:
            return
        id_, parent, tag, sum_, length, next_slot, _ = first
        slots = self._chain(parts, slot, id_, length, next_slot)
        if slots is None or any(each in self._owners for each in slots):
            return
        if id_ in self.entries:
            self._forget_owner(id_)
        self._insert(Entry(id_, parent, tag, sum_, length, slots, 0), is_heaped=False)
        self._owners.update(dict.fromkeys(slots, id_))

    # What only the process that writes does. The first methods change memory, and the others the file.

    def _insert(self, entry: Entry, *, is_heaped: bool) -> None:
        self._next_number += 1
        entry.number = self._next_number
        self.entries[entry.id] = entry
        if entry.parent != entry.id:
            self._children[entry.parent] = self._children.get(entry.parent, 0) + 1
        if is_heaped:
            self._heap(entry)

    def _remove(self, id_: bytes) -> Entry:
        """Remove an entry from memory. Its parent can become a leaf, used at least as late as this entry."""
        entry = self.entries.pop(id_)
        if entry.parent != id_:
            left = self._children[entry.parent] - 1
            if left:
                self._children[entry.parent] = left
            else:
                del self._children[entry.parent]
        return entry

    def _heap(self, entry: Entry) -> None:
        if entry.id not in self._children:
            heapq.heappush(self._leaves, (entry.used, -entry.number, entry.id))
            if len(self._leaves) > 2 * len(self.entries) + 64:
                self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._leaves = [
            (entry.used, -entry.number, id_) for id_, entry in self.entries.items() if id_ not in self._children
        ]
        heapq.heapify(self._leaves)

    def clear(self) -> None:
        """Remove all entries from memory."""
        self._clear()
        self.free = list(range(self.num_slots - 1, -1, -1))

    def add(self, entry: Entry) -> None:
        """Add an entry after its page and its records were written. The id must be new."""
        self._insert(entry, is_heaped=True)

    def take(self, ids: Iterable[bytes]) -> tuple[list[Entry], list[Entry]]:
        """Remove entries from memory and free their slots. Returns the entries, and the parents with a new last use."""
        gone: list[Entry] = []
        parents: dict[bytes, Entry] = {}
        for id_ in ids:
            if id_ not in self.entries:
                continue
            entry = self._remove(id_)
            gone.append(entry)
            self.free.extend(entry.slots)
            parents.pop(id_, None)
            parent = self.entries.get(entry.parent)
            if parent is not None and entry.parent not in self._children:
                if parent.used < entry.used:
                    parent.used = entry.used
                    parents[parent.id] = parent
                self._heap(parent)
        return gone, list(parents.values())

    def mark(self, id_: bytes, tick: int) -> bool:
        """Note that an entry was used; return whether there is one."""
        entry = self.entries.get(id_)
        if entry is None:
            return False
        entry.used = tick
        self._heap(entry)
        return True

    def oldest(self, before: int, count: int) -> list[bytes]:
        """Return ids of up to `count` entries without a child that were used longest ago, before a tick."""
        found: dict[bytes, None] = {}
        while self._leaves and self._leaves[0][0] < before and len(found) < count:
            used, number, id_ = heapq.heappop(self._leaves)
            entry = self.entries.get(id_)
            if entry is not None and (entry.used, -entry.number) == (used, number) and id_ not in self._children:
                found[id_] = None
        if not found and not self._leaves and self.entries:  # parents in a circle
            id_ = min(self.entries, key=lambda each: self.entries[each].used)
            if self.entries[id_].used < before:
                found[id_] = None
        return list(found)

    def last_use(self) -> int:
        """Return the latest use of an entry."""
        return max((entry.used for entry in self.entries.values()), default=0)

    def write_entry(self, entry: Entry) -> None:
        """Write the records of an entry, the first one last, so that a reader that sees it finds the others."""
        for number in range(len(entry.slots) - 1, -1, -1):
            next_slot = entry.slots[number + 1] if number + 1 < len(entry.slots) else NO_SLOT
            fields = RECORD.pack(entry.id, entry.parent, entry.tag, entry.sum, entry.length, next_slot, number)
            record = bytearray(RECORD_BYTES)
            record[CHECK_BYTES:USED_AT] = fields
            record[USED_AT : USED_AT + 8] = entry.used.to_bytes(8, "little")
            record[:CHECK_BYTES] = record_sums(self._words, record)
            write_all(self.file, record, HEAD_BYTES + RECORD_BYTES * entry.slots[number])

    def write_use(self, entry: Entry) -> None:
        """Write the last use of an entry."""
        at = HEAD_BYTES + RECORD_BYTES * entry.slots[0] + USED_AT
        write_all(self.file, entry.used.to_bytes(8, "little"), at)

    def erase(self, slots: Iterable[int]) -> None:
        """Overwrite the records of slots with zeros."""
        end = os.fstat(self.file).st_size
        for slot in slots:
            at = HEAD_BYTES + RECORD_BYTES * slot
            if at < end:
                write_all(self.file, bytes(RECORD_BYTES), at)

    def erase_all(self) -> None:
        """Remove all records from the file."""
        os.ftruncate(self.file, HEAD_BYTES)
        self.publish_all()

    def publish(self, slots: Iterable[int]) -> None:
        """Tell other processes that the records of some slots have changed."""
        for slot in slots:
            write_all(self.file, slot.to_bytes(4, "little"), RING_AT + 4 * (self._count % RING))
            self._count = (self._count + 1) % COUNTS
        write_all(self.file, self._count.to_bytes(8, "little"), COUNT_AT)

    def publish_all(self) -> None:
        """Tell other processes to read all records again."""
        self._count = (self._count + RING) % COUNTS
        write_all(self.file, self._count.to_bytes(8, "little"), COUNT_AT)
