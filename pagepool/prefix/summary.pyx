"""CacheSummary: what a prefix cache holds and has done."""

cimport cython
from libc.stdint cimport int32_t, int64_t

from pagepool.memory.ids cimport IdArray, read_id, read_ids, release_ids
from pagepool.memory.paged_seq cimport PagedSeqState

from pagepool.errors import PoolError, refuse_copy

__all__ = ["CacheSummary"]


@cython.auto_pickle(False)
cdef class CacheSummary:
    """What can be asked of a prefix cache, and changes nothing. Internal: the base of `PrefixCache`."""

    kind = "cache"

    def __reduce__(self):
        refuse_copy(self)

    def __repr__(self):
        cached = f"{self.num_cached} of {self.allocator.max_capacity} blocks cached"
        return f"<{type(self).__name__} {self.policy}: {cached}>"

    @property
    def label(self):
        """What `BlockAllocator.owners` calls it: its policy."""
        return self.policy

    def references(self):
        """The ids of the blocks that it holds, as a list; one reference each."""
        return self.cached.list_blocks()

    @property
    def num_cached(self):
        """Blocks that the cache holds a reference to."""
        return self.cached.num_cached

    @property
    def inserted(self):
        """How many blocks were ever cached. As long as it stays the same, no look-up finds more than it did before."""
        return self.cached.inserted

    @property
    def forgotten(self):
        """How many blocks `discard` and `reset_prefix_cache` took out: as long as it stays the same, every cached block
        that somebody else holds stays cached."""
        return self.cached.forgotten

    @property
    def evictable(self):
        """Cached blocks that nobody else holds: what `evict` could free now, but for `floors`. O(groups)."""
        return self.cached.floors.c_idle()

    @property
    def floors(self):
        """The `CacheFloors`: how many blocks of each group are kept when others need room."""
        return self.cached.floors

    def holds(self, block):
        """Whether the block is cached. False for what is no block of the allocator."""
        cdef int32_t number
        read_id(block, &number)
        return 0 <= number < self.allocator.max_capacity and self.cached.owners[number] > 0

    def count_cached(self, blocks):
        """How many of these blocks are cached. O(blocks); not those that are no blocks of the allocator.

        >>> from pagepool import BlockAllocator, PrefixCache
        >>> cache = PrefixCache(BlockAllocator(4), block_size=1)
        >>> cache.cache_blocks([7, 8], cache.allocator.allocate_n(2)), cache.count_cached([0, 1, 2, 99])
        (2, 2)
        """
        cdef IdArray ids
        cdef int64_t count = 0, i
        read_ids(blocks, &ids)
        for i in range(ids.count):
            count += 0 <= ids.ids[i] < self.allocator.max_capacity and self.cached.owners[ids.ids[i]] > 0
        release_ids(&ids)
        return count

    def count_outside(self, list states not None):
        """How many different blocks these `PagedSeqState` hold together that are not cached. O(blocks).

        Raises `TypeError` for what is none, `ValueError` for one of another allocator.

        >>> from pagepool import BlockAllocator, PagedSeqState, PrefixCache
        >>> cache = PrefixCache(BlockAllocator(4), block_size=1)
        >>> state = PagedSeqState(cache.allocator, block_size=1)
        >>> kept = state.append(3), cache.cache_blocks([7], state.blocks)
        >>> cache.count_outside([state, state.fork()])
        2
        """
        cdef PagedSeqState state
        cdef int64_t count = 0
        cdef int32_t block, i
        shared = set()  # one that has a single reference is in no other table
        for item in states:
            if not isinstance(item, PagedSeqState):
                raise TypeError(f"a state must be a PagedSeqState, not {type(item).__name__}")
            state = <PagedSeqState>item
            if state.allocator is not self.allocator:
                raise ValueError("the sequence and the cache have different allocators")
            for i in range(state.first_block, state.num_blocks):
                block = state.c_blocks[i]
                if self.cached.owners[block] > 0:
                    continue
                if self.allocator.c_ref_count(block) == 1:
                    count += 1
                else:
                    shared.add(block)
        return count + len(shared)

    def stats(self):
        """What it holds and has done, as a dict; blocks in use by others, evictable and free are apart. O(1).

        `looked_up` and `hits` are full blocks asked for and found, `inserted` = `cached` + `evicted` + `cleared`;
        `nodes` are the prefixes that it knows, cached or not; `collisions` are equal hashes of unequal blocks.
        """
        free = self.allocator.c_free_count()
        evictable = self.evictable
        return {
            "policy": self.policy,
            "capacity": self.allocator.capacity,
            "cached": self.cached.num_cached,
            "used": self.allocator.capacity - free - evictable,
            "evictable": evictable,
            "free": free,
            "looked_up": self.looked_up,
            "hits": self.hits,
            "inserted": self.cached.inserted,
            "evicted": self.cached.evicted,
            "cleared": self.cached.cleared,
            "nodes": self.cached.table.num_alive,
            "collisions": self.cached.table.collisions,
        }

    def check(self):
        """Audits every equation between tree, policy, allocator and counters; raises `PoolError` naming a broken one.

        O(nodes + tokens cached). Changes nothing.
        """
        broken = self.cached.audit()
        if broken is not None:
            raise PoolError(f"broken invariant: {broken}")
