"""Who holds which block: sequences and caches are known to their allocator, and asked when someone wants to know."""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t

import weakref
from collections import Counter

from pagepool.config import MAX_BLOCK_SIZE
from pagepool.errors import PoolError
from pagepool.arguments import integer
from pagepool.memory.leak_report import warn_of
from pagepool.memory.owners import Leak, Owner

__all__ = ["Holder", "HolderRegistry"]


cdef int32_t DEFAULT_BLOCK_SIZE = 16


cdef object held(object holder):
    """The ids of its blocks, one entry for each reference."""
    return (<Holder>holder).references() if isinstance(holder, Holder) else holder.references()


@cython.no_gc
cdef class Holder:
    """Something with references to blocks that its allocator knows. Internal: the base of `PagedSeqState`."""

    kind = "sequence"

    cdef void c_enlist(self, HolderRegistry registry) noexcept:
        self.link.holder = <void *>self
        self.link.previous = registry.head.previous
        self.link.next = &registry.head
        registry.head.previous.next = &self.link
        registry.head.previous = &self.link

    cdef void c_delist(self) noexcept:
        if self.link.next != NULL:
            self.link.next.previous = self.link.previous
            self.link.previous.next = self.link.next
            self.link.next = NULL

    cdef list references(self):
        return []

    @property
    def label(self):
        """Whose it is, for `owners` and `leaks`: a request id, a name or None. May be set at any time.

        Of a subclass of int or str only the number or the text is kept.
        """
        return self._label

    @label.setter
    def label(self, value):
        if value is not None and not isinstance(value, (int, str)):
            raise TypeError(f"a label must be an int, a str or None, not {type(value).__name__}")
        if isinstance(value, str):  # exactly: what a subclass refers to could make a cycle that nobody collects
            value = str.__str__(value)
        elif value is not None:
            value = int.__int__(value)
        self._label = value


@cython.no_gc
cdef class HolderRegistry:
    """What knows the holders of blocks. Internal: the base of `BlockAllocator`, whose `ref_count` it relies on.

        for each block: ref_count == references of sequences + references of caches + references of others

    The last are those that were taken by `allocate`, `allocate_n` and `share` and belong to no holder. Nothing is
    recorded when references come and go: the holders are asked, in O(all their blocks). Sequences that other threads
    change without the GIL must be at rest meanwhile.
    """

    def __cinit__(self):
        self.head.previous = self.head.next = &self.head
        self.others = []

    def add_holder(self, holder):
        """Makes something else that holds blocks known to `owners`, `leaks` and `check`, as long as it lives.

        It has `kind`, a str, `label`, a str, int or None, and `references()`, the ids of its blocks with one entry for
        each reference; what is `evictable` of them, if it has that, counts apart in `stats`. Sequences are known from
        the start, and so are prefix caches. Adding it again changes nothing.
        """
        holder.references()
        if not any(known() is holder for known in self.others):
            self.others = [known for known in self.others if known() is not None] + [weakref.ref(holder)]

    cdef list holders(self):
        """All that live, sequences first; not one that is just going, which must not come back."""
        cdef Link *link = self.head.next
        cdef list found = []
        while link != &self.head:
            if (<PyObject *>link.holder).ob_refcnt > 0:
                found.append(<object><PyObject *>link.holder)
            link = link.next
        for known in self.others:
            holder = known()
            if holder is not None:
                found.append(holder)
        return found

    def owners(self, block=None):
        """Who holds a block: a list of `Owner(kind, label, references, holder)`, the references of which add up to its
        `ref_count`; [] for a free one. Without an id: a dict of such lists, for every block that is in use.

        kind is "sequence", "cache", that of a holder which was added, or "other" for references that were taken by
        `allocate`, `allocate_n` or `share` and belong to no holder. Asks every holder: for the search of a fault, not
        for every step. What other threads take and give back meanwhile may be in it or not. Raises `InvalidBlock`
        when the id is out of range.

        >>> from pagepool import BlockAllocator, PagedSeqState
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
        found = {number: [] for number in wanted}
        for holder in self.holders():
            for number, times in Counter(held(holder)).items():
                if number in found:
                    found[number].append(Owner(holder.kind, holder.label, times, holder))
        for number, owners in found.items():
            # Not `ref_count`: another thread may have shrunk the allocator since, so that there is no such block.
            others = self.c_ref_count(number) - sum(owner.references for owner in owners)
            if others > 0:
                owners.append(Owner("other", None, others, None))
        return {number: owners for number, owners in found.items() if owners} if block is None else found[wanted[0]]

    def leaks(self):
        """What is held still: a list of `Leak(kind, label, blocks, alone, holder)`, most blocks first.

        blocks are the ids that the holder has references to, alone those that nobody else holds: what comes free when
        it lets go. References that belong to no holder come last, as kind "other". Empty when nothing is in use: ask
        when an engine is idle, or at its end. Prefix caches are left out, since holding blocks is what they are for.

        >>> from pagepool import BlockAllocator, PagedSeqState
        >>> allocator = BlockAllocator(4)
        >>> state = PagedSeqState(allocator, block_size=4, label=7)
        >>> slots = state.append(5)
        >>> [leak[:4] for leak in allocator.leaks()]
        [('sequence', 7, [0, 1], [0, 1])]
        """
        found, loose = [], []
        mapped = self.owners()
        by_holder = {}
        for number, owners in mapped.items():
            for owner in owners:
                if owner.kind == "other":
                    loose.append(number)
                elif owner.kind != "cache":
                    by_holder.setdefault(id(owner.holder), (owner, []))[1].append(number)
        for owner, blocks in by_holder.values():
            alone = [number for number in blocks if len(mapped[number]) == 1]
            found.append(Leak(owner.kind, owner.label, blocks, alone, owner.holder))
        found.sort(key=lambda leak: -len(leak.blocks))
        if loose:
            alone = [number for number in loose if len(mapped[number]) == 1]
            found.append(Leak("other", None, loose, alone, None))
        return found

    def warn_of_leaks(self):
        """A `ResourceWarning` for each of `leaks`, at most 20 of them and one for the rest: for an engine that is idle.

        It says whose they are by label, how many blocks, and where the holder was made if Python was started with
        `-X tracemalloc`. Python shows such warnings under `-X dev` or `-W default`. Changes nothing.
        """
        warn_of(self.leaks(), "blocks are in use")

    cdef int check_references(self, object others) except -1:
        """Audits the equation for every block; raises PoolError naming one that breaks it.

        others: how many references belong to no holder, or None for any number.
        """
        cdef int32_t used = self.c_ids_used(), number
        references = Counter()
        for holder in self.holders():
            references.update(held(holder))
        for block, times in references.items():
            count = self.ref_count(block)
            if times > count:
                raise PoolError(f"broken invariant: block {block} has {count} references, its holders have {times}")
        if others is not None:
            surplus = sum([self.c_ref_count(number) for number in range(used)]) - sum(references.values())
            if surplus != others:
                raise PoolError(f"broken invariant: {surplus} references belong to no holder, not {others}")
        return 0

    cdef int32_t c_ids_used(self) noexcept nogil:
        return 0

    cdef int32_t c_ref_count(self, int32_t block) noexcept nogil:
        return -1

    cdef int32_t c_other_block_size(self, int32_t block_size) noexcept nogil:
        return 0

    cdef int32_t read_block_size(self, object block_size) except -1:
        if block_size is None:
            return self.c_other_block_size(DEFAULT_BLOCK_SIZE) or DEFAULT_BLOCK_SIZE
        size = integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
        other = self.c_other_block_size(size)
        if other:
            raise ValueError(f"block_size must be {other}, that of the pool with these blocks, not {size}")
        return size
