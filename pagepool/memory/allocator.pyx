"""BlockAllocator: hands out block ids and counts the references to each."""

cimport cython
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF, _Py_REFCNT
from cpython.weakref cimport PyWeakref_NewRef
from libc.stdint cimport INT32_MAX, int32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from pagepool.memory.arrays cimport HAS_GIL, IdArray, list_ids, new_int32, read_id, read_ids, release_ids
from pagepool.csrc cimport (
    PP_EXHAUSTED,
    PP_INVALID_ARGUMENT,
    PP_INVALID_BLOCK,
    PP_OK,
    PP_OVER_MAXIMUM,
    pp_kv_pool,
    pp_lock_acquire,
    pp_lock_register,
    pp_lock_release,
    pp_lock_unregister,
    pp_lock_wait,
    pp_status,
)
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.memory.shared_pages cimport (
    SharedPages,
    pp_shared_audit,
    pp_shared_count_free,
    pp_shared_count_in_use,
    pp_shared_drop,
    pp_shared_is_held_elsewhere,
    pp_shared_is_stale,
    pp_shared_limit,
    pp_shared_return_pending,
    pp_shared_take,
    pp_shared_view,
)

import weakref

from pagepool.config import MAX_BLOCK_SIZE
from pagepool.errors import InvalidBlock, PoolError, refuse_copy
from pagepool._arguments import integer
from pagepool.memory.explain import exhausted, invalid_blocks
from pagepool.memory.owners import audit_holders, leaks_of, owners_of, warn_of

__all__ = ["BlockAllocator"]


cdef extern from "regions.h" nogil:
    ctypedef struct pp_regions_complete "pp_regions":
        void **pools
        int32_t count

    pp_status pp_regions_attach(pp_regions *regions, void *lock, const pp_kv_pool *pool)
    void pp_regions_detach(pp_regions *regions, void *lock, const pp_kv_pool *pool)
    void pp_regions_copy_block(const pp_regions *regions, void *lock, int32_t dst, int32_t src)
    void pp_regions_fill_freed(const pp_regions *regions, const int32_t *counts, const int32_t *blocks, Py_ssize_t n)
    int32_t pp_regions_block_size(const pp_regions *regions, void *lock)


# 4K aliasing: if both arrays began at a page, entry n of both would have the same offset in its page, and a load from
# one would wait for an unrelated store to the other. So the counts begin half a page later.
cdef int32_t SKEW = 528
cdef int32_t DEFAULT_BLOCK_SIZE = 16


@cython.auto_pickle(False)
@cython.final
@cython.no_gc
cdef class BlockAllocator:
    """BlockAllocator(num_blocks, max_blocks=None)\n--\n
    Hands out block ids 0 to num_blocks - 1 and counts the references to each.

    With `max_blocks` the capacity starts at `num_blocks` and may grow to `max_blocks`: by itself when no block is free,
    or by `grow`; `shrink` lowers it again.

    A fresh allocator hands out 0, 1, 2, ...; later the most recently freed block comes first. Any number of threads may
    use one allocator, with the GIL or without (the `c_` methods of the .pxd). It takes eight bytes per block, committed
    when a block is first used, and is made in constant time. Raises `ValueError` when `num_blocks` is below 0, has more
    than 31 bits or is above `max_blocks`, `MemoryError` when the system has no room.

    >>> allocator = BlockAllocator(4)
    >>> allocator.allocate(), allocator.allocate_n(2).tolist(), allocator.free_count
    (0, [1, 2], 1)
    >>> allocator.free([0, 2])
    >>> allocator.allocate()
    2
    """

    def __cinit__(self, num_blocks, max_blocks=None):
        self.head.previous = self.head.next = &self.head
        self.others = []
        number = integer("num_blocks", num_blocks, 0, INT32_MAX)
        most = number if max_blocks is None else integer("max_blocks", max_blocks, number, INT32_MAX)
        self.freed = PageBuffer(most, "i")
        cdef int32_t[::1] counts = PageBuffer(most + SKEW, "i")
        self.ref_counts = counts[SKEW:]
        self.c_freed = &self.freed[0]
        self.c_counts = &self.ref_counts[0]
        self.regions = <pp_regions *>calloc(1, sizeof(pp_regions_complete))
        if self.regions == NULL or pp_lock_register(&self.lock) != PP_OK:
            free(self.regions)
            self.regions = NULL
            raise MemoryError(f"no memory for an allocator of {most} blocks")
        self.limit = number
        self.max_capacity = most

    def __dealloc__(self):
        if self.regions != NULL:
            pp_lock_unregister(&self.lock)
            free((<pp_regions_complete *>self.regions).pools)
            free(self.regions)

    cdef void c_wait_for_lock(self) noexcept nogil:
        pp_lock_wait(&self.lock)

    cdef void c_fill_freed(self, const int32_t *blocks, Py_ssize_t n) noexcept nogil:
        pp_regions_fill_freed(self.regions, self.c_counts, blocks, n)

    cdef pp_status c_take_shared(self, int32_t n, int32_t *blocks) noexcept nogil:
        cdef int32_t i
        if self.shared == NULL or pp_shared_take(<pp_shared_view *>self.shared, n, blocks) != PP_OK:
            return PP_EXHAUSTED
        for i in range(n):
            self.c_counts[blocks[i]] = 1
        return PP_OK

    cdef void c_drop_shared(self) noexcept nogil:
        pp_shared_drop(<pp_shared_view *>self.shared, self.c_freed, self.num_freed)
        self.num_freed = 0

    cdef void c_return_pending(self) noexcept nogil:
        if self.shared != NULL:
            pp_shared_return_pending(<pp_shared_view *>self.shared)

    cdef int join(self, object pages) except -1:
        cdef pp_shared_view *view = &(<SharedPages?>pages).view
        self.shared_pages = pages
        self.shared = <pp_shared *>view
        self.words = view.words
        view.lock = &self.lock
        self.taken = self.limit
        return 0

    cdef bint c_extend(self, int32_t n) noexcept nogil:
        if n > self.max_capacity - self.taken:
            return False
        self.limit = max(self.limit, self.taken + n)
        return True

    cdef int32_t c_capacity(self) noexcept nogil:
        cdef int32_t count
        if self.shared != NULL:
            return <int32_t>pp_shared_limit(<pp_shared_view *>self.shared)
        pp_lock_acquire(&self.lock)
        count = self.limit
        pp_lock_release(&self.lock)
        return count

    cdef int32_t c_free_count(self) noexcept nogil:
        cdef int32_t count
        if self.shared != NULL:
            return <int32_t>pp_shared_count_free(<pp_shared_view *>self.shared)
        pp_lock_acquire(&self.lock)
        count = self.limit - self.taken + self.num_freed
        pp_lock_release(&self.lock)
        return count

    cdef int32_t c_available(self) noexcept nogil:
        cdef int32_t count
        if self.shared != NULL:
            return <int32_t>pp_shared_count_free(<pp_shared_view *>self.shared)
        pp_lock_acquire(&self.lock)
        count = self.max_capacity - self.taken + self.num_freed
        pp_lock_release(&self.lock)
        return count

    cdef bint c_grow(self, int32_t n) noexcept nogil:
        cdef bint fits
        pp_lock_acquire(&self.lock)
        fits = self.limit <= n <= self.max_capacity
        self.limit = n if fits else self.limit
        pp_lock_release(&self.lock)
        return fits

    cdef int32_t c_shrink(self, int32_t n) noexcept nogil:
        """Makes the free ids at the end of the range fresh again. The order of the other free ids does not change."""
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
        return min(limit - start, most) if end >= self.taken else end - start

    cdef pp_status c_allocate_n(self, int32_t n, int32_t *blocks) noexcept nogil:
        cdef int32_t i, recycled, fresh
        cdef int32_t *counts = self.c_counts
        cdef pp_status status
        cdef const int32_t *top
        if n < 0:
            return PP_INVALID_ARGUMENT
        pp_lock_acquire(&self.lock)
        if n > self.limit - self.taken + self.num_freed and not self.c_extend(n - self.num_freed):
            status = self.c_take_shared(n, blocks)
            pp_lock_release(&self.lock)
            return status
        recycled = min(n, self.num_freed)
        fresh = self.taken - recycled
        top = self.c_freed + self.num_freed - 1
        self.num_freed -= recycled
        self.taken = fresh + n
        for i in range(recycled):  # a loop of its own, which the compiler vectorises
            blocks[i] = top[-i]
        for i in range(recycled):
            counts[top[-i]] = 1
        for i in range(recycled, n):
            blocks[i] = fresh + i
            counts[fresh + i] = 1
        if self.words != NULL:
            pp_words_taken(self.words, blocks, n)
        pp_lock_release(&self.lock)
        return PP_OK

    cdef pp_status c_free_n(self, const int32_t *blocks, Py_ssize_t n) noexcept nogil:
        """Frees in one pass. At a bad id it undoes its changes: a count of 0 means that this pass freed the block.

        Most blocks have one reference. The ids before the first block with more references are copied to the free list
        together.
        """
        cdef int32_t *counts = self.c_counts
        cdef int32_t *freed = self.c_freed
        cdef unsigned int taken
        cdef int32_t num_freed, block, count
        cdef Py_ssize_t i, first = 0, done = n
        pp_lock_acquire(&self.lock)
        taken = self.taken
        num_freed = self.num_freed
        if n <= self.limit - num_freed:
            freed += num_freed
            memcpy(freed, blocks, <size_t>n * sizeof(int32_t))
            while first < n and <unsigned int>freed[first] < taken and counts[freed[first]] == 1:
                counts[freed[first]] = 0
                first += 1
            freed -= num_freed
            num_freed += <int32_t>first
        for i in range(first, n):
            block = blocks[i]
            if <unsigned int>block >= taken or counts[block] == 0:
                done = i
                break
            count = counts[block] - 1
            pp_set_count(&counts[block], count)
            freed[num_freed] = block
            num_freed += count == 0
            if count == 1:
                count_idle(self.cached, block, 1)
        if done < n:
            for i in range(done - 1, -1, -1):
                count = counts[blocks[i]]
                num_freed -= count == 0
                pp_set_count(&counts[blocks[i]], count + 1)
                if count == 1:
                    count_idle(self.cached, blocks[i], -1)
        elif self.words != NULL and self.shared == NULL:
            pp_words_freed(self.words, counts, blocks, n)
        if done == n and self.checked:
            self.c_fill_freed(blocks, n)
        self.num_freed = num_freed
        if self.shared != NULL:
            self.c_drop_shared()
        pp_lock_release(&self.lock)
        self.c_return_pending()
        return PP_OK if done == n else PP_INVALID_BLOCK

    cdef pp_status c_share_n(self, const int32_t *blocks, Py_ssize_t n) noexcept nogil:
        cdef int32_t *counts = self.c_counts
        cdef pp_status status = PP_OK
        cdef Py_ssize_t i = 0
        cdef int32_t block, count
        pp_lock_acquire(&self.lock)
        while i < n:
            block = blocks[i]
            if <unsigned int>block >= <unsigned int>self.taken or counts[block] == 0:
                status = PP_INVALID_BLOCK
                break
            count = counts[block]
            if count == INT32_MAX:
                status = PP_OVER_MAXIMUM
                break
            pp_set_count(&counts[block], count + 1)
            if count == 1:
                count_idle(self.cached, block, -1)
            i += 1
        if status != PP_OK:
            while i > 0:
                i -= 1
                count = counts[blocks[i]] - 1
                pp_set_count(&counts[blocks[i]], count)
                if count == 1:
                    count_idle(self.cached, blocks[i], 1)
        pp_lock_release(&self.lock)
        return status

    cdef int32_t c_ref_count(self, int32_t block) noexcept nogil:
        cdef int32_t count
        pp_lock_acquire(&self.lock)
        count = self.c_counts[block] if 0 <= block < self.limit else -1
        pp_lock_release(&self.lock)
        return count

    cdef int32_t c_ids_used(self) noexcept nogil:
        cdef int32_t taken
        pp_lock_acquire(&self.lock)
        taken = self.taken
        pp_lock_release(&self.lock)
        return taken

    cdef bint c_is_shared(self, int32_t block) noexcept nogil:
        return pp_get_count(&self.c_counts[block]) > 1 or (
            self.shared != NULL and pp_shared_is_held_elsewhere(<pp_shared_view *>self.shared, block)
        )

    cdef void c_copy_page(self, int32_t dst, int32_t src) noexcept nogil:
        pp_regions_copy_block(self.regions, &self.lock, dst, src)

    cdef pp_status c_attach(self, const pp_kv_pool *pool) noexcept nogil:
        if pool.num_blocks < self.max_capacity or (self.shared != NULL and self.c_num_pools()):
            return PP_INVALID_ARGUMENT
        return pp_regions_attach(self.regions, &self.lock, pool)

    cdef void c_detach(self, const pp_kv_pool *pool) noexcept nogil:
        pp_regions_detach(self.regions, &self.lock, pool)

    cdef int32_t c_block_size(self) noexcept nogil:
        return pp_regions_block_size(self.regions, &self.lock)

    cdef int32_t c_num_pools(self) noexcept nogil:
        return (<pp_regions_complete *>self.regions).count

    cdef int32_t read_block_size(self, object block_size) except -1:
        cdef int32_t pools = self.c_block_size()
        if block_size is None:
            return pools or DEFAULT_BLOCK_SIZE
        size = integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
        if pools and pools != size:
            raise ValueError(f"block_size must be {pools}, the block size of the allocator's pool, not {size}")
        return size

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        return f"<{type(self).__name__}: {self.in_use} of {self.max_capacity} blocks in use>"

    @property
    def capacity(self):
        """The number of blocks now, free or in use."""
        return self.c_capacity()

    @property
    def free_count(self):
        """Blocks that are free."""
        return self.c_free_count()

    @property
    def available(self):
        """Blocks that can be taken now: `free_count`, and the blocks by which the capacity may still grow."""
        return self.c_available()

    @property
    def in_use(self):
        """Blocks with at least one reference, in a shared pool those of all processes."""
        if self.shared != NULL:
            return pp_shared_count_in_use(<pp_shared_view *>self.shared)
        return self.max_capacity - self.c_available()

    @property
    def peak_in_use(self):
        """The largest number of blocks that were in use at the same time; in a shared pool, those of this process."""
        cdef int32_t most
        if self.shared != NULL:
            return (<pp_shared_view *>self.shared).peak
        pp_lock_acquire(&self.lock)
        most = max(self.peak, self.taken)
        pp_lock_release(&self.lock)
        return most

    def stats(self):
        """Returns a dict of block counts: `used` + `evictable` + `free` = `capacity`, `available`, `peak` =
        `peak_in_use`.

        `evictable` blocks are those that only a cache holds; `sequences` counts sequences. O(sequences).

        >>> BlockAllocator(4).stats()["free"]
        4
        """
        cdef int32_t capacity, free_blocks
        pp_lock_acquire(&self.lock)
        capacity, free_blocks = self.limit, self.limit - self.taken + self.num_freed
        pp_lock_release(&self.lock)
        if self.shared != NULL:
            capacity, free_blocks = self.c_capacity(), self.c_free_count()
        evictable = sum([getattr(holder, "evictable", 0) for holder in self.holders()])
        return {
            "capacity": capacity,
            "max_capacity": self.max_capacity,
            "used": capacity - free_blocks - evictable,
            "evictable": evictable,
            "free": free_blocks,
            "available": self.c_available(),
            "peak": self.peak_in_use,
            "sequences": self.num_sequences,
        }

    def grow(self, num_blocks):
        """Raises the capacity to `num_blocks`; `ValueError` if that is below the capacity or above the maximum."""
        number = integer("num_blocks", num_blocks)
        if self.shared != NULL and self.c_capacity() <= number <= self.max_capacity:
            (<SharedPages>self.shared_pages).set_limit(number)
        elif self.shared != NULL or not 0 <= number <= INT32_MAX or not self.c_grow(number):
            raise ValueError(f"num_blocks must be from {self.c_capacity()} to {self.max_capacity}, not {number}")

    def shrink(self, num_blocks=0):
        """Lowers the capacity to `num_blocks`, but not below a block in use; returns the new capacity.

        A block in use keeps its id, so the highest id in use limits the result. O(blocks ever used). In a shared pool
        the capacity falls at once: cached blocks above it are evicted, blocks in use stay until they are free. Raises
        `ValueError` when `num_blocks` is below 0 or above the capacity.

        >>> allocator = BlockAllocator(2, max_blocks=8)
        >>> blocks = allocator.allocate_n(5)
        >>> allocator.free(blocks[3:])
        >>> allocator.capacity, allocator.shrink(), allocator.available
        (5, 3, 5)
        """
        number = integer("num_blocks", num_blocks)
        if not 0 <= number <= self.c_capacity():
            raise ValueError(f"num_blocks must be from 0 to {self.c_capacity()}, not {number}")
        if self.shared != NULL:
            (<SharedPages>self.shared_pages).set_limit(number)
            return number
        return self.c_shrink(number)

    def allocate(self):
        """Takes one block, with one reference; returns its id. Raises `PoolExhausted` when none is free.

        >>> BlockAllocator(1).allocate()
        0
        """
        cdef int32_t block
        if self.c_allocate(&block) != PP_OK:
            raise self.refused(1)
        try:
            return block
        except MemoryError:  # no memory for the Python int
            self.c_free(block)
            raise

    def allocate_n(self, n):
        """Takes n blocks, all or none; returns their ids as an int32 array (n,).

        Raises `PoolExhausted` when fewer are free, `ValueError` when n is below 0; then nothing has changed.

        >>> BlockAllocator(3).allocate_n(2)
        array([0, 1], dtype=int32)
        """
        cdef int32_t *ids
        number = n if PyLong_CheckExact(n) else integer("n", n)
        if number < 0:
            raise ValueError(f"cannot allocate {number} blocks")
        if number > (self.max_capacity if self.shared != NULL else self.c_available()):
            raise self.refused(number)
        blocks = new_int32(number, &ids)
        if self.c_allocate_n(number, ids) != PP_OK:
            raise self.refused(number)
        return blocks

    cdef object refused(self, object n):
        if self.shared != NULL and pp_shared_is_stale(<pp_shared_view *>self.shared):
            return (<SharedPages>self.shared_pages).stale()
        return exhausted(n, self.c_available(), self.max_capacity)

    def free(self, blocks):
        """Drops one reference of each block: an int, a sequence of ints or an integer array.

        A block without references is free and is handed out next: after `free([1, 3])` come 3, then 1.
        Raises `InvalidBlock` when an id is out of range, free, or given more often than it has references, `TypeError`
        for anything but integers; then nothing has changed.

        >>> allocator = BlockAllocator(2)
        >>> allocator.free(allocator.allocate())
        >>> allocator.free(0)
        Traceback (most recent call last):
        pagepool.errors.InvalidBlock: cannot drop 1 reference of block 0: it is free and has 0
        """
        cdef IdArray array
        cdef int32_t block
        if PyLong_CheckExact(blocks):
            read_id(blocks, &block)
            if self.c_free(block) != PP_OK:
                raise invalid_blocks([block], [self.c_ref_count(block)], self.c_capacity(), "drop")
            return
        read_ids(blocks, &array)
        try:
            if self.c_free_n(array.ids, array.count) != PP_OK:
                raise self.invalid(&array, "drop")
        finally:
            release_ids(&array)

    def share(self, blocks):
        """Adds one reference to each block: an int, a sequence of ints or an integer array. `free` drops it again.

        Raises `InvalidBlock` when an id is out of range or free, `PoolError` when a count would pass 2,147,483,647,
        `TypeError` for anything but integers; then nothing has changed.

        >>> allocator = BlockAllocator(2)
        >>> block = allocator.allocate()
        >>> allocator.share(block)
        >>> allocator.ref_count(block)
        2
        """
        cdef IdArray array
        read_ids(blocks, &array)
        try:
            self.c_share_ids(&array)
        finally:
            release_ids(&array)

    cdef int c_share_ids(self, IdArray *array) except -1:
        cdef pp_status status = self.c_share_n(array.ids, array.count)
        if status == PP_OVER_MAXIMUM:
            raise PoolError(f"cannot share {array.count} blocks: a count would pass its maximum of {INT32_MAX}")
        if status != PP_OK:
            raise self.invalid(array, "add")
        return 0

    def ref_count(self, block):
        """The number of references to a block, 0 when it is free. Raises `InvalidBlock` when the id is out of range."""
        cdef int32_t number, count
        read_id(block, &number)
        count = self.c_ref_count(number)
        if count < 0:
            raise InvalidBlock(f"block {number} is out of range: there are {self.c_capacity()} blocks")
        return count

    def add_owner(self, holder):
        """Registers another object that holds blocks, for `owners`, `leaks` and `check`, as long as it lives.

        It has `kind`, a str; `label`, a str, int or None; and `references()`, the ids of its blocks, one entry per
        reference. If it has `evictable`, `stats` counts that many of its blocks as evictable. Sequences and prefix
        caches register themselves. Adding an object again changes nothing.
        """
        holder.references()
        reference = weakref.ref(holder)
        while True:
            with cython.critical_section(self):
                seen = self.others
            kept = [known for known in seen if known() is not None]
            if any([known() is holder for known in kept]):
                return
            kept.append(reference)
            with cython.critical_section(self):
                if self.others is seen:  # else another thread added one, perhaps while the finalizer of one ran here
                    self.others = kept
                    return

    cdef int c_enlist(self, Link *link, object sequence) except -1:
        reference = sequence if HAS_GIL else PyWeakref_NewRef(sequence, None)
        if not HAS_GIL:
            Py_INCREF(reference)
        link.sequence = <PyObject *>reference
        pp_lock_acquire(&self.lock)
        link.previous = self.head.previous
        link.next = &self.head
        self.head.previous.next = link
        self.head.previous = link
        self.num_sequences += 1
        pp_lock_release(&self.lock)
        return 0

    cdef void c_delist(self, Link *link) noexcept:
        pp_lock_acquire(&self.lock)
        link.next.previous = link.previous
        link.previous.next = link.next
        link.next = NULL
        self.num_sequences -= 1
        pp_lock_release(&self.lock)
        if not HAS_GIL:
            Py_DECREF(<object>link.sequence)

    cdef list holders(self):
        """All living holders, sequences first. An object that is being freed is left out: it must not come back.

        No Python code runs with the lock held, so the list gets its full length before.
        """
        cdef list references, found = []
        cdef Link *link
        cdef Py_ssize_t room = self.num_sequences, i = 0
        while True:
            references = [None] * room
            pp_lock_acquire(&self.lock)
            if self.num_sequences <= room:
                break
            room = self.num_sequences
            pp_lock_release(&self.lock)
        link = self.head.next
        while link != &self.head:
            if not HAS_GIL or _Py_REFCNT(link.sequence) > 0:
                references[i] = <object>link.sequence
            link = link.next
            i += 1
        pp_lock_release(&self.lock)
        for reference in references:  # a comprehension of Cython 3.3 frees an item twice when it cannot grow
            if reference is not None and not HAS_GIL:
                reference = reference()
            if reference is not None:
                found.append(reference)
        with cython.critical_section(self):
            others = self.others
        for reference in others:
            holder = reference()
            if holder is not None:
                found.append(holder)
        return found

    def owners(self, block=None):
        """Returns the owners of a block's references, or of every block's.

        Asks every owner: for debugging, not for every step. Changes that other threads make meanwhile may be missing.
        On free-threaded CPython, no other thread may call a method of a sequence meanwhile.

        Returns a list of named tuples `(kind, label, references, object)`; the references add up to `ref_count(block)`.
        Without an id returns a dict of such lists, one for every block in use. The kind is "sequence", "cache", the
        kind of an owner that was added, or "other" for references that `allocate`, `allocate_n` or `share` took and no
        owner holds. Raises `InvalidBlock` when the id is out of range.

        >>> from pagepool import PagedSeqState
        >>> allocator = BlockAllocator(4)
        >>> state = PagedSeqState(allocator, block_size=4, label="request 7")
        >>> slots = state.append(3)
        >>> allocator.share(0)
        >>> [owner[:3] for owner in allocator.owners(0)]
        [('sequence', 'request 7', 1), ('other', None, 1)]
        """
        if block is None:
            wanted = range(self.c_ids_used())
        else:
            wanted = (integer("block", block),)
            self.ref_count(block)
        # Not `ref_count`, which raises if another thread has shrunk the allocator since then.
        found = owners_of(wanted, self.holders(), lambda number: self.c_ref_count(number))
        return {number: owners for number, owners in found.items() if owners} if block is None else found[wanted[0]]

    def leaks(self):
        """Returns the blocks that are still held, by owner. When an engine is idle the list should be empty.

        Returns a list of named tuples `(kind, label, blocks, alone, object)`, most blocks first. `blocks` are ids,
        `alone` those that no other owner holds. References without an owner come last, as kind "other". Prefix caches
        are left out, since holding blocks is what they are for.

        >>> from pagepool import PagedSeqState
        >>> allocator = BlockAllocator(4)
        >>> state = PagedSeqState(allocator, block_size=4, label=7)
        >>> slots = state.append(5)
        >>> [leak[:4] for leak in allocator.leaks()]
        [('sequence', 7, [0, 1], [0, 1])]
        """
        return leaks_of(self.owners())

    def warn_of_leaks(self):
        """Raises a `ResourceWarning` for each of `leaks`, at most 20 and one for the rest. Call it when idle.

        A warning names the owner's label and the number of blocks, and where the owner was made if Python was started
        with `-X tracemalloc`. Python shows such warnings under `-X dev` or `-W default`. Changes nothing.
        """
        warn_of(self.leaks(), "blocks are in use")

    def check(self, others=None):
        """Audits the invariants of free list, counts, sequences and caches. Raises `PoolError` that names a broken one.

        O(blocks ever used and held); other threads wait for the first half. Changes nothing.

        Parameters
        ----------
        others
            How many references belong to no owner (see `owners`), if the caller knows; by default any number.

        Examples
        --------
        >>> BlockAllocator(8).check(others=0)
        """
        cdef int32_t number
        cdef Audit audit
        with nogil:
            pp_lock_acquire(&self.lock)
            if self.shared != NULL:
                audit.equation = pp_shared_audit(<pp_shared_view *>self.shared, self.c_counts, &audit.left)
                audit.right = self.c_counts[audit.left]
            else:
                audit = audit_counts(self.c_freed, self.num_freed, self.taken, self.limit, self.c_counts)
            if self.shared == NULL and audit.equation == NULL and self.words != NULL:
                audit = audit_words(self.words, self.c_counts, self.taken)
            pp_lock_release(&self.lock)
        if audit.equation != NULL:
            raise PoolError(f"broken invariant: {audit.equation.decode()}, but {audit.left} and {audit.right}")
        counts = [self.c_ref_count(number) for number in range(self.c_ids_used())]
        audit_holders(self.holders(), counts, others)

    cdef object invalid(self, IdArray *array, verb):
        """The InvalidBlock that says which of the ids is wrong, and why."""
        cdef Py_ssize_t i
        cdef list counts = [None] * array.count
        for i in range(array.count):
            counts[i] = self.c_ref_count(array.ids[i])
        return invalid_blocks(list_ids(array.ids, array.count), counts, self.c_capacity(), verb)
