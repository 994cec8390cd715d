"""PrefixStore: pages of cached prefixes on disk, for restarts, reboots and more cache than RAM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pagepool.errors import refuse_copy
from pagepool.prefix.events import name_row
from pagepool.prefix.fingerprint import Fingerprint
from pagepool.prefix.keys import STATE, root_name
from pagepool.prefix.page_file import Page
from pagepool.prefix.page_index import ID_BYTES, Entry
from pagepool.prefix.page_store import PageStore

__all__ = ["PrefixStore"]

STATES = b"recurrent "  # begins the key of names of states; a `root_key` begins with another letter
STATE_PARENT = STATE.ljust(ID_BYTES, b"\0")


class PrefixStore:
    """Pages of cached prefixes on disk. Give it to `PrefixCache(allocator, store=store)`.

    The pages are in a `PageStore`, under names of prefixes. A page that is missing, torn, old or of another model is
    not found. The first process that opens a store writes to it, and other processes read. If the writer ends, another
    process takes its place within 20 seconds. A full store drops the prefixes that were used longest ago. If the disk
    is full or fails, the logger "pagepool" gets one line, and prompts are computed. Any thread may call it. After a
    fork, the store finds nothing in the child.

    Parameters
    ----------
    path : str or path-like
        A directory, created if needed. Each fingerprint has its own directory in it.
    fingerprint : Fingerprint
        Identifies everything that pages depend on, from `fingerprint_of`.
    max_bytes : int
        Limit in bytes of the directory, as in `PageStore`.

    Attributes
    ----------
    pages : PageStore
        The pages.

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
        self.pages = PageStore(path, max_bytes, fingerprint)
        self.seed = self.pages.seed

    @property
    def folder(self) -> Path:
        """The directory of this fingerprint."""
        return self.pages.folder

    @property
    def max_bytes(self) -> int:
        """Limit in bytes of the directory."""
        return self.pages.max_bytes

    @property
    def num_slots(self) -> int:
        """Number of pages that the limit has room for."""
        return self.pages.num_slots

    @property
    def is_writer(self) -> bool:
        """True if this store writes. False while another process does, and if this user cannot write to the files."""
        return self.pages.is_writer

    @property
    def is_inherited(self) -> bool:
        """Whether a parent process opened the store."""
        return self.pages.is_inherited

    def names(self, tokens: Any, key: bytes) -> list[bytes]:
        """Return the names of the full blocks of a prompt under a `root_key`, in this store."""
        row = name_row(tokens, self.fingerprint.block_size, root_name(key, self.seed))
        return [row[at : at + ID_BYTES] for at in range(0, len(row), ID_BYTES)]

    def state_names(self, tokens: Any, key: bytes) -> list[bytes]:
        """Return the names of the recurrent states after each full block of a prompt under a `root_key`."""
        return self.names(tokens, STATES + key)

    def _tag(self, tokens: bytes) -> bytes:
        return blake2b(tokens, digest_size=ID_BYTES, key=self.seed).digest()

    def find(self, names: Sequence[bytes], tokens: Sequence[bytes]) -> list[Entry]:
        """Return the entries of `names`, up to the first name without an entry of equal tokens."""
        return self.pages.find(names, map(self._tag, tokens))

    def find_last(self, names: Sequence[bytes], tokens: Sequence[bytes]) -> tuple[int, Entry] | None:
        """Return place and entry of the last of `names` that has an entry of equal tokens, or None."""
        return self.pages.find_last(names, lambda place: self._tag(tokens[place]))

    def write(self, pages: Iterable[tuple[bytes, bytes, bytes, Any]], used: Iterable[bytes] = ()) -> None:
        """Write pages that the store does not have, and note what was found since the last call. Does not raise.

        Parameters
        ----------
        pages : iterable of (name, parent, tokens, page)
            The page is any buffer of bytes. The parent of a recurrent state is `STATE`.
        used : iterable of bytes
            Names of other entries that were used. They and the prefixes before them are dropped later.
        """
        self.pages.write(
            [
                Page(name, STATE_PARENT if parent == STATE else parent, self._tag(tokens), memoryview(page))
                for name, parent, tokens, page in pages
            ],
            used,
        )

    def forget(self, names: Iterable[bytes] | None) -> None:
        """Delete the entries of `names` and of all states, or all entries for None. Does not raise.

        As `PageStore.forget`. A state may depend on each of the pages.
        """
        self.pages.forget_ids(names, (STATE_PARENT,))

    def flush(self) -> None:
        """Wait until the disk has every page and entry that was written: they survive a power loss from then on.

        Needed only for that: a page that the disk does not have is computed again. Does nothing in a reader.
        """
        self.pages.flush()

    def stats(self) -> dict[str, Any]:
        """Return a dict of counters, as `PageStore.stats`."""
        return self.pages.stats()

    def close(self) -> None:
        """Close the files. The store finds and writes nothing more. May be called again."""
        self.pages.close()

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self.pages).replace(type(self.pages).__name__, type(self).__name__, 1)
