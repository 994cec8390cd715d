"""PrefixStore: pages of cached prefixes on disk, for restarts, reboots and more cache than RAM."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import stat
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b, shake_256
from itertools import takewhile
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from pagepool._arguments import integer
from pagepool.errors import refuse_copy
from pagepool.prefix.events import name_row
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.keys import root_name
from pagepool.prefix.store_index import Entry, Row, StoreIndex, slots_of
from pagepool.prefix.stored_pages import SUM_KEY_BYTES, load_pages, page_sums

if TYPE_CHECKING:
    from pagepool.memory.allocator import BlockAllocator

__all__ = ["PageSum", "PrefixStore"]

logger = logging.getLogger("pagepool")

SEED_BYTES = 16
NAME_BYTES = 16
SUM_BYTES = 16
SLOT_BYTES = 4  # of the number of a slot; a page of a block has one slot
ALIGNMENT = 4096
RESERVED = 8 << 20  # bytes of a store without pages: the empty index, its log and the small files
LEAST_SLOTS = 4
EVICTED_AT_ONCE = 64
CANNOT_READ, CANNOT_WRITE = "a page cannot be read", "pages cannot be written"
READER_SECONDS = 1.0  # how long a reader waits for the writer to create its files, if both start at once
MOST_NOTES = 64  # uses that wait for the next batch
NO_PAGES = 16_384  # bytes of a slot if blocks have no pages, for recurrent states
STATES = b"recurrent "  # begins the key of names of states; a `root_key` begins with another letter
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
# Messages of SQLite that do not say that a file is damaged.
DISK_MESSAGES = (
    "database is locked",
    "database table is locked",
    "disk I/O error",
    "database or disk is full",
    "unable to open database file",
    "out of memory",
)
FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "pages")


class PageSum:
    """The keyed 128-bit sum of a page: of its bytes and its name, under a fingerprint and the seed of a file.

    NH reduces each 4,096 bytes to 32 bytes, then BLAKE2b reduces these to 16 bytes: about 50 us for 576 KiB. The sum
    detects accidents: torn writes, old files, files of another model. It does not protect against an attacker with
    write access to the file.
    """

    def __init__(self, fingerprint: Fingerprint, seed: bytes) -> None:
        key = blake2b(fingerprint.digest + seed).digest()
        self._empty = blake2b(key=key, digest_size=SUM_BYTES)
        self.words = shake_256(key).digest(SUM_KEY_BYTES)

    def of(self, name: bytes, page: Any) -> bytes:
        """Return the 16 bytes of a page."""
        return self.of_sums(name, memoryview(page).nbytes, page_sums(self.words, page))

    def of_sums(self, name: bytes, num_bytes: int, sums: bytes) -> bytes:
        """Return the 16 bytes of a page of `num_bytes` with these sums of its chunks, under the key `words`."""
        head = len(name).to_bytes(8, "little") + name + num_bytes.to_bytes(8, "little")
        found = self._empty.copy()
        found.update(head + sums)
        return found.digest()


class PrefixStore:
    """Pages of cached prefixes on disk. Give it to `PrefixCache(allocator, store=store)`.

    A page that is missing, torn, old or of another model fails its sum and is not found. So no file needs to be synced.
    The first process that opens a store writes to it; all other processes read. A full store drops the least recently
    used pages. If a file is damaged or the disk is full or fails, the logger "pagepool" gets one line, and prompts are
    computed. Any thread may call it. After a fork, the store finds nothing in the child.

    Parameters
    ----------
    path : str or path-like
        A directory, created if needed. Each fingerprint has its own directory in it.
    fingerprint : Fingerprint
        Identifies everything that pages depend on, from `fingerprint_of`.
    max_bytes : int
        Limit in bytes of the files of this fingerprint. If it is lower than before, pages are dropped.

    Attributes
    ----------
    is_writer : bool
        True if this store may write. False while another store has the directory open for writing.

    Raises
    ------
    ValueError
        If `max_bytes` has no room for four pages, and four recurrent states of a model that has some.
    OSError
        If the directory cannot be made, belongs to another user, or can be written by other users.

    Examples
    --------
    >>> import tempfile
    >>> from pagepool import KvCachePool, KvLayout, PrefixCache
    >>> from pagepool.prefix.fingerprint import fingerprint_of
    >>> layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> folder = tempfile.TemporaryDirectory()
    >>> def begin():
    ...     pool = KvCachePool.from_layout(layout, num_blocks=4)
    ...     store = PrefixStore(folder.name, fingerprint_of(pool, weights="sha256:1234"), max_bytes=16 << 20)
    ...     return pool, store, PrefixCache(pool.allocator, store=store)
    >>> pool, store, cache = begin()
    >>> cache.cache_blocks(range(16), [pool.allocator.allocate()]), cache.flush()
    (1, True)
    >>> store.close()
    >>> pool, store, cache = begin()  # after a restart
    >>> cache.match_prefix(range(32))
    array([0], dtype=int32)
    >>> store.close()
    >>> folder.cleanup()
    """

    __reduce__ = refuse_copy

    def __init__(self, path: str | Path, fingerprint: Fingerprint, max_bytes: int) -> None:
        if not isinstance(fingerprint, Fingerprint):
            raise TypeError(f"fingerprint must be from fingerprint_of, not {type(fingerprint).__name__}")
        self.fingerprint = fingerprint
        self.max_bytes = integer("max_bytes", max_bytes, 0)
        self.slot_bytes = -(-(fingerprint.page_bytes or NO_PAGES) // ALIGNMENT) * ALIGNMENT
        row_bytes = 2 * (4 * fingerprint.block_size + 160)
        self.num_slots = (self.max_bytes - RESERVED) // (self.slot_bytes + row_bytes)
        least_slots = LEAST_SLOTS * (1 + -(-fingerprint.state_bytes // self.slot_bytes))
        if self.num_slots < least_slots:
            least = RESERVED + least_slots * (self.slot_bytes + row_bytes)
            kept = f"{LEAST_SLOTS} pages and states" if fingerprint.state_bytes else f"{LEAST_SLOTS} pages"
            raise ValueError(f"max_bytes must be at least {least}, for {kept}, not {self.max_bytes}")
        self.folder = Path(path) / fingerprint.digest.hex()
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(Path(path).resolve())  # a link to a directory is as good as its path
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _require_own(self.folder)
        self._pid = os.getpid()
        self._change = Lock()  # guards the rows and the free slots; taken before `_look_up`
        self._look_up = Lock()  # guards the reading connection, and the next four fields
        self._used: set[bytes] = set()  # names found since the last batch
        self._refused: dict[bytes, bytes] = {}  # entries with pages that failed their sums: name to recorded sum
        self._hidden: set[bytes] = set()  # names that were forgotten without write access
        self._hides_states = False
        self._faults: set[str] = set()  # logged, and not seen to be over
        self._counts = dict.fromkeys(("found", "written", "refused", "evicted", "failed"), 0)
        self._writer: StoreIndex | None = None
        self._reader: StoreIndex | None = None
        self._pages = -1
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.is_writer = self._locked()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _open(self) -> None:
        """Open the files. A writer replaces files that are damaged or have another fingerprint by empty ones."""
        self._free: list[int] = []
        self.seed = bytes(SEED_BYTES)
        give_up = monotonic() + READER_SECONDS
        while True:
            try:
                self.seed = self._open_files(self.folder / FILES[0])
                break
            except (sqlite3.Error, OSError, ValueError, OverflowError) as error:
                if self.is_writer and not _is_of_disk(error):
                    raise
                self._close_index()
                if self.is_writer or monotonic() > give_up:
                    self._note("it finds nothing", error)
                    self.is_writer = False
                    break
                sleep(0.02)
        self._sum = PageSum(self.fingerprint, self.seed)

    def _open_files(self, index: Path) -> bytes:
        """Open the files; return the seed of the sums."""
        if self.is_writer:
            _write_once(self.folder / "FINGERPRINT", self.fingerprint.text + "\n")
            try:
                self._open_writer(index)
            except (sqlite3.Error, ValueError, OverflowError) as error:
                if _is_of_disk(error):
                    raise
                self._note("its index is begun anew", error)
                self._close_index()
                for name in FILES:
                    (self.folder / name).unlink(missing_ok=True)
                self._open_writer(index)
        if self._pages >= 0:  # the file of an earlier attempt
            os.close(self._pages)
            self._pages = -1
        flags = os.O_RDWR | os.O_CREAT if self.is_writer else os.O_RDONLY
        self._pages = os.open(self.folder / FILES[-1], flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._reader = StoreIndex(index, is_writer=False)
        size = self.num_slots * self.slot_bytes
        if self.is_writer and os.fstat(self._pages).st_size > size:
            os.ftruncate(self._pages, size)
        return self._checked_seed(self._reader.meta())

    def _open_writer(self, path: Path) -> None:
        path.touch(0o600)
        self._writer = index = StoreIndex(path, is_writer=True)
        meta = index.meta()
        if not meta:
            seed = os.urandom(SEED_BYTES)
            index.set_meta(seed=seed, fingerprint=self.fingerprint.digest)
        else:
            self._checked_seed(meta)
        self._tick = min(index.last_use(), 1 << 62) + 1
        index.begin()
        num_wrong = self._load_slots()
        index.commit()
        if num_wrong:
            index.shrink()

    def _checked_seed(self, meta: dict[Any, Any]) -> bytes:
        seed = meta.get("seed")
        if not isinstance(seed, bytes) or len(seed) != SEED_BYTES:
            raise ValueError("the seed of the index is missing or damaged")
        if meta.get("fingerprint") != self.fingerprint.digest:
            raise ValueError("the index has another fingerprint")
        return seed

    def _load_slots(self) -> int:
        """Learn which slots are free. Entries with slots that cannot be, or that another entry has, are deleted.

        Returns the number of deleted entries.
        """
        assert self._writer is not None
        taken, wrong = bytearray(self.num_slots), []
        for number, slots in self._writer.slots():
            numbers = slots_of(slots)
            if (
                numbers is None
                or any(slot >= self.num_slots or taken[slot] for slot in numbers)
                or len(set(numbers)) < len(numbers)
            ):
                wrong.append(number)
            else:
                for slot in numbers:
                    taken[slot] = 1
        self._writer.delete(wrong)
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if not taken[slot]]
        return len(wrong)

    @property
    def is_inherited(self) -> bool:
        """Whether a parent process opened the store. Another thread of the parent may hold its locks for ever."""
        return os.getpid() != self._pid

    def names(self, tokens: Any, key: bytes) -> list[bytes]:
        """Return the names of the full blocks of a prompt under a `root_key`, in this store."""
        row = name_row(tokens, self.fingerprint.block_size, root_name(key, self.seed))
        return [row[at : at + NAME_BYTES] for at in range(0, len(row), NAME_BYTES)]

    def state_names(self, tokens: Any, key: bytes) -> list[bytes]:
        """Return the names of the recurrent states after each full block of a prompt under a `root_key`."""
        return self.names(tokens, STATES + key)

    def find_last(self, names: Sequence[bytes], tokens: Sequence[bytes]) -> tuple[int, Entry] | None:
        """Return place and entry of the last of `names` that has an entry of equal tokens, or None."""
        if self.is_inherited:
            return None
        with self._look_up:
            if self._reader is None:
                return None
            if self._hides_states:
                return None
            try:
                found = self._reader.find_last(names, tokens)
            except (sqlite3.Error, OverflowError) as error:
                self._fail("the index cannot be read", error)
                return None
            if found is not None:
                self._note_use(found[1].name)
            return found

    def find(self, names: Sequence[bytes], tokens: Sequence[bytes]) -> list[Entry]:
        """Return the entries of `names`, up to the first name without an entry of equal tokens."""
        if self.is_inherited:
            return []
        with self._look_up:
            if self._reader is None:
                return []
            if self._hidden:
                names = list(takewhile(lambda name: name not in self._hidden, names))
            try:
                found = self._reader.find(names, tokens[: len(names)])
            except (sqlite3.Error, OverflowError) as error:
                self._fail("the index cannot be read", error)
                return []
            if found:
                self._note_use(found[-1].name)
            return found

    def note_use(self, name: bytes) -> None:
        """Note that an entry was used. The next `write` marks it."""
        if not self.is_inherited:
            with self._look_up:
                self._note_use(name)

    def _note_use(self, name: bytes) -> None:
        if self._writer is not None:  # a reader never writes it down
            self._used.add(name)

    def load(self, entries: Sequence[Entry], allocator: BlockAllocator, blocks: Sequence[int]) -> int:
        """Read the pages of `entries` into `blocks`; return how many of the first are the pages that were written.

        The caller holds the only reference to each block. Blocks behind the returned number have any content.
        """
        size, count = self.fingerprint.page_bytes, 0
        good = list(takewhile(lambda entry: len(entry.slots) == SLOT_BYTES and entry.length == size, entries))
        places = np.frombuffer(b"".join([entry.slots for entry in good]), np.uint32).astype(np.int64) * self.slot_bytes
        ids = np.array(blocks[: len(good)], np.int32)
        loaded = load_pages(allocator, self._pages, places, ids, self._sum.words, size)
        for entry, sums in zip(entries, loaded, strict=False):
            if isinstance(sums, int) or self._sum.of_sums(entry.name, size, sums) != entry.sum:
                break
            count += 1
        for number in loaded[count : count + 1]:
            if isinstance(number, int) and number != errno.EINVAL:
                self._note_read(OSError(number, os.strerror(number)))
        with self._look_up:
            self._counts["found"] += count
            if count:
                self._faults.discard(CANNOT_READ)
        if count < len(entries):
            self._refuse(entries[count])
        return count

    def read(self, entry: Entry, page: memoryview) -> bool:
        """Read the page of an entry into `page`; return whether it is the page that was written."""
        if not self._read_slots(entry, page) or self._sum.of(entry.name, page) != entry.sum:
            self._refuse(entry)
            return False
        with self._look_up:
            self._counts["found"] += 1
        return True

    @property
    def has_notes(self) -> bool:
        """Whether `write` should be called soon: a page has failed its sum, or many entries were used."""
        return bool(self._refused) or len(self._used) >= MOST_NOTES

    def _refuse(self, entry: Entry) -> None:
        with self._look_up:
            if self._writer is not None:
                self._refused[entry.name] = entry.sum
            self._counts["refused"] += 1

    def _note_read(self, error: OSError) -> None:
        with self._look_up:
            self._fail(CANNOT_READ, error)

    def _slots(self, entry: Entry, num_bytes: int) -> array[int] | None:
        """Return the slots of an entry, or None when it cannot be the entry of a page of this size."""
        slots = slots_of(entry.slots)
        if slots is None or entry.length != num_bytes or len(slots) != self._num_slots_of(num_bytes):
            return None
        return None if max(slots) * self.slot_bytes >= 1 << 62 else slots

    def _read_slots(self, entry: Entry, page: memoryview) -> bool:
        slots = self._slots(entry, page.nbytes)
        if slots is None:
            return False
        try:
            for place, slot in enumerate(slots):
                piece = page[place * self.slot_bytes : (place + 1) * self.slot_bytes]
                if os.preadv(self._pages, [piece], slot * self.slot_bytes) != piece.nbytes:
                    return False
        except OSError as error:
            self._note_read(error)
            return False
        return True

    def write(self, pages: Iterable[tuple[bytes, bytes, bytes, Any]], used: Iterable[bytes] = ()) -> None:
        """Write pages that the store does not have, and note what was found since the last call. Does not raise.

        Parameters
        ----------
        pages : iterable of (name, parent, tokens, page)
            The page is any buffer. The parent of a recurrent state is `STATE`. Names that the store has are only marked
            as used.
        used : iterable of bytes
            Names of other entries that were used. They and the prefixes before them are dropped later.
        """
        if self.is_inherited:
            return
        with self._change:
            if self._writer is None:
                return
            try:
                self._write(self._writer, list(pages), set(used))
            except (sqlite3.Error, OSError, OverflowError) as error:
                self._undo(error)

    def _write(self, index: StoreIndex, pages: list[tuple[bytes, bytes, bytes, Any]], in_memory: set[bytes]) -> None:
        with self._look_up:
            used, refused = self._used, self._refused
            self._used, self._refused = set(), {}
        if not (pages or used or refused or in_memory):
            return
        if refused and index.has_room():  # first: their pages may be among the new ones
            index.begin()
            for name, checksum in refused.items():
                self._give_back(index.delete_named(name, checksum))
            index.commit()
        fresh = {page[0]: page for page in pages}
        known = index.known(list(fresh))
        # A prefix counts as used when a page behind it is written, so it is not dropped before that page.
        used |= known | {page[1] for name, page in fresh.items() if name not in known}
        used -= fresh.keys() - known
        # Prefixes in memory are used often: they are marked once in a while, to write less.
        earlier = self._tick - min(MOST_NOTES, self.num_slots // 256)
        for name in used | in_memory:
            if index.has_room():
                index.begin()
                index.touch(name, self._tick, self._tick if name in used else earlier)
                index.commit()
        if index.has_room():
            index.begin()
            rows = self._write_pages(index, [page for name, page in fresh.items() if name not in known])
            index.insert(rows)
            index.commit()
            self._counts["written"] += len(rows)
            if rows:
                self._faults.discard(CANNOT_WRITE)
        self._tick += 1

    def _write_pages(self, index: StoreIndex, pages: list[tuple[bytes, bytes, bytes, Any]]) -> list[Row]:
        """Write pages into slots, up to the first page that finds none; return their rows."""
        rows = []
        for name, parent, tokens, page in pages:
            size = memoryview(page).nbytes
            slots = self._take(index, self._num_slots_of(size))
            if slots is None:
                break
            self._write_slots(slots, memoryview(page))
            rows.append(Row(name, parent, tokens, slots.tobytes(), size, self._sum.of(name, page), self._tick))
        return rows

    def _take(self, index: StoreIndex, count: int) -> array[int] | None:
        """Take free slots. Entries that were used longest ago are deleted for them, but none that this batch uses.

        Returns None, and takes nothing, when there are too few.
        """
        while len(self._free) < count:
            oldest = index.oldest(min(EVICTED_AT_ONCE, max(1, self.num_slots // 8)), self._tick)
            if not oldest:
                return None
            index.delete([number for number, _ in oldest])
            for _, slots in oldest:
                self._give_back(slots)
            self._counts["evicted"] += len(oldest)
        return array("I", [self._free.pop() for _ in range(count)])

    def _give_back(self, slots: object) -> None:
        self._free.extend(slot for slot in slots_of(slots) or () if slot < self.num_slots)

    def _num_slots_of(self, num_bytes: int) -> int:
        """Return the slots of a page. An empty page has one, so that slots bound the rows of the index."""
        return max(1, -(-num_bytes // self.slot_bytes))

    def _write_slots(self, slots: array[int], page: memoryview) -> None:
        for place, slot in enumerate(slots):
            piece = page[place * self.slot_bytes : (place + 1) * self.slot_bytes]
            if os.pwrite(self._pages, piece, slot * self.slot_bytes) != piece.nbytes:
                raise OSError("the disk took only a part of a page")

    def _undo(self, error: Exception) -> None:
        """Drop a batch that failed. Slots that it wrote over fail their sums."""
        assert self._writer is not None
        self._counts["failed"] += 1
        self._fail(CANNOT_WRITE, error)
        try:
            self._writer.rollback()
            self._writer.begin()
            self._load_slots()
            self._writer.commit()
        except (sqlite3.Error, OverflowError) as second:
            if isinstance(second, sqlite3.DatabaseError) and not isinstance(second, sqlite3.OperationalError):
                self._abandon("the index is damaged: it is removed", second)
            else:
                self._fail("nothing more is written", second)
                self._close_writer()

    def _hide(self, names: Iterable[bytes] | None) -> None:
        """Find these entries (None: all) and states no more in this process."""
        with self._look_up:
            self._hides_states = True
            if names is not None:
                self._hidden.update(names)
            elif self._reader is not None:
                with suppress(sqlite3.Error):
                    self._reader.close()
                self._reader = None

    def _abandon(self, what: str, error: Exception) -> None:
        """Write nothing more, and remove the index, so that the next process begins with an empty store."""
        self._fail(what, error)
        self._close_writer()
        for name in FILES[:3]:
            with suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    def _close_writer(self) -> None:
        if self._writer is not None:
            with suppress(sqlite3.Error):
                self._writer.rollback()
            with suppress(sqlite3.Error):
                self._writer.close()
            self._writer = None

    def forget(self, names: Iterable[bytes] | None) -> None:
        """Delete the entries of `names` and of all states, or all entries for None. Does not raise.

        Waits until the disk has noted it. A state may depend on each of the pages. Without write access, this process
        finds the entries no more. If the disk cannot note it, the index is removed.
        """
        if self.is_inherited:
            return
        with self._change:
            index = self._writer
            if index is None:
                self._hide(names)
                return
            try:
                index.begin()
                if names is None:
                    index.clear()
                    self._free = list(range(self.num_slots - 1, -1, -1))
                else:
                    for name in names:
                        self._give_back(index.delete_named(name))
                    for slots in index.delete_states():
                        self._give_back(slots)
                index.commit()
                index.sync()
            except (sqlite3.Error, OSError, OverflowError) as error:
                self._hide(None)
                self._abandon("pages cannot be deleted: the index is removed", error)

    def flush(self) -> None:
        """Wait until the disk has every page and entry that was written: they survive a power loss from then on.

        Needed only for that: a page that the disk does not have is computed again. Does nothing in a reader.
        """
        if self.is_inherited:
            return
        with self._change:
            if self._writer is None:
                return
            try:
                os.fdatasync(self._pages)
                self._writer.sync()
            except (sqlite3.Error, OSError) as error:
                self._undo(error)

    def stats(self) -> dict[str, Any]:
        """Return a dict of counters.

        `found`, `written`, `evicted` are pages since the store was opened; `refused` those that failed their sums;
        `failed` are batches that could not be written. `bytes` is what the files take on disk now.
        """
        with self._change:
            used = self.num_slots - len(self._free) if self.is_writer else None
            return {**self._counts, "slots": self.num_slots, "used_slots": used, "bytes": self._bytes()}

    def _bytes(self) -> int:
        """Bytes of the files on disk."""
        total = 0
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                total += path.stat().st_blocks * 512
        return total

    def close(self) -> None:
        """Close the files. The store finds and writes nothing more. May be called again."""
        if self.is_inherited:
            return  # closing the index would remove the parent's locks
        with self._change, self._look_up:
            self._close_index()
            for name in ("_pages", "_lock"):
                descriptor = getattr(self, name)
                setattr(self, name, -1)
                if descriptor >= 0:
                    os.close(descriptor)

    def _close_index(self) -> None:
        for index in (self._reader, self._writer):
            if index is not None:
                with suppress(sqlite3.Error):
                    index.close()
        self._reader = self._writer = None

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = "writer" if self.is_writer else "reader"
        return f"<{type(self).__name__} {str(self.folder)!r}: {self.num_slots} slots, {kind}>"

    def _note(self, what: str, error: Exception) -> None:
        logger.warning("the prefix store %s: %s (%s)", self.folder, what, error)

    def _fail(self, what: str, error: Exception) -> None:
        """Log a fault, once until the same operation succeeds."""
        if what not in self._faults:
            self._faults.add(what)
            self._note(what, error)


def _require_own(folder: Path) -> None:
    """Raise `PermissionError` if another user can change the files of a directory."""
    status = os.stat(folder, follow_symlinks=False)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to user {status.st_uid}, and a store must belong to {os.geteuid()}")
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        mode = stat.filemode(status.st_mode)
        raise PermissionError(f"{folder} must be a directory that only its owner can write to, its mode is {mode}")


def _write_once(path: Path, text: str) -> None:
    """Write a file unless it has this text already."""
    with suppress(FileNotFoundError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == text:
            return
    path.write_text(text, encoding="utf-8")


def _is_of_disk(error: Exception) -> bool:
    """Whether the disk is full or fails, or the database is locked: the files may be right."""
    return error.errno in DISK_ERRORS if isinstance(error, OSError) else str(error) in DISK_MESSAGES
