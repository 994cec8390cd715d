"""PagePool: how many pages a pool has, and the memory of those that are free."""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagepool.csrc cimport pp_lock_acquire, pp_lock_release
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.page_buffer cimport PageBuffer

from pagepool.errors import refuse_copy

__all__ = ["PagePool"]

# Given back with the allocator's lock held, so that nobody takes a page that goes: not too much at a time.
cdef int64_t MOST_BYTES = <int64_t>64 << 20


@cython.no_gc
cdef class PagePool:
    """The pages of a pool, by number. Internal: `KvCachePool` knows what is in them."""

    cdef void c_pin(self) noexcept:
        self.buffer.exports += 1

    cdef void c_unpin(self) noexcept:
        self.buffer.exports -= 1

    cdef int check_open(self) except -1:
        if self.buffer.base == NULL:
            raise ValueError("the pool is closed")
        return 0

    def grow(self, num_blocks):
        """Raises the number of blocks to `num_blocks`; memory is committed when they are touched, and nothing moves.

        Raises `ValueError` when that is below the present number or above `max_blocks`. A pool grows by itself, too,
        when a block is asked for and none is free.

        >>> from pagepool import KvCachePool, KvLayout
        >>> layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8)
        >>> pool = KvCachePool.from_layout(layout, num_blocks=4, max_blocks=16)
        >>> pool.grow(8)
        >>> len(pool.allocator.allocate_n(12)), pool.num_blocks
        (12, 12)
        """
        self.check_open()
        self.allocator.grow(num_blocks)

    def shrink(self, num_blocks=0):
        """Lowers the number of blocks to `num_blocks`, or as far as blocks in use allow, then gives free memory back.

        Returns the number of blocks that there are then. A block in use keeps its page: the highest one bounds the
        pool. Then does what `trim` does. Views stay valid. Raises `ValueError` when `num_blocks` is below 0 or above
        the present number.
        """
        self.check_open()
        left = self.allocator.shrink(num_blocks)
        self.trim()
        return left

    def trim(self):
        """Gives the memory of free pages back to the system; returns how many bytes. What was in those pages is lost.

        As far as runs of free pages hold whole pages of the system; a pool of 2 MiB and more gives back whole huge
        pages only. They are committed again when they are touched, and are zero then. Other threads may go on; one that
        takes or frees blocks waits for at most 64 MiB at a time.
        """
        cdef int64_t page = self.c_pool.layout.block_bytes, given = 0, done = 0, begin, end
        cdef int64_t granule = <int64_t>self.buffer.c_granule()
        cdef int32_t first = 0, limit = <int32_t>self.c_pool.num_blocks, length
        cdef int32_t most = <int32_t>min(max(MOST_BYTES // page, 1), INT32_MAX)
        cdef BlockAllocator allocator = self.allocator
        cdef PageBuffer buffer = self.buffer
        self.check_open()
        self.c_pin()
        with nogil:
            while True:
                pp_lock_acquire(&allocator.lock)
                length = allocator.c_free_run(&first, limit, most)
                begin = max(done, (first * page + granule - 1) // granule * granule)
                end = (first + length) * page // granule * granule
                if end > begin:
                    given += <int64_t>buffer.c_discard(<size_t>begin, <size_t>(end - begin))
                    done = end
                pp_lock_release(&allocator.lock)
                if length == 0:
                    break
                # What the end of a long run cuts off comes with the next, if all of it is free then.
                first = <int32_t>(done // page) if length == most and end > begin else first + length
        self.c_unpin()
        return given

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        if self.buffer.base == NULL:
            return f"<{type(self).__name__}: closed>"
        return (
            f"<{type(self).__name__}: {self.used_pages} of {self.max_blocks} pages in use, "
            f"{self.c_pool.layout.block_bytes} bytes each>"
        )

    @property
    def total_pages(self):
        """Pages that can be named now: as many as there are blocks, if the pool may grow."""
        return self.allocator.capacity if self.elastic and self.c_pool.num_blocks else self.c_pool.num_blocks

    @property
    def num_blocks(self):
        """The same as `total_pages`."""
        return self.total_pages

    @property
    def max_blocks(self):
        """Pages that the pool has room for: the hard bound of its memory, in blocks."""
        return self.c_pool.num_blocks

    @property
    def free_pages(self):
        """Blocks that the allocator has free."""
        return self.allocator.free_count

    @property
    def used_pages(self):
        """Blocks of the allocator that are in use."""
        return self.allocator.in_use

    @property
    def nbytes(self):
        """Bytes of all pages that there is room for, committed or not."""
        return self.c_pool.num_blocks * self.c_pool.layout.block_bytes
