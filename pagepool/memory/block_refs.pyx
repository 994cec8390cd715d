"""BlockRefs: references to blocks that can be given back without memory."""

cimport cython
from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport PP_OK
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport IdArray, new_int32, read_ids, release_ids

from pagepool.errors import InvalidBlock
from pagepool.arguments import integer
from pagepool.memory.explain import exhausted

__all__ = ["BlockRefs", "block_refs"]


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class BlockRefs:
    """One reference to each of some blocks, taken at once and given back at once. Internal: see `Transaction`.

    Each call that takes references takes and notes them in one: no exception, and no signal either, comes between. An
    object that goes gives nothing back.

    >>> from pagepool import BlockAllocator
    >>> allocator = BlockAllocator(4)
    >>> refs = BlockRefs(allocator)
    >>> refs.allocate_n(3).tolist(), len(refs)
    ([0, 1, 2], 3)
    >>> refs.give_back()
    >>> allocator.free_count, len(refs), allocator.allocate()
    (4, 0, 0)
    """

    def __cinit__(self, BlockAllocator allocator not None):
        self.allocator = allocator

    def __dealloc__(self):
        PyMem_Free(self.ids)

    def __len__(self):
        return self.count

    cdef int c_reserve(self, Py_ssize_t n) except -1:
        if self.count:
            raise ValueError(f"cannot take {n} blocks more: {self.count} are held")
        PyMem_Free(self.ids)
        self.ids = <int32_t *>PyMem_Malloc(<size_t>n * sizeof(int32_t))
        if self.ids == NULL:
            raise MemoryError(f"no memory to hold {n} blocks")
        return 0

    cdef void c_note(self, const int32_t *blocks, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i
        for i in range(n):
            self.ids[n - 1 - i] = blocks[i]
        self.count = n

    def allocate_n(self, n):
        """Takes n blocks, see `BlockAllocator.allocate_n`."""
        cdef int32_t *ids
        cdef int64_t available = self.allocator.c_available()
        number = n if PyLong_CheckExact(n) else integer("n", n)
        if number < 0:
            return self.allocator.allocate_n(number)  # which raises
        if number > available:
            raise exhausted(number, available, self.allocator.max_capacity)
        self.c_reserve(number)
        blocks = new_int32(number, &ids)
        if self.allocator.c_allocate_n(number, ids) != PP_OK:
            raise exhausted(number, self.allocator.c_available(), self.allocator.max_capacity)
        self.c_note(ids, number)
        return blocks

    def share(self, blocks):
        """Takes a reference to each block, see `BlockAllocator.share`."""
        cdef IdArray array
        read_ids(blocks, &array)
        try:
            self.c_reserve(array.count)
            self.allocator.c_share_ids(&array)
            self.c_note(array.ids, array.count)
        finally:
            release_ids(&array)

    def match_prefix(self, cache, tokens, **keys):
        """Takes the cached blocks of a prompt, see `PrefixCache.match_prefix`."""
        return cache.match_held(self, tokens, **keys)

    def give_back(self):
        """Drops the references, the last one first: then the blocks are handed out again in the same order.

        Raises `InvalidBlock` when one was dropped by someone else; then all the others are held still.
        """
        cdef Py_ssize_t count = self.count
        if count and self.allocator.c_free_n(self.ids, count) != PP_OK:
            raise InvalidBlock(f"one of the {count} blocks of a transaction was freed by someone else")
        self.count = 0


def block_refs(allocator):
    """A new `BlockRefs`. An allocator that is not the compiled one brings its own."""
    return BlockRefs(allocator) if isinstance(allocator, BlockAllocator) else allocator.block_refs()
