"""PrefixDirectory: records which caches hold which prefixes. Prefixes have the names from the events of the caches."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

import os

import numpy as np

from pagepool.errors import PoolError, refuse_copy

__all__ = ["PrefixDirectory"]

cdef int64_t LEAST = 64  # number of rows of the smallest table
cdef int64_t AHEAD = 8  # number of names by which prefetches run ahead


cdef extern from "block_hash.h" nogil:
    uint64_t pp_hash_fold(uint64_t a, uint64_t b)


cdef extern from *:
    int __builtin_ctzll(uint64_t word) nogil
    void __builtin_prefetch(const void *place) nogil


@cython.final
@cython.auto_pickle(False)
cdef class PrefixDirectory:
    """PrefixDirectory(num_caches)\n--\n
    A hash table from the name of a prefix to the set of caches that hold it. Not thread-safe.

    Names are concatenated bytes, 16 for each prefix. If `add` or `replace` raises `MemoryError`, nothing has changed. A
    wrong cache raises `IndexError`, a wrong number of bytes `ValueError`.

    Parameters
    ----------
    num_caches : int
        Number of caches, which are numbered from 0.

    Examples
    --------
    >>> from pagepool.prefix.events import name_row
    >>> directory, names = PrefixDirectory(2), name_row(range(8), 2, bytes(16))
    >>> directory.add(0, names)
    >>> directory.add(1, names[:32])
    >>> directory.prefix_lengths(names).tolist(), len(directory)
    ([4, 2], 4)
    """

    # A row is a name (2 words) and a bit for each cache (`words` words). A row without a bit is empty. Linear probing:
    # no row between the home of a name and its row is empty. Removal closes the gap.
    # num_rows == rows that are not empty; 4 * num_rows <= 3 * room; sum(counts) == bits of all rows
    cdef uint64_t *table
    cdef int64_t room  # 0 or a power of two
    cdef int64_t num_rows
    cdef int words
    cdef int64_t[::1] counts
    cdef uint64_t seed[2]

    def __cinit__(self, int32_t num_caches):
        if num_caches < 1:
            raise ValueError(f"num_caches must be at least 1, not {num_caches}")
        self.words = (num_caches + 63) // 64
        self.counts = np.zeros(num_caches, np.int64)
        # Names are hashes of tokens. Without a secret, an attacker could make many prompts with the same home.
        secret = os.urandom(16)
        memcpy(self.seed, PyBytes_AS_STRING(secret), 16)

    def __dealloc__(self):
        PyMem_Free(self.table)

    def __reduce__(self):
        refuse_copy(self)

    def __len__(self):
        return self.num_rows

    @property
    def nbytes(self):
        """Bytes of the table."""
        return self.room * (2 + self.words) * 8

    def num_blocks(self, int cache):
        """Return the number of prefixes that a cache holds."""
        self.see(cache, b"")
        return self.counts[cache]

    def add(self, int cache, bytes names not None):
        """Record that the cache holds these prefixes, in addition to its earlier ones."""
        cdef int64_t n = self.see(cache, names)
        self.reserve(n)
        self.c_add_all(cache, <const uint64_t *>PyBytes_AS_STRING(names), n)

    def remove(self, int cache, bytes names not None):
        """Record that the cache no longer holds these prefixes. Ignores prefixes that it did not hold."""
        cdef int64_t n = self.see(cache, names), i, at
        cdef const uint64_t *name = <const uint64_t *>PyBytes_AS_STRING(names)
        for i in range(n):
            at = self.c_find(name + 2 * i)
            if at >= 0:
                self.c_drop(cache, at)

    def clear(self, int cache):
        """Record that the cache holds no prefixes. O(rows)."""
        self.see(cache, b"")
        self.c_clear(cache)

    cdef void c_clear(self, int cache) noexcept nogil:
        cdef int64_t at = 0
        # Closing a gap moves a later row into it, so this position is checked again. Rows that move past the end of the
        # table have already lost the bit.
        while self.counts[cache] and at < self.room:
            if not self.c_drop(cache, at):
                at += 1

    def replace(self, int cache, bytes names not None):
        """Record that the cache holds exactly these prefixes."""
        cdef int64_t n = self.see(cache, names)
        self.reserve(n)
        self.c_clear(cache)
        self.c_add_all(cache, <const uint64_t *>PyBytes_AS_STRING(names), n)

    def prefix_lengths(self, bytes names not None):
        """Return the number of leading prefixes that each cache holds without a gap: int32 (num_caches,)."""
        cdef int64_t n = self.see(0, names), i, at = 0
        cdef int word, num_caches = <int>self.counts.shape[0]
        cdef const uint64_t *name = <const uint64_t *>PyBytes_AS_STRING(names)
        cdef uint64_t gone, left
        found = np.zeros(num_caches, np.int32)
        bits = np.full(self.words, 0xffffffffffffffff, np.uint64)
        cdef int32_t[::1] lengths = found
        cdef uint64_t[::1] holders = bits
        if num_caches % 64:
            holders[self.words - 1] = (<uint64_t>1 << (num_caches % 64)) - 1
        for i in range(n):
            self.c_prefetch(name, i + AHEAD, n)
            at = self.c_find(name + 2 * i)
            left = 0
            for word in range(self.words):
                gone = holders[word] & ~(self.c_row(at)[2 + word] if at >= 0 else 0)
                holders[word] &= ~gone
                left |= holders[word]
                while gone:
                    lengths[64 * word + __builtin_ctzll(gone)] = <int32_t>i
                    gone &= gone - 1
            if not left:
                return found
        for word in range(self.words):
            while holders[word]:
                lengths[64 * word + __builtin_ctzll(holders[word])] = <int32_t>n
                holders[word] &= holders[word] - 1
        return found

    def check(self):
        """Raises `PoolError` when an equation above does not hold."""
        cdef int64_t at, rows = 0, cache
        counts = [0] * self.counts.shape[0]
        for at in range(self.room):
            if self.c_is_empty(at):
                continue
            rows += 1
            if self.c_find(self.c_row(at)) != at:
                raise PoolError(f"the name of row {at} of {self.room} is not found there")
            for cache in range(self.counts.shape[0]):
                counts[cache] += self.c_row(at)[2 + cache // 64] >> (cache % 64) & 1
        if rows != self.num_rows:
            raise PoolError(f"{rows} rows are taken, {self.num_rows} are counted")
        if counts != list(self.counts):
            raise PoolError(f"caches have {counts} blocks, {list(self.counts)} are counted")
        if 4 * rows > 3 * self.room:
            raise PoolError(f"{rows} of {self.room} rows are taken")

    cdef int64_t see(self, int cache, bytes names) except -1:
        """Return the number of names."""
        if not 0 <= cache < self.counts.shape[0]:
            raise IndexError(f"cache {cache} is out of range: there are {self.counts.shape[0]} caches")
        if PyBytes_GET_SIZE(names) % 16:
            raise ValueError(f"names must be a multiple of 16 bytes, got {PyBytes_GET_SIZE(names)}")
        return PyBytes_GET_SIZE(names) // 16

    def reserve(self, int64_t n):
        """Reserves room for n more names, so that adding them allocates nothing."""
        cdef int64_t room = max(LEAST, self.room), old = self.room, at
        cdef size_t row = 2 + self.words
        cdef uint64_t *before = self.table
        cdef uint64_t *table
        while 4 * (self.num_rows + n) > 3 * room:
            room *= 2
        if room == old:
            return
        table = <uint64_t *>PyMem_Calloc(room, row * sizeof(uint64_t))
        if table == NULL:
            raise MemoryError(f"no memory for {room} rows of {row * sizeof(uint64_t)} bytes")
        self.table, self.room = table, room
        for at in range(old):
            if not c_none(before + at * row + 2, self.words):
                memcpy(self.c_row(self.c_place(before + at * row)), before + at * row, row * sizeof(uint64_t))
        PyMem_Free(before)

    cdef void c_add_all(self, int cache, const uint64_t *names, int64_t n) noexcept nogil:
        cdef int64_t i
        for i in range(n):
            self.c_prefetch(names, i + AHEAD, n)
            self.c_add(cache, names + 2 * i)

    cdef void c_prefetch(self, const uint64_t *names, int64_t i, int64_t n) noexcept nogil:
        if i < n and self.room:
            __builtin_prefetch(self.c_row(self.c_home(names + 2 * i)))

    cdef void c_add(self, int cache, const uint64_t *name) noexcept nogil:
        cdef uint64_t *row = self.c_row(self.c_place(name))
        cdef uint64_t bit = <uint64_t>1 << (cache % 64)
        if c_none(row + 2, self.words):
            row[0], row[1] = name[0], name[1]
            self.num_rows += 1
        self.counts[cache] += not row[2 + cache // 64] & bit
        row[2 + cache // 64] |= bit

    cdef bint c_drop(self, int cache, int64_t at) noexcept nogil:
        """Clears the cache's bit in a row. Returns true if the row was removed."""
        cdef uint64_t *row = self.c_row(at)
        cdef uint64_t bit = <uint64_t>1 << (cache % 64)
        if not row[2 + cache // 64] & bit:
            return False
        row[2 + cache // 64] &= ~bit
        self.counts[cache] -= 1
        if not c_none(row + 2, self.words):
            return False
        self.num_rows -= 1
        self.c_close_gap(at)
        return True

    cdef void c_close_gap(self, int64_t gap) noexcept nogil:
        """Fill a gap with the next row that may move there, and repeat this for the gap that the row leaves."""
        cdef int64_t last = self.room - 1, at = gap, home
        cdef size_t size = (2 + self.words) * sizeof(uint64_t)
        while True:
            at = (at + 1) & last
            if self.c_is_empty(at):
                return
            home = self.c_home(self.c_row(at))
            if ((at - home) & last) >= ((at - gap) & last):  # its home is not behind the gap
                memcpy(self.c_row(gap), self.c_row(at), size)
                memset(self.c_row(at), 0, size)
                gap = at

    cdef int64_t c_find(self, const uint64_t *name) noexcept nogil:
        """Returns the row of a name, or -1."""
        if not self.num_rows:
            return -1
        cdef int64_t at = self.c_place(name)
        return -1 if self.c_is_empty(at) else at

    cdef int64_t c_place(self, const uint64_t *name) noexcept nogil:
        """Returns the row of a name, or the empty row into which it would be inserted."""
        cdef int64_t at = self.c_home(name)
        cdef uint64_t *row = self.c_row(at)
        while not (row[0] == name[0] and row[1] == name[1]) and not c_none(row + 2, self.words):
            at = (at + 1) & (self.room - 1)
            row = self.c_row(at)
        return at

    cdef int64_t c_home(self, const uint64_t *name) noexcept nogil:
        return <int64_t>(pp_hash_fold(name[0] ^ self.seed[0], name[1] ^ self.seed[1]) & <uint64_t>(self.room - 1))

    cdef uint64_t *c_row(self, int64_t at) noexcept nogil:
        return self.table + at * (2 + self.words)

    cdef bint c_is_empty(self, int64_t at) noexcept nogil:
        return c_none(self.c_row(at) + 2, self.words)


cdef bint c_none(const uint64_t *bits, int words) noexcept nogil:
    cdef int i
    for i in range(words):
        if bits[i]:
            return False
    return True
