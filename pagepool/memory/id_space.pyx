"""IdSpace: how many ids there are, and how many of them are free."""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t

from pagepool.csrc cimport pp_lock_acquire, pp_lock_release
from pagepool.memory.holders cimport Holder, HolderRegistry

from pagepool.arguments import integer
from pagepool.errors import refuse_copy

__all__ = ["IdSpace"]


@cython.no_gc
cdef class IdSpace(HolderRegistry):
    """What an allocator knows of its ids. Internal: `BlockAllocator` hands them out.

    The capacity grows up to `max_capacity`, by itself when a block is asked for and none is free, and shrinks when it
    is told to.
    """

    cdef bint c_extend(self, int32_t n) noexcept nogil:
        if n > self.max_capacity - self.taken:
            return False
        self.limit = max(self.limit, self.taken + n)
        return True

    cdef int32_t c_capacity(self) noexcept nogil:
        cdef int32_t count
        pp_lock_acquire(&self.lock)
        count = self.limit
        pp_lock_release(&self.lock)
        return count

    cdef int32_t c_free_count(self) noexcept nogil:
        cdef int32_t count
        pp_lock_acquire(&self.lock)
        count = self.limit - self.taken + self.num_freed
        pp_lock_release(&self.lock)
        return count

    cdef int32_t c_available(self) noexcept nogil:
        cdef int32_t count
        pp_lock_acquire(&self.lock)
        count = self.max_capacity - self.taken + self.num_freed
        pp_lock_release(&self.lock)
        return count

    cdef bint c_grow(self, int32_t n) noexcept nogil:
        cdef bint fits
        pp_lock_acquire(&self.lock)
        fits = self.limit <= n <= self.max_capacity
        if fits:
            self.limit = n
        pp_lock_release(&self.lock)
        return fits

    cdef int32_t c_shrink(self, int32_t n) noexcept nogil:
        """The ids at the end that are free become fresh again; the list keeps the order of the others."""
        cdef int32_t i, kept = 0, taken
        pp_lock_acquire(&self.lock)
        taken = self.taken
        while taken > n and self.c_counts[taken - 1] == 0:
            taken -= 1
        if taken < self.taken:
            for i in range(self.num_freed):
                if self.c_freed[i] < taken:
                    self.c_freed[kept] = self.c_freed[i]
                    kept += 1
            self.num_freed = kept
            self.peak = max(self.peak, self.taken)
            self.taken = taken
        self.limit = max(n, taken)
        n = self.limit
        pp_lock_release(&self.lock)
        return n

    cdef int32_t c_free_run(self, int32_t *first, int32_t limit, int32_t most) noexcept nogil:
        cdef int32_t start = first[0], end
        while start < self.taken and self.c_counts[start]:
            start += 1
        end = start
        while end < self.taken and end - start < most and not self.c_counts[end]:
            end += 1
        first[0] = start
        if end >= self.taken:
            return min(limit - start, most)
        return end - start

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        return f"<{type(self).__name__}: {self.in_use} of {self.max_capacity} blocks in use>"

    @property
    def capacity(self):
        """How many blocks there are now, free and in use."""
        return self.c_capacity()

    @property
    def free_count(self):
        """Blocks that are free."""
        return self.c_free_count()

    @property
    def available(self):
        """Blocks that can be taken now: `free_count`, and what the capacity may still grow by."""
        return self.c_available()

    @property
    def in_use(self):
        """Blocks with at least one reference."""
        return self.max_capacity - self.c_available()

    @property
    def peak_in_use(self):
        """The most blocks that were in use at any one time."""
        cdef int32_t most
        pp_lock_acquire(&self.lock)
        most = max(self.peak, self.taken)
        pp_lock_release(&self.lock)
        return most

    def stats(self):
        """Blocks as a dict: `used` + `evictable` + `free` = `capacity`; `available` as above, `peak` = `peak_in_use`.

        `evictable` are those that only a cache holds, `sequences` how many there are. O(sequences).

        >>> from pagepool import BlockAllocator
        >>> BlockAllocator(4).stats()["free"]
        4
        """
        cdef int32_t capacity, free
        pp_lock_acquire(&self.lock)
        capacity = self.limit
        free = capacity - self.taken + self.num_freed
        pp_lock_release(&self.lock)
        holders = self.holders()
        evictable = sum([getattr(holder, "evictable", 0) for holder in holders])
        return {
            "capacity": capacity,
            "max_capacity": self.max_capacity,
            "used": capacity - free - evictable,
            "evictable": evictable,
            "free": free,
            "available": self.c_available(),
            "peak": self.peak_in_use,
            "sequences": sum([isinstance(holder, Holder) for holder in holders]),
        }

    def grow(self, num_blocks):
        """Raises the capacity to `num_blocks`. Raises `ValueError` when it is above that, or the maximum below."""
        number = integer("num_blocks", num_blocks)
        if not 0 <= number <= INT32_MAX or not self.c_grow(number):
            raise ValueError(f"num_blocks must be from {self.c_capacity()} to {self.max_capacity}, not {number}")

    def shrink(self, num_blocks=0):
        """Lowers the capacity to `num_blocks`, or as far as blocks in use allow; returns what it is then.

        A block in use keeps its id, so that the highest one bounds the capacity. O(blocks ever used). Raises
        `ValueError` when `num_blocks` is below 0 or above the capacity.

        >>> from pagepool import BlockAllocator
        >>> allocator = BlockAllocator(2, max_blocks=8)
        >>> blocks = allocator.allocate_n(5)
        >>> allocator.free(blocks[3:])
        >>> allocator.capacity, allocator.shrink(), allocator.available
        (5, 3, 5)
        """
        number = integer("num_blocks", num_blocks)
        if not 0 <= number <= self.c_capacity():
            raise ValueError(f"num_blocks must be from 0 to {self.c_capacity()}, not {number}")
        return self.c_shrink(number)
