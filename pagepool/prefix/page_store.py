"""PageStore: pages of bytes under opaque keys, in files with a bound, for restarts and for more pages than RAM."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pagepool._arguments import integer, wrong
from pagepool.errors import refuse_copy
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.page_file import Page, PageFile
from pagepool.prefix.page_index import ID_BYTES, SEED_BYTES, SUM_BYTES, Entry, PageIndex, PageSum, head_of
from pagepool.prefix.store_files import bytes_for, close_all, open_reader, open_writer, slots_within
from pagepool.prefix.store_folder import bytes_on_disk, claim, lock, reserve, unlock

if TYPE_CHECKING:
    from pagepool.memory.allocator import BlockAllocator

__all__ = ["PageStore"]

logger = logging.getLogger("pagepool")

STEPS = 64  # number of steps in which the page file grows to its limit
MOST_STEP = 1 << 16  # slots: a step takes memory and time for each
GROWTH_SECONDS = 1.0  # time after which a store asks again, if the bound of the directory has stopped its growth
READER_SECONDS = 1.0  # how long a reader waits for the writer to create its files, if both start at once
MOST_NOTES = 64  # uses that wait for the next batch
HEAD_SIZE = len(head_of(bytes(SEED_BYTES), bytes(SUM_BYTES), 0))
COUNTS = ("found", "found_blocks", "written", "refused", "evicted", "dropped", "failed", "read_bytes", "written_bytes")
CANNOT_READ, CANNOT_WRITE = "a page cannot be read", "pages cannot be written"
NO_ROOM, NO_WRITER = "a page finds no room", "it only reads"

_stores: WeakSet[PageStore] = WeakSet()  # a child must not keep the descriptor of the lock after fork


def _close_in_child() -> None:
    for store in list(_stores):
        store._close_files()


os.register_at_fork(after_in_child=_close_in_child)


class PageStore:
    """Pages of bytes under opaque keys, in a directory, with a bound in bytes. A page is returned as it was written.

    A page that is missing, torn, old or of another fingerprint fails its 128-bit sum and is not found, so no file needs
    to be synced. The first process that opens a store writes to it, and other processes read. If the writer ends, the
    next call of another process that writes takes its place. A full store drops the page that was used longest ago, but
    no page before its children. If the disk is full or fails, the logger "pagepool" gets one line, and pages are not
    found or not kept. No call waits for another process, except `put` for 2 ms while the files of a store in the same
    directory grow. Any thread may call it. After a fork, the store finds nothing in the child.

    Parameters
    ----------
    path : str or path-like
        A directory, created if needed. Each fingerprint has its own directory in it.
    max_bytes : int
        Limit in bytes of the directory, over all fingerprints. Stores of other fingerprints that no process has open
        are removed to make room. Stores that were written to in the last ten minutes are removed only if this one has
        less than a 64th of the limit. If the limit is lower than before, pages are dropped.
    fingerprint : Fingerprint
        Identifies everything that pages depend on besides their keys, and has the size of most pages.

    Raises
    ------
    ValueError
        If `max_bytes` has no room for four pages.
    OSError
        If the directory cannot be made, belongs to another user, or can be written by other users.

    Examples
    --------
    >>> import tempfile
    >>> from pagepool.prefix.fingerprint import Fingerprint
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = Fingerprint("sha256:1234, bfloat16", page_bytes=4)
    >>> with PageStore(folder.name, 1 << 20, model) as store:
    ...     store.put(b"first", b"abcd"), store.put(b"second", b"efgh", parent=b"first")
    (True, True)
    >>> store, page = PageStore(folder.name, 1 << 20, model), bytearray(4)  # after a restart
    >>> store.get(b"second", page), page, store.contains(b"third")
    (True, bytearray(b'efgh'), False)
    >>> store.forget([b"second"])
    >>> store.get(b"second", page)
    False
    >>> store.close()
    >>> folder.cleanup()
    """

    __reduce__ = refuse_copy

    def __init__(self, path: str | Path, max_bytes: int, fingerprint: Fingerprint) -> None:
        if not isinstance(fingerprint, Fingerprint):
            raise TypeError(f"fingerprint must be a Fingerprint, not {type(fingerprint).__name__}")
        self.fingerprint = fingerprint
        self.max_bytes = integer("max_bytes", max_bytes, 0)
        self.slot_bytes, self.num_slots = slots_within(self.max_bytes, fingerprint)
        self._pid = os.getpid()
        self._change = Lock()  # held by the thread that changes files; taken before `_look_up`
        self._look_up = Lock()  # guards `_index` and its memory, and the next five fields; never held during a write
        self._used: set[bytes] = set()  # ids found since the last batch
        self._refused: dict[bytes, Entry] = {}  # entries with pages that failed their sums: not found
        self._hidden: set[bytes] = set()  # ids that were forgotten without write access
        self._hidden_parents: set[bytes] = set()
        self._hides_all = False
        self._faults: set[str] = set()  # logged, and not seen to be over
        self._counts = dict.fromkeys(COUNTS, 0)
        self._index: PageIndex | None = None
        self._pages: PageFile | None = None
        self._files: list[int] = []  # descriptors of the index and of the pages, until `close`
        self._lock = -1
        self._tick, self._ask_again = 0, 0.0
        self._is_closed = False
        self.seed = b""
        root = Path(path)
        self.folder = root / fingerprint.digest.hex()
        self._may_write = self._claim(root)
        _stores.add(self)
        try:
            if not self._take_over() and not self._open_reader():
                self.seed = self.seed or os.urandom(SEED_BYTES)
        except BaseException:
            self.close()
            raise

    def _claim(self, root: Path) -> bool:
        """Make the directories if needed. Return whether the files may be written, False if they are only read."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        may_write = claim(root.resolve())
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if may_write:
                raise
            self._fail("it finds nothing", error)
            return False
        return claim(self.folder) and may_write

    # Opening the files, also when the process that writes has ended.

    def _take_over(self) -> bool:
        """Become the process that writes, unless another process is. Returns whether this process writes."""
        if self._lock >= 0:
            if os.path.exists(self.folder / "index"):
                return True
            self._close_lock()  # the files were removed: begin them again
        if not self._may_write or self._is_closed:
            return False
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = lock(self.folder)
            if descriptor is None:
                self._fail(NO_WRITER, "another process writes to it")
                return False
            self._lock = descriptor
            self._open_writer()
        except OSError as error:
            self._fail(CANNOT_WRITE, error)
            self._close_lock()
            return False
        if NO_WRITER in self._faults:
            self._faults.discard(NO_WRITER)
            logger.warning("the prefix store %s: this process writes to it from now on", self.folder)
        return True

    def _open_writer(self) -> None:
        """Open the files for writing. Replaces an index that is damaged or has another fingerprint by an empty one."""
        seed = os.urandom(SEED_BYTES) if self._hides_all and not self.seed else self.seed
        files, seed, is_anew = open_writer(self.folder, self.fingerprint, self.slot_bytes, self.num_slots, seed)
        if is_anew:
            self._note("its index is begun anew", "it is damaged, or of another process")
        index, pages = self._new_files(files, seed)
        try:
            wrong = index.load(pages.num_slots, is_writer=True)
            if wrong:
                index.erase(wrong)
                index.publish_all()
            self._tick = index.last_use() + 1
        except BaseException:
            close_all(files)
            raise
        self._use(files, seed, index, pages)
        try:
            if self._hides_all and pages.num_slots:  # files that were created now have no page
                self._forget_all()
            self._forget(self._hidden, self._hidden_parents)
            self._hidden, self._hidden_parents, self._hides_all = set(), set(), False
            reserve(self.folder, bytes_for(index.num_slots, self.slot_bytes), self.max_bytes, lambda: None)
        except BaseException:
            self._index = None
            raise

    def _open_reader(self) -> bool:
        """Open the files for reading; return whether their head is right."""
        give_up = monotonic() + (READER_SECONDS if self._may_write else 0)
        while True:
            try:
                files, seed = open_reader(self.folder, self.fingerprint, self.slot_bytes)
                try:
                    index, pages = self._new_files(files, seed)
                    index.load(pages.num_slots, is_writer=False)
                except BaseException:
                    close_all(files)
                    raise
                self._use(files, seed, index, pages)
                if not self._may_write:
                    self._fail(NO_WRITER, "this user cannot write to it")
                return True
            except (OSError, ValueError) as error:
                if CANNOT_WRITE in self._faults:
                    return False
                if monotonic() > give_up:
                    self._fail("it finds nothing", error)
                    return False
            sleep(0.02)

    def _new_files(self, files: list[int], seed: bytes) -> tuple[PageIndex, PageFile]:
        sums = PageSum(self.fingerprint.digest, seed)
        return PageIndex(files[0], sums, self.slot_bytes), PageFile(files[1], sums, self.slot_bytes)

    def _use(self, files: list[int], seed: bytes, index: PageIndex, pages: PageFile) -> None:
        """Use these files from now on. Reads in other threads go on with the old ones."""
        with self._look_up:
            if self._files:
                for new, old in zip(files, self._files, strict=True):
                    os.dup2(new, old, inheritable=False)
                close_all(files)
                index.file, pages.file = self._files
            else:
                self._files = files
            self.seed, self._head = seed, head_of(seed, self.fingerprint.digest, self.slot_bytes)
            self._index, self._pages = index, pages

    @property
    def is_writer(self) -> bool:
        """True if this store writes. False while another process does, and if this user cannot write to the files."""
        return self._lock >= 0

    @property
    def is_inherited(self) -> bool:
        """Whether a parent process opened the store. Another thread of the parent may hold its locks for ever."""
        return os.getpid() != self._pid

    # Keys. `PrefixStore` has ids of its own.

    def _id(self, key: bytes) -> bytes:
        try:
            return blake2b(key, digest_size=ID_BYTES, key=self.seed).digest()
        except TypeError:
            raise wrong("key", "bytes", key) from None

    def put(self, key: bytes, page: Any, parent: bytes | None = None) -> bool:
        """Write a page. If the store has this key already, it is only marked as used. Does not raise `OSError`.

        Parameters
        ----------
        key : bytes
            Identifies the bytes of the page.
        page : buffer
            Any C-contiguous buffer. It is read without the GIL.
        parent : bytes or None
            The key of another page that is needed with this one, such as the page before it in a prompt. The store
            drops a page before its parent, and each use of a page counts as a use of its parent.

        Returns
        -------
        bool
            Whether the store has the page. False in a process that only reads, and when the page finds no room.
        """
        name = self._id(key)
        above = bytes(ID_BYTES) if parent is None else self._id(parent)
        self.write([Page(name, above, bytes(ID_BYTES), memoryview(page).cast("B"))])
        return self._contains(name)

    def get(self, key: bytes, into: Any) -> bool:
        """Read a page into a writable buffer of its size, and mark it as used; return whether the store has it.

        If the page fails its sum, the buffer has any content. Reads without the GIL. Raises `ValueError` if the buffer
        has another size than the page.
        """
        found = self.find([self._id(key)], [bytes(ID_BYTES)])
        if not found:
            return False
        target = memoryview(into).cast("B")
        if target.nbytes != found[0].length:
            raise ValueError(f"into must have the {found[0].length} bytes of the page, not {target.nbytes}")
        return self.read(found[0], target)

    def contains(self, key: bytes) -> bool:
        """Return whether the store has a page. Its bytes are not read, so `get` may still fail."""
        return self._contains(self._id(key))

    def _contains(self, name: bytes) -> bool:
        if self.is_inherited:
            return False
        with self._look_up:
            index = self._current()
            return index is not None and name in index.entries and not self._is_hidden(index.entries[name])

    def touch(self, key: bytes) -> None:
        """Mark a page as used. The mark is written with the next page, or by `flush` or `close`."""
        self.note_use(self._id(key))

    # Look-ups.

    def _current(self) -> PageIndex | None:
        """Return the index with all changes of the process that writes, or None without an index."""
        if self._index is not None and self._pages is not None and self._lock < 0:
            try:
                if os.pread(self._index.file, HEAD_SIZE, 0) != self._head:
                    return None  # begun anew, with another seed
                self._index.refresh(self._pages.num_slots)
            except OSError as error:
                self._fail("the index cannot be read", error)
                return None
        return self._index

    def is_behind(self) -> bool:
        """Return whether a look-up reads the whole index, or waits for a thread that does. Waits 2 ms at most."""
        if self.is_inherited or not self._look_up.acquire(timeout=0.002):
            return not self.is_inherited
        try:
            return self._index is not None and self._lock < 0 and self._index.is_behind()
        except OSError:
            return False  # the look-up logs it
        finally:
            self._look_up.release()

    def _is_hidden(self, entry: Entry) -> bool:
        if self._refused.get(entry.id) is entry:
            return True
        return self._hides_all or entry.id in self._hidden or entry.parent in self._hidden_parents

    def find(self, ids: Sequence[bytes], tags: Iterable[bytes]) -> list[Entry]:
        """Return the entries of `ids`, up to the first id without an entry of an equal tag."""
        if self.is_inherited:
            return []
        with self._look_up:
            index, found = self._current(), []
            if index is None:
                return []
            for entry in map(index.entries.get, ids):
                if entry is None or self._is_hidden(entry):
                    break
                found.append(entry)
            count = len(found)
        for place, (entry, tag) in enumerate(zip(found, tags, strict=False)):
            if entry.tag != tag:
                count = place
                break
        del found[count:]
        if found:
            self.note_use(found[-1].id)
        return found

    def find_last(self, ids: Sequence[bytes], tag_of: Callable[[int], bytes]) -> tuple[int, Entry] | None:
        """Return place and entry of the last of `ids` that has an entry with the tag of its place, or None."""
        if self.is_inherited:
            return None
        with self._look_up:
            index = self._current()
            if index is None:
                return None
            for place in range(len(ids) - 1, -1, -1):
                entry = index.entries.get(ids[place])
                if entry is not None and not self._is_hidden(entry) and entry.tag == tag_of(place):
                    self._note_use(entry.id)
                    return place, entry
        return None

    def note_use(self, name: bytes) -> None:
        """Note that an entry was used. The next batch marks it."""
        if not self.is_inherited:
            with self._look_up:
                self._note_use(name)

    def _note_use(self, name: bytes) -> None:
        if self._lock >= 0 and self._index is not None and name in self._index.entries:  # a reader never writes it
            self._used.add(name)

    @property
    def has_notes(self) -> bool:
        """Whether `write` should be called soon: a page has failed its sum, or many entries were used."""
        return self._lock >= 0 and (bool(self._refused) or len(self._used) >= MOST_NOTES)

    def load(self, entries: Sequence[Entry], allocator: BlockAllocator, blocks: Sequence[int]) -> int:
        """Read the pages of `entries` into blocks; return how many of the first are the pages that were written.

        The caller holds the only reference to each block. Blocks behind the returned number have any content.
        """
        if self._pages is None:
            return 0
        size = self.fingerprint.page_bytes
        count, error = self._pages.load(entries, allocator, blocks, size)
        if error not in (0, errno.EINVAL):
            self._note_read(error)
        self._note_found(count, count * size, count)
        if count < len(entries):
            self._refuse(entries[count])
        return count

    def read(self, entry: Entry, page: memoryview) -> bool:
        """Read the page of an entry into `page`; return whether it is the page that was written."""
        if self._pages is None:
            return False
        try:
            is_right = self._pages.read(entry, page)
        except OSError as error:
            self._note_read(error.errno or errno.EIO)
            is_right = False
        if is_right:
            self._note_found(1, page.nbytes, 0)
        else:
            self._refuse(entry)
        return is_right

    def _note_found(self, count: int, num_bytes: int, num_blocks: int) -> None:
        with self._look_up:
            self._counts["found"] += count
            self._counts["found_blocks"] += num_blocks
            self._counts["read_bytes"] += num_bytes
            if count:
                self._faults.discard(CANNOT_READ)

    def _note_read(self, number: int) -> None:
        with self._look_up:
            self._fail(CANNOT_READ, os.strerror(number))

    def _refuse(self, entry: Entry) -> None:
        with self._look_up:
            index = self._current()
            if index is None or index.entries.get(entry.id) is not entry:
                return  # it was dropped during the read
            kept = {id_: each for id_, each in self._refused.items() if index.entries.get(id_) is each}
            self._refused = {**kept, entry.id: entry}
            self._counts["refused"] += 1

    # Changes.

    def write(self, pages: Iterable[Page], used: Iterable[bytes] = ()) -> None:
        """Write pages that the store does not have, and mark entries as used. Does not raise `OSError`.

        Parameters
        ----------
        pages : iterable of Page
            A page is only marked as used if the store has its id.
        used : iterable of bytes
            Ids of other entries that were used.
        """
        if self.is_inherited:
            return
        batch = list(pages)
        with self._change:
            before = self._counts["written"]
            try:
                known = self._write(batch, used) if self._take_over() else 0
            except OSError as error:
                known = 0
                self._counts["failed"] += 1
                self._fail(CANNOT_WRITE, error)
            self._counts["dropped"] += len(batch) - known - (self._counts["written"] - before)

    def _open(self) -> tuple[PageIndex, PageFile]:
        """Return the files of the process that writes."""
        assert self._index is not None
        assert self._pages is not None
        return self._index, self._pages

    def _write(self, pages: list[Page], used: Iterable[bytes]) -> int:
        """Write a batch; return how many of the pages the store had already."""
        index, _ = self._open()
        with self._look_up:
            uses, refused = self._used.union(used), dict(self._refused)
            self._used = set()
        entries = index.entries
        self._drop([id_ for id_, entry in refused.items() if entries.get(id_) is entry], is_kept=False)
        with self._look_up:
            self._refused = {id_: entry for id_, entry in self._refused.items() if refused.get(id_) is not entry}
        fresh = {page.id: page for page in pages if page.id not in entries}
        marks = {page.id for page in pages if page.id not in fresh}
        marks.update(page.parent for page in fresh.values())
        if not (fresh or marks or uses):
            return 0
        self._mark(uses)
        self._tick += 1  # pages that were used before the batch can be dropped for it
        self._mark(marks)
        num_known = len(pages) - len(fresh)
        changed: list[int] = []
        try:
            for page in fresh.values():
                slots = self._slots_for(page, changed)
                if slots is None:
                    if index.num_slots < self.num_slots:
                        self._fail(NO_ROOM, f"all stores in the directory may take {self.max_bytes} bytes together")
                    break
                self._write_page(page, slots)
                changed += slots
                self._faults.discard(CANNOT_WRITE)
        finally:
            index.publish(changed)
            self._tick += 1
        return num_known

    def _mark(self, ids: Iterable[bytes]) -> None:
        """Mark entries as used now, in memory and in the file."""
        index, _ = self._open()
        with self._look_up:
            found = [index.entries[id_] for id_ in ids if index.mark(id_, self._tick)]
        for entry in found:
            index.write_use(entry)

    def _slots_for(self, page: Page, changed: list[int]) -> Sequence[int] | None:
        """Take free slots for a page. Entries that were used longest ago are deleted for it, but none of this batch.

        Returns None, and takes nothing, when there are too few.
        """
        index, pages = self._open()
        count = pages.slots_of(page.data.nbytes)
        while len(index.free) < count:
            if self._grow(count - len(index.free)):
                continue
            if count > index.num_slots:
                return None
            with self._look_up:
                victims = index.oldest(self._tick, 1)
            if not victims:
                return None
            changed += self._drop(victims, is_kept=True)
            self._counts["evicted"] += len(victims)
        return [index.free.pop() for _ in range(count)]

    def _grow(self, count: int) -> bool:
        """Let the page file grow by `count` slots at least, if the bound allows it."""
        index, pages = self._open()
        room = self.num_slots - index.num_slots
        has_room = index.num_slots >= max(1, self.num_slots // STEPS)
        if not room or monotonic() < self._ask_again:
            return False
        for more in (min(room, max(count, min(self.num_slots // STEPS, MOST_STEP))), min(room, count)):
            after = index.num_slots + more
            size, grow = bytes_for(after, self.slot_bytes), partial(pages.resize, after)
            if reserve(self.folder, size, self.max_bytes, grow, keeps_recent=has_room):
                index.free[:0] = range(after - 1, index.num_slots - 1, -1)
                index.num_slots = after
                return True
        self._ask_again = monotonic() + GROWTH_SECONDS
        return False

    def _write_page(self, page: Page, slots: Sequence[int]) -> None:
        index, pages = self._open()
        try:
            checksum = pages.write(page.id, page.data, slots)
            entry = Entry(page.id, page.parent, page.tag, checksum, page.data.nbytes, slots, self._tick)
            index.write_entry(entry)
        except BaseException:
            index.free.extend(slots)
            raise
        with self._look_up:
            index.add(entry)
        self._counts["written"] += 1
        self._counts["written_bytes"] += page.data.nbytes

    def _drop(self, ids: Iterable[bytes], *, is_kept: bool) -> list[int]:
        """Delete entries; return their slots. Unless the slots are written at once (`is_kept`), their bytes go too."""
        index, pages = self._open()
        with self._look_up:
            gone, parents = index.take(ids)
        if not gone:
            return []
        slots = [slot for entry in gone for slot in entry.slots]
        index.erase(slots)
        for parent in parents:
            index.write_use(parent)
        if not is_kept:
            index.publish(slots)
            pages.punch(slots)
        return slots

    def forget(self, keys: Iterable[bytes] | None) -> None:
        """Delete pages, None: all. Waits until the disk has noted it. Does not raise `OSError`.

        Their bytes are removed from the files. Without write access, this process finds the pages no more. If the disk
        cannot note it, the store is removed.
        """
        self.forget_ids(None if keys is None else [self._id(key) for key in keys])

    def forget_ids(self, ids: Iterable[bytes] | None, parents: Iterable[bytes] = ()) -> None:
        """Delete the entries of `ids` and all entries with one of these parents; for None all entries."""
        if self.is_inherited:
            return
        names = None if ids is None else set(ids)
        with self._change:
            if not self._take_over():
                self._hide(names, parents)
                return
            try:
                if names is None:
                    self._forget_all()
                else:
                    self._forget(names, set(parents))
                self._sync()
            except OSError as error:
                self._hide(None, ())
                self._abandon(error)

    def _forget_all(self) -> None:
        index, pages = self._open()
        with self._look_up:
            index.clear()
        index.erase_all()
        pages.punch_all()

    def _forget(self, ids: set[bytes], parents: set[bytes]) -> None:
        index, _ = self._open()
        with self._look_up:
            children = [entry.id for entry in index.entries.values() if entry.parent in parents] if parents else []
        self._drop([*ids, *children], is_kept=False)

    def _hide(self, ids: Iterable[bytes] | None, parents: Iterable[bytes]) -> None:
        """Find these entries (None: all) no more in this process."""
        with self._look_up:
            self._hidden.update(() if ids is None else ids)
            self._hidden_parents.update(parents)
            self._hides_all = self._hides_all or ids is None

    def _abandon(self, error: OSError) -> None:
        """Remove the files, so that no process finds what could not be deleted."""
        self._fail("pages cannot be deleted: the store is removed", error)
        self._index = None
        with suppress(OSError):
            os.ftruncate(self._files[0], 0)
        try:
            for name in ("index", "pages"):
                (self.folder / name).unlink(missing_ok=True)
        except OSError:
            self._may_write = False  # the pages are still there: this process must not find them
        self._close_lock()

    def flush(self) -> None:
        """Wait until the disk has every page that was written: they survive a power loss from then on.

        Needed only for that: a page that the disk does not have is not found. Does nothing in a process that reads.
        """
        if self.is_inherited:
            return
        self.write(())
        with self._change:
            if self._lock < 0:
                return
            try:
                self._sync()
            except OSError as error:
                self._counts["failed"] += 1
                self._fail(CANNOT_WRITE, error)

    def _sync(self) -> None:
        for file in self._files:
            os.fdatasync(file)

    def note_dropped(self, count: int, why: str) -> None:
        """Count pages that were not written for another reason."""
        self._counts["dropped"] += count
        self._fail(NO_ROOM, why)

    def stats(self) -> dict[str, Any]:
        """Return a dict of counters. Waits for no lock.

        Since the store was opened: `found`, `written` and `evicted` are pages, `read_bytes` and `written_bytes` their
        bytes, and `found_blocks` the found pages that went into blocks of a cache. `refused` pages failed their sums.
        `dropped` pages were not written: in a process that only reads, without room, or because the disk failed.
        `failed` are batches in which the disk failed. `bytes` is what the files of this fingerprint take on disk now.
        """
        index = self._index
        used = index.num_slots - len(index.free) if index is not None and self._lock >= 0 else None
        return {**self._counts, "slots": self.num_slots, "used_slots": used, "bytes": bytes_on_disk(self.folder)}

    def close(self) -> None:
        """Close the files. The store finds and writes nothing more. May be called again."""
        if self.is_inherited:
            return
        if self._lock >= 0:
            self.write(())  # marks of uses
        with self._change, self._look_up:
            self._is_closed = True
            self._close_files()

    def _close_files(self) -> None:
        self._index = self._pages = None
        close_all(self._files)
        self._close_lock()

    def _close_lock(self) -> None:
        descriptor, self._lock = self._lock, -1
        if descriptor >= 0:
            if not self.is_inherited:
                unlock(descriptor)
            os.close(descriptor)

    def __del__(self) -> None:
        with suppress(AttributeError):  # the arguments were refused
            self._close_files()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = "writer" if self.is_writer else "reader"
        return f"<{type(self).__name__} {str(self.folder)!r}: {self.num_slots} slots, {kind}>"

    def _note(self, what: str, why: Exception | str) -> None:
        logger.warning("the prefix store %s: %s (%s)", self.folder, what, why)

    def _fail(self, what: str, why: Exception | str) -> None:
        """Log a fault, once until the same operation succeeds."""
        if what not in self._faults:
            self._faults.add(what)
            self._note(what, why)
