"""Moves pages between a pool and a store: the queue of pages to write, and checksums of pages."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from pagepool.csrc cimport PP_OK, pp_lock, pp_status
from pagepool.memory.allocator cimport BlockAllocator, pp_regions
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.radix_tree cimport Name, NamedBlock

import os

import numpy as np

from pagepool._arguments import integer
from pagepool.errors import InvalidBlock, PoolError

__all__ = [
    "PageQueue",
    "SUM_KEY_BYTES",
    "block_bytes",
    "load_pages",
    "move_page",
    "page_sums",
    "punch",
    "read_block",
    "read_page",
    "record_sums",
    "write_block",
]


cdef extern from "regions.h" nogil:
    int64_t pp_regions_block_bytes(const pp_regions *regions, pp_lock *lock)
    pp_status pp_regions_read_block(
        const pp_regions *regions, pp_lock *lock, int32_t block, unsigned char *bytes, int64_t num_bytes)
    pp_status pp_regions_write_block(
        const pp_regions *regions, pp_lock *lock, int32_t block, const unsigned char *bytes, int64_t num_bytes)


cdef extern from "page_file.h" nogil:
    ctypedef struct pp_page_loads:
        const pp_regions *regions
        pp_lock *lock
        int file
        int64_t num_bytes
        const int64_t *offsets
        const int32_t *blocks
        const unsigned char *key
        unsigned char *sums
        int32_t *errors
    void pp_load_pages(const pp_page_loads *loads, int64_t n, int num_threads)
    int pp_punch(int file, int64_t offset, int64_t num_bytes)
    int pp_read_page(
        int file, unsigned char *page, int64_t num_bytes, int64_t offset, const unsigned char *key, unsigned char *sums)


cdef extern from "pagepool/threads.h" nogil:
    int pp_default_num_threads()


cdef extern from "page_sum.h" nogil:
    enum:
        PP_SUM_CHUNK
        PP_SUM_KEY_BYTES
        PP_SUM_BYTES
    int64_t pp_page_sums_bytes(int64_t bytes)
    void pp_sum_chunk(const unsigned char *key, const unsigned char *chunk, size_t n, unsigned char *sums)
    void pp_page_sums(const unsigned char *key, const unsigned char *page, size_t bytes, unsigned char *sums)


cdef extern from *:
    """
    #define pp_number_load(number) __atomic_load_n(number, __ATOMIC_ACQUIRE)
    #define pp_number_store(number, value) __atomic_store_n(number, value, __ATOMIC_RELEASE)
    """
    uint64_t pp_number_load(uint64_t *number) nogil
    void pp_number_store(uint64_t *number, uint64_t value) nogil


SUM_KEY_BYTES = PP_SUM_KEY_BYTES
cdef enum:
    RECENT = 64
    RECORD_BYTES = 128  # of a record of `PageIndex`: 16 bytes for the sum of the fields, the fields, and other bytes
    FIELDS_BYTES = 80


def page_sums(bytes key not None, data):
    """Return two 128-bit NH sums, 32 bytes together, for each chunk of 4,096 bytes of `data`.

    `data` is any C-contiguous buffer. Releases the GIL. Raises `ValueError` for a key of another length than
    `SUM_KEY_BYTES`.

    >>> len(page_sums(bytes(SUM_KEY_BYTES), bytes(5000)))
    64
    """
    cdef Py_buffer view
    cdef bytes sums
    cdef const unsigned char *words
    cdef unsigned char *found
    if len(key) != PP_SUM_KEY_BYTES:
        raise ValueError(f"key must have {PP_SUM_KEY_BYTES} bytes, not {len(key)}")
    words = <const unsigned char *>PyBytes_AS_STRING(key)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        sums = PyBytes_FromStringAndSize(NULL, pp_page_sums_bytes(view.len))
        found = <unsigned char *>PyBytes_AS_STRING(sums)
        with nogil:
            pp_page_sums(words, <const unsigned char *>view.buf, <size_t>view.len, found)
    finally:
        PyBuffer_Release(&view)
    return sums


def record_sums(bytes key not None, records):
    """Return the NH sum, 16 bytes, of the fields of each record of 128 bytes: of bytes 16 to 96.

    >>> len(record_sums(bytes(SUM_KEY_BYTES), bytes(256)))
    32
    """
    cdef Py_buffer view
    cdef unsigned char sums[PP_SUM_BYTES]
    cdef bytes found
    cdef Py_ssize_t i
    if len(key) != PP_SUM_KEY_BYTES:
        raise ValueError(f"key must have {PP_SUM_KEY_BYTES} bytes, not {len(key)}")
    PyObject_GetBuffer(records, &view, PyBUF_SIMPLE)
    try:
        found = PyBytes_FromStringAndSize(NULL, view.len // RECORD_BYTES * 16)
        for i in range(view.len // RECORD_BYTES):
            pp_sum_chunk(
                <const unsigned char *>PyBytes_AS_STRING(key), <const unsigned char *>view.buf + i * RECORD_BYTES + 16,
                FIELDS_BYTES // 8, sums
            )
            memcpy(PyBytes_AS_STRING(found) + 16 * i, sums, 16)
    finally:
        PyBuffer_Release(&view)
    return found


def read_page(int file, int64_t offset, into, bytes key not None):
    """Fill a writable buffer from an offset of a file. Releases the GIL.

    Returns its sums as from `page_sums`, or the errno of a failed read: EIO when the file is too short.
    """
    cdef Py_buffer view
    cdef bytes sums
    cdef unsigned char *found
    cdef const unsigned char *words
    cdef int error
    if len(key) != PP_SUM_KEY_BYTES:
        raise ValueError(f"key must have {PP_SUM_KEY_BYTES} bytes, not {len(key)}")
    words = <const unsigned char *>PyBytes_AS_STRING(key)
    PyObject_GetBuffer(into, &view, PyBUF_WRITABLE)
    try:
        sums = PyBytes_FromStringAndSize(NULL, pp_page_sums_bytes(view.len))
        found = <unsigned char *>PyBytes_AS_STRING(sums)
        with nogil:
            error = pp_read_page(file, <unsigned char *>view.buf, view.len, offset, words, found)
    finally:
        PyBuffer_Release(&view)
    return error if error else sums


def punch(int file, int64_t offset, int64_t num_bytes):
    """Remove bytes of a file: they are zeros afterwards, and take no room on the disk where it can have holes.

    Raises `OSError`.
    """
    cdef int error
    with nogil:
        error = pp_punch(file, offset, num_bytes)
    if error:
        raise OSError(error, os.strerror(error))


def block_bytes(BlockAllocator allocator not None):
    """Return the bytes of a block's pages in all pools of an allocator together; 0 without a pool.

    >>> from pagepool import BlockAllocator
    >>> block_bytes(BlockAllocator(4))
    0
    """
    return pp_regions_block_bytes(allocator.regions, &allocator.lock)


def read_block(BlockAllocator allocator not None, block, bytes_of_block):
    """Copy the pages of a block, in all pools of the allocator, into a writable buffer of `block_bytes`.

    The caller holds a reference to the block. Releases the GIL. Raises `InvalidBlock` for an id that is free or out of
    range, and `PoolError` when the pages have another size than the buffer.
    """
    move_block(allocator, block, bytes_of_block, PyBUF_WRITABLE)


def write_block(BlockAllocator allocator not None, block, bytes_of_block):
    """Copy a buffer of `block_bytes` into the pages of a block, in all pools of the allocator.

    The caller holds the only reference to the block. Releases the GIL. Raises as `read_block`.
    """
    move_block(allocator, block, bytes_of_block, PyBUF_SIMPLE)


def move_page(unsigned char[::1] page not None, buffers, bint into_page):
    """Copy a page from or to a buffer, or a list or tuple of buffers that have its size together. Releases the GIL.

    Raises `ValueError` if they have another size. Nothing has changed then.

    >>> page = bytearray(4)
    >>> move_page(page, [b"a", b"bcd"], True), page
    (None, bytearray(b'abcd'))
    """
    cdef Py_buffer *views
    cdef Py_ssize_t count, held = 0, i
    cdef size_t at = 0
    parts = buffers if isinstance(buffers, (list, tuple)) else (buffers,)
    count = len(parts)
    views = <Py_buffer *>PyMem_Malloc((count + 1) * sizeof(Py_buffer))
    if views == NULL:
        raise MemoryError(f"no memory for a page in {count} buffers")
    try:
        for i in range(count):
            PyObject_GetBuffer(parts[i], &views[i], PyBUF_SIMPLE if into_page else PyBUF_WRITABLE)
            held += 1
            at += views[i].len
        if <Py_ssize_t>at != page.shape[0]:
            raise ValueError(f"a page has {page.shape[0]} bytes, got {at}")
        with nogil:
            at = 0
            for i in range(count):
                if into_page:
                    memcpy(&page[0] + at, views[i].buf, views[i].len)
                else:
                    memcpy(views[i].buf, &page[0] + at, views[i].len)
                at += views[i].len
    finally:
        for i in range(held):
            PyBuffer_Release(&views[i])
        PyMem_Free(views)


def load_pages(BlockAllocator allocator not None, int file, offsets, blocks, bytes key not None, int64_t num_bytes):
    """Read pages from a file into blocks, on several threads.

    Parameters
    ----------
    allocator : BlockAllocator
        The allocator of the blocks.
    file : int
        A file descriptor.
    offsets : int64 array (n,)
        The offset of each page in the file.
    blocks : int32 array (n,)
        The destination of each page. The caller holds the only reference to each.
    key : bytes
        The key of the sums, `SUM_KEY_BYTES`.
    num_bytes : int
        Bytes of a page: `block_bytes` of the allocator.

    Returns
    -------
    list of bytes or int
        For each page its sums as from `page_sums`, or the errno of a failed read: EIO when the file is too short.

    Raises
    ------
    InvalidBlock
        A block is free or out of range. Nothing has changed.
    """
    cdef const int64_t[::1] places = offsets
    cdef const int32_t[::1] ids = blocks
    cdef int64_t i, n = ids.shape[0], size = pp_page_sums_bytes(num_bytes)
    cdef pp_page_loads loads
    if places.shape[0] != n:
        raise ValueError(f"offsets must have one number for each of {n} blocks, not {places.shape[0]}")
    if len(key) != PP_SUM_KEY_BYTES:
        raise ValueError(f"key must have {PP_SUM_KEY_BYTES} bytes, not {len(key)}")
    if not n:
        return []
    for i in range(n):
        if not 0 <= ids[i] < allocator.max_capacity or allocator.c_ref_count(ids[i]) < 1:
            raise InvalidBlock(f"block {ids[i]} is free: no page can be read into it")
    cdef unsigned char[::1] sums = bytearray(max(1, n * size))
    cdef int32_t[::1] errors = np.zeros(n, np.int32)
    loads = pp_page_loads(
        allocator.regions, &allocator.lock, file, num_bytes, &places[0], &ids[0],
        <const unsigned char *>PyBytes_AS_STRING(key), &sums[0], &errors[0]
    )
    with nogil:
        pp_load_pages(&loads, n, pp_default_num_threads())
    return [
        errors[i] if errors[i] else PyBytes_FromStringAndSize(<const char *>&sums[0] + i * size, size) for i in range(n)
    ]


cdef int move_block(BlockAllocator allocator, block, bytes_of_block, int flags) except -1:
    """Read the pages into a buffer if `flags` says that it must be writable, else write them."""
    cdef int32_t number = integer("block", block, 0, allocator.max_capacity - 1)
    cdef Py_buffer view
    cdef pp_status status
    if allocator.c_ref_count(number) < 1:
        raise InvalidBlock(f"block {number} is free: its pages cannot be copied")
    PyObject_GetBuffer(bytes_of_block, &view, flags)
    try:
        with nogil:
            if flags & PyBUF_WRITABLE:
                status = pp_regions_read_block(
                    allocator.regions, &allocator.lock, number, <unsigned char *>view.buf, view.len
                )
            else:
                status = pp_regions_write_block(
                    allocator.regions, &allocator.lock, number, <const unsigned char *>view.buf, view.len
                )
        if status != PP_OK:
            raise PoolError(f"a block has {block_bytes(allocator)} bytes in all pools, got {view.len}")
    finally:
        PyBuffer_Release(&view)
    return 0


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class PageQueue:
    """PageQueue(allocator, block_size, max_bytes)\n--\n
    Copies of cached pages that wait for the thread that writes them to a store. Internal.

    Parameters
    ----------
    allocator : BlockAllocator
        The allocator of the blocks, with all of its pools attached.
    block_size : int
        Tokens of a block.
    max_bytes : int
        Bytes of the queue; there is room for four pages at least.
    """

    def __cinit__(self, BlockAllocator allocator not None, int32_t block_size, int64_t max_bytes):
        self.allocator = allocator
        self.block_size = block_size
        self.page_bytes = pp_regions_block_bytes(allocator.regions, &allocator.lock)
        self.room = min(max(max_bytes // max(self.page_bytes, 4096), 4), max(allocator.max_capacity, 4))
        self.waiting = <NamedBlock *>PyMem_Calloc(self.room, sizeof(NamedBlock))
        self.tokens = <int32_t *>PyMem_Calloc(self.room, block_size * sizeof(int32_t))
        if self.waiting == NULL or self.tokens == NULL:
            raise MemoryError(f"no memory for a queue of {self.room} pages")
        self.pages = PageBuffer(self.room * self.page_bytes, "B")
        self.offered_memory = PageBuffer(allocator.max_capacity, "B")
        self.offered = self.offered_memory.base

    def __dealloc__(self):
        PyMem_Free(self.waiting)
        PyMem_Free(self.tokens)

    def __len__(self):
        return <Py_ssize_t>(pp_number_load(&self.next) - pp_number_load(&self.first))

    @property
    def num_added(self):
        """Number of pages that were ever added."""
        return pp_number_load(&self.next)

    cdef bint c_offer(self, const NamedBlock *named, const int32_t *tokens) noexcept:
        cdef size_t row = self.block_size
        cdef int64_t place
        if self.offered[named.block]:
            return True
        if <int64_t>(self.next - pp_number_load(&self.first)) == self.room:
            return False
        place = <int64_t>(self.next % <uint64_t>self.room)
        if pp_regions_read_block(
            self.allocator.regions, &self.allocator.lock, named.block, self.pages.base + place * self.page_bytes,
            self.page_bytes
        ) != PP_OK:  # a pool was closed
            self.dropped += 1
            return True
        self.waiting[place] = named[0]
        memcpy(self.tokens + place * row, tokens, row * sizeof(int32_t))
        self.offered[named.block] = True
        pp_number_store(&self.next, self.next + 1)
        return True

    cdef void c_note_found(self, Name name) noexcept:
        cdef uint64_t place = 2 * (self.num_found % RECENT)
        pp_number_store(&self.recent[place], name.words[0])
        pp_number_store(&self.recent[place + 1], name.words[1])
        pp_number_store(&self.num_found, self.num_found + 1)

    @property
    def has_found(self):
        """Whether as many prefixes were found as are remembered."""
        return pp_number_load(&self.num_found) - pp_number_load(&self.num_taken) >= RECENT

    def take_found(self):
        """Return the names of the last blocks of prefixes that were found since the last call, the last 64 at most."""
        cdef uint64_t end = pp_number_load(&self.num_found), number
        cdef uint64_t name[2]
        names = set()
        for number in range(max(self.num_taken, end - min(end, <uint64_t>RECENT)), end):
            name[0] = pp_number_load(&self.recent[2 * (number % RECENT)])
            # If a writer replaces the name between the two loads, they are halves of two names: no entry has this one.
            name[1] = pp_number_load(&self.recent[2 * (number % RECENT) + 1])
            names.add(PyBytes_FromStringAndSize(<const char *>name, 16))
        pp_number_store(&self.num_taken, end)
        return names

    def mark(self, blocks):
        """Note that these cached blocks are in the store, so that they are not offered again."""
        cdef int32_t block
        for block in blocks:
            self.offered[integer("block", block, 0, self.allocator.max_capacity - 1)] = True

    def offer_again(self):
        """Forget which blocks were offered: pages that were offered in vain are offered once more."""
        memset(self.offered, 0, self.allocator.max_capacity)

    def peek(self, most):
        """Return the next pages, at most `most`, as a list of `(name, parent, tokens, page)`.

        Names have 16 bytes; tokens are int32 as bytes; the page is a memoryview, which is valid until `pop`.
        """
        cdef uint64_t number, first = self.first
        cdef uint64_t end = min(pp_number_load(&self.next), first + <uint64_t>integer("most", most, 0))
        cdef int64_t place
        cdef Py_ssize_t row = self.block_size * sizeof(int32_t)
        view = memoryview(self.pages)
        found = []
        for number in range(first, end):
            place = <int64_t>(number % <uint64_t>self.room)
            found.append((
                PyBytes_FromStringAndSize(<const char *>&self.waiting[place].name, 16),
                PyBytes_FromStringAndSize(<const char *>&self.waiting[place].parent, 16),
                PyBytes_FromStringAndSize(<const char *>(self.tokens + place * self.block_size), row),
                view[place * self.page_bytes : (place + 1) * self.page_bytes],
            ))
        return found

    def pop(self, n):
        """Forget the first `n` pages, which `peek` returned."""
        pp_number_store(&self.first, self.first + <uint64_t>integer("n", n, 0, len(self)))
