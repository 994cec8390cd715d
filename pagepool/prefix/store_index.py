"""StoreIndex: the pages of a store and their slots in the page file, in an SQLite database."""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from pagepool.prefix.keys import STATE

__all__ = ["Entry", "Row", "StoreIndex", "slots_of"]

BUSY_SECONDS = 5.0
WAL_PAGES = 128  # length of the log, in pages of 4 KiB, at which SQLite copies it into the database
WAL_BYTES = 1 << 20  # the log grows while another process reads; above this size, nothing is written
AT_ONCE = 256  # names per query

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, name BLOB UNIQUE, parent BLOB, tokens BLOB, slots BLOB, length INTEGER, sum BLOB,
    used INTEGER);
CREATE INDEX by_use ON entries (used, id DESC);
"""
ANCESTORS = """
UPDATE entries SET used = :tick WHERE used < :before AND name IN (
    WITH RECURSIVE up (name) AS (
        VALUES (:name) UNION SELECT entries.parent FROM entries JOIN up ON entries.name = up.name LIMIT 8192)
    SELECT name FROM up)
"""


class Entry(NamedTuple):
    """The location and the sum of a page. `slots` has the int32 of each slot, as bytes."""

    name: bytes
    slots: bytes
    length: int
    sum: bytes


class Row(NamedTuple):
    """One new row of the index."""

    name: bytes
    parent: bytes
    tokens: bytes
    slots: bytes
    length: int
    sum: bytes
    used: int


class StoreIndex:
    """The rows of a store. Not thread-safe: the caller must not make two calls at once.

    Every method raises `sqlite3.Error` for a file that is damaged, full or locked by another process for too long.
    Values from a damaged file may have any type and content: the slots of an `Entry` are bytes of any length, its sum
    may be anything. The caller checks them, and sums decide about pages.

    Parameters
    ----------
    path : Path
        The database. A writer creates it.
    is_writer : bool
        Rows may be changed.
    """

    def __init__(self, path: Path, *, is_writer: bool) -> None:
        self._wal = path.with_name(path.name + "-wal")
        mode = "rwc" if is_writer else "rw"
        self._db = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?mode={mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._set_up(is_writer)
        except BaseException:
            self._db.close()
            raise

    def _set_up(self, is_writer: bool) -> None:
        run = self._db.execute
        run("PRAGMA trusted_schema = OFF")
        run("PRAGMA cell_size_check = ON")
        if not is_writer:
            run("PRAGMA query_only = ON")
            return
        run("PRAGMA auto_vacuum = INCREMENTAL")  # has an effect only in a new file
        run("PRAGMA journal_mode = WAL")
        # Syncs the log before it is copied, so that a power loss leaves an older database, not a torn one.
        run("PRAGMA synchronous = NORMAL")
        run(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        run(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        if run("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")

    def close(self) -> None:
        """Copy the log into the database and close it."""
        self._db.close()

    def meta(self) -> dict[object, object]:
        """Return what `set_meta` has stored."""
        return dict(self._db.execute("SELECT key, value FROM meta").fetchall())

    def set_meta(self, **values: str | bytes) -> None:
        """Store values by name."""
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(values.items()))

    def find(self, names: Sequence[bytes], tokens: Sequence[bytes]) -> list[Entry]:
        """Return the entries of `names`, up to the first name without an entry of equal tokens.

        Most look-ups end at the first name, so the first query is short.
        """
        found: list[Entry] = []
        count = 4
        while len(found) < len(names):
            begin = len(found)
            chunk = names[begin : begin + count]
            marks = ",".join("?" * len(chunk))
            query = f"SELECT name, slots, length, sum, tokens FROM entries WHERE name IN ({marks})"
            rows = {row[0]: row for row in self._db.execute(query, chunk).fetchall()}
            for name, wanted in zip(chunk, tokens[begin : begin + count], strict=True):
                row = rows.get(name)
                if row is None or row[4] != wanted or type(row[1]) is not bytes or type(row[2]) is not int:
                    return found
                found.append(Entry(*row[:4]))
            count = AT_ONCE
        return found

    def find_last(self, names: Sequence[bytes], tokens: Sequence[bytes]) -> tuple[int, Entry] | None:
        """Return place and entry of the last of `names` that has an entry of equal tokens, or None."""
        for end in range(len(names), 0, -AT_ONCE):
            chunk = names[max(0, end - AT_ONCE) : end]
            marks = ",".join("?" * len(chunk))
            query = f"SELECT name, slots, length, sum, tokens FROM entries WHERE name IN ({marks})"
            rows = {row[0]: row for row in self._db.execute(query, chunk).fetchall()}
            for place in range(end - 1, end - len(chunk) - 1, -1) if rows else ():
                row = rows.get(names[place])
                if row is not None and row[4] == tokens[place] and type(row[1]) is bytes:
                    return place, Entry(*row[:4])
        return None

    def known(self, names: Sequence[bytes]) -> set[bytes]:
        """Return the names that have an entry."""
        found: set[bytes] = set()
        for begin in range(0, len(names), AT_ONCE):
            chunk = names[begin : begin + AT_ONCE]
            marks = ",".join("?" * len(chunk))
            rows = self._db.execute(f"SELECT name FROM entries WHERE name IN ({marks})", chunk).fetchall()
            found.update(name for (name,) in rows)
        return found

    def slots(self) -> list[tuple[int, object]]:
        """Return number and slots of every entry, as the file has them."""
        return self._db.execute("SELECT id, slots FROM entries").fetchall()

    def last_use(self) -> int:
        """Return the largest tick of any entry."""
        (found,) = self._db.execute("SELECT max(used) FROM entries").fetchone()
        return found if isinstance(found, int) else 0

    def oldest(self, n: int, before: int) -> list[tuple[int, object]]:
        """Return number and slots of the `n` entries that were used longest ago, before a tick; children first."""
        query = "SELECT id, slots FROM entries WHERE used < ? ORDER BY used, id DESC LIMIT ?"
        return self._db.execute(query, (before, n)).fetchall()

    def begin(self) -> None:
        """Begin a change of several rows."""
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """End the change: it is visible to all processes, and it survives the death of this one."""
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        """Drop the change, if one has begun."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def insert(self, rows: Iterable[Row]) -> None:
        """Add rows; a row with the same name is replaced."""
        self._db.executemany(
            "INSERT OR REPLACE INTO entries (name, parent, tokens, slots, length, sum, used) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            rows,
        )

    def touch(self, name: bytes, tick: int, before: int) -> None:
        """Mark an entry and the entries of all prefixes before it as used, if they were last used before a tick."""
        self._db.execute(ANCESTORS, {"name": name, "tick": tick, "before": before})

    def delete(self, ids: Iterable[int]) -> None:
        """Delete entries by number."""
        self._db.executemany("DELETE FROM entries WHERE id = ?", [(number,) for number in ids])

    def delete_named(self, name: bytes, checksum: bytes | None = None) -> object:
        """Delete the entry of a name, if it has this sum; return its slots, or None."""
        row = self._db.execute("SELECT id, slots, sum FROM entries WHERE name = ?", (name,)).fetchone()
        if row is None or (checksum is not None and row[2] != checksum):
            return None
        self.delete([row[0]])
        slots: object = row[1]
        return slots

    def delete_states(self) -> list[object]:
        """Delete the entries of recurrent states; return the slots of each. Reads every row."""
        rows = self._db.execute("SELECT id, slots FROM entries WHERE parent = ?", (STATE,)).fetchall()
        self.delete([row[0] for row in rows])
        return [row[1] for row in rows]

    def clear(self) -> None:
        """Delete every entry."""
        self._db.execute("DELETE FROM entries")

    def sync(self) -> None:
        """Copy the log into the database and wait until the disk has it."""
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")

    def shrink(self) -> None:
        """Give pages of the file that no row uses back to the file system."""
        self._db.execute("PRAGMA incremental_vacuum").fetchall()
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def has_room(self) -> bool:
        """Whether the log is short enough for another batch; tries to shorten it."""
        if self._wal_bytes() > WAL_BYTES:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return self._wal_bytes() <= WAL_BYTES

    def _wal_bytes(self) -> int:
        try:
            return os.stat(self._wal).st_size
        except FileNotFoundError:
            return 0


def slots_of(value: object) -> array[int] | None:
    """Return the slots in a value of the index, or None where it is not a list of slots."""
    return array("I", value) if isinstance(value, bytes) and len(value) % 4 == 0 else None
