"""Events of a prefix cache for other processes: one for each block stored or removed, and a snapshot of all."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from pagepool.prefix.radix_tree cimport Name, NamedBlock, NameSource

from typing import NamedTuple

from pagepool._arguments import wrong
from pagepool.errors import PoolError
from pagepool.prefix.radix_tree import token_row

__all__ = [
    "EventLog",
    "NameSnapshot",
    "PrefixEvent",
    "PrefixSnapshot",
    "check_snapshot",
    "name_of_root",
    "name_row",
    "prefix_names",
]

cdef tuple KINDS = ("stored", "removed", "cleared")


cdef extern from "names.h" nogil:
    void pp_name_block(const uint64_t *parent, const int32_t *tokens, int64_t n, uint64_t *name)


class PrefixEvent(NamedTuple):
    """One change of a cache, in plain types that are easy to serialise.

    Attributes
    ----------
    sequence
        Number of the event: 1, 2, ... A missing number means that an event was dropped before it was drained.
    kind
        "stored", "removed" or "cleared": all blocks were removed.
    block
        The id, -1 with "cleared".
    name
        16 bytes, a hash of salt, keys and all tokens up to the end of the block; b"" with "cleared".
    parent
        The name of the prefix before the block, or of salt and keys alone; b"" with "cleared".
    tokens
        The tokens of the block, as int32 in native byte order. b"" for kinds other than "stored".
    """

    sequence: int
    kind: str
    block: int
    name: bytes
    parent: bytes
    tokens: bytes


class PrefixSnapshot(NamedTuple):
    """Every cached block as a "stored" event.

    Attributes
    ----------
    next_sequence
        Number of the first event after the snapshot.
    num_blocks
        Number of blocks. A shorter `stored` was truncated in transit.
    """

    next_sequence: int
    stored: list[PrefixEvent]
    num_blocks: int


class NameSnapshot(NamedTuple):
    """The names of all cached blocks: what a router needs of a `PrefixSnapshot`, in 16 bytes a block.

    Attributes
    ----------
    next_sequence
        Number of the first event after the snapshot.
    names
        16 bytes for each block, concatenated.
    num_blocks
        Number of blocks. A shorter `names` was truncated in transit.
    """

    next_sequence: int
    names: bytes
    num_blocks: int


def check_snapshot(snapshot):
    """Raise `TypeError` if it is not a `PrefixSnapshot`, `PoolError` if it was truncated."""
    if not isinstance(snapshot, PrefixSnapshot):
        raise wrong("snapshot", "a PrefixSnapshot", snapshot)
    if len(snapshot.stored) != snapshot.num_blocks:
        raise PoolError(f"a snapshot of {snapshot.num_blocks} blocks has {len(snapshot.stored)}: it was cut short")


# Makes named tuples without running Python code, because another thread could change the log meanwhile.
cdef object new_tuple = tuple.__new__


@cython.final
@cython.auto_pickle(False)
cdef class EventLog:
    """The last `max_events` events of a cache, until they are drained. Internal: see `PrefixCache.drain_events`."""

    def __cinit__(self, NameSource source not None, int number, int64_t max_events):
        self.source = source
        self.number = number
        self.first = self.next = 1
        self.events = <Event *>PyMem_Calloc(max_events, sizeof(Event))
        self.tokens = <int32_t *>PyMem_Calloc(max_events, source.block_size * sizeof(int32_t))
        if self.events == NULL or self.tokens == NULL:
            raise MemoryError(f"no memory for {max_events} events")
        self.room = max_events

    def __dealloc__(self):
        PyMem_Free(self.events)
        PyMem_Free(self.tokens)

    cdef void c_add(self, int kind, const NamedBlock *named, const int32_t *tokens) noexcept nogil:
        cdef int64_t place = self.next % self.room
        cdef size_t row = self.source.block_size
        self.events[place].kind = kind
        self.events[place].named = named[0]
        if kind == STORED:
            memcpy(self.tokens + place * row, tokens, row * sizeof(int32_t))
        self.next += 1
        if self.next - self.first > self.room:
            self.first += 1

    cdef void c_clear(self) noexcept nogil:
        cdef NamedBlock named
        memset(&named, 0, sizeof(named))
        named.block = -1
        self.c_add(CLEARED, &named, NULL)

    cdef object made(self, int64_t sequence, int kind, const NamedBlock *named, const int32_t *tokens):
        cdef bint has_name = kind != CLEARED
        name = PyBytes_FromStringAndSize(<const char *>&named.name, 16 * has_name)
        parent = PyBytes_FromStringAndSize(<const char *>&named.parent, 16 * has_name)
        row = PyBytes_FromStringAndSize(
            <const char *>tokens, <Py_ssize_t>sizeof(int32_t) * self.source.block_size * (kind == STORED)
        )
        return new_tuple(PrefixEvent, (sequence, KINDS[kind], named.block, name, parent, row))

    cdef list drain(self):
        """Return all events and forget them. When memory runs out, none is forgotten."""
        cdef int64_t sequence, place
        cdef list drained = []
        for sequence in range(self.first, self.next):
            place = sequence % self.room
            drained.append(
                self.made(
                    sequence, self.events[place].kind, &self.events[place].named,
                    self.tokens + place * self.source.block_size,
                )
            )
        self.first = self.next
        return drained

    cdef object snapshot(self, bint only_names):
        """Every cached block, as events or only their names. Later events follow it."""
        cdef int64_t most = self.source.c_most_named(), count, i
        cdef size_t row = self.source.block_size
        cdef NamedBlock *blocks = <NamedBlock *>PyMem_Malloc(most * sizeof(NamedBlock) + 1)
        cdef int32_t *tokens = <int32_t *>PyMem_Malloc(most * row * sizeof(int32_t) + 1)
        cdef bytes names
        cdef list stored = []
        try:
            if blocks == NULL or tokens == NULL:
                raise MemoryError(f"no memory for a snapshot of {most} blocks")
            count = self.source.c_list_named(self.number, blocks, tokens)
            if only_names:
                names = PyBytes_FromStringAndSize(NULL, 16 * count)
                for i in range(count):
                    memcpy(PyBytes_AS_STRING(names) + 16 * i, &blocks[i].name, 16)
                return new_tuple(NameSnapshot, (self.next, names, count))
            for i in range(count):
                stored.append(self.made(self.next - 1, STORED, &blocks[i], tokens + i * row))
            return new_tuple(PrefixSnapshot, (self.next, stored, count))
        finally:
            PyMem_Free(blocks)
            PyMem_Free(tokens)


def name_of_root(bytes digest not None, bytes secret not None):
    """The name of a salt and keys with this digest. Both have 16 bytes.

    >>> len(name_of_root(bytes(16), bytes(16)))
    16
    """
    cdef int32_t[4] words
    cdef uint64_t[2] key
    cdef uint64_t[2] name
    if len(digest) != sizeof(words) or len(secret) != sizeof(key):
        raise ValueError(f"digest and secret have 16 bytes, not {len(digest)} and {len(secret)}")
    memcpy(words, <const char *>digest, sizeof(words))
    memcpy(key, <const char *>secret, sizeof(key))
    pp_name_block(key, words, 4, name)
    return (<const char *>name)[: sizeof(name)]


def name_row(tokens, int block_size, bytes root not None):
    """The names of the full blocks of a prompt, as events give them, under `root_name` of a salt and keys: 16 bytes
    each, concatenated.

    >>> from pagepool.prefix.keys import root_key, root_name
    >>> len(name_row([1, 2, 3, 4, 5], 2, root_name(root_key(None, ()))))
    32
    """
    cdef const int32_t[::1] row = token_row(tokens)
    cdef Name parent
    cdef int64_t i
    if len(root) != 16 or block_size < 1:
        raise ValueError(f"a root has 16 bytes, not {len(root)}, and a block 1 token or more, not {block_size}")
    memcpy(&parent, <const char *>root, sizeof(parent))
    cdef int64_t n = row.shape[0] // block_size
    cdef bytes names = PyBytes_FromStringAndSize(NULL, 16 * n)
    cdef char *name = <char *>names
    for i in range(n):
        pp_name_block(parent.words, &row[i * block_size], block_size, parent.words)
        memcpy(name + 16 * i, &parent, sizeof(parent))
    return names


def prefix_names(tokens, int block_size, bytes root not None):
    """Split the result of `name_row` into a list of names.

    >>> [len(name) for name in prefix_names([1, 2, 3, 4, 5], 2, bytes(16))]
    [16, 16]
    """
    cdef bytes names = name_row(tokens, block_size, root)
    return [names[at : at + 16] for at in range(0, len(names), 16)]
