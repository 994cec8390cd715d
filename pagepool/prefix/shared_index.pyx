"""SharedIndex: the prefix index that all processes of a shared pool read and write."""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy

from pagepool.csrc cimport pp_lock_acquire, pp_lock_release
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport IdArray, new_int32
from pagepool.memory.block_refs cimport BlockRefs
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.memory.shared_pages cimport (
    SharedPages,
    pp_shared_is_stale,
    pp_shared_limit,
    pp_shared_return_pending,
    pp_shared_view,
)
from pagepool.prefix.events cimport REMOVED, STORED, EventLog
from pagepool.prefix.eviction cimport BlockOrder
from pagepool.prefix.radix_tree cimport NamedBlock, NameSource, NodeTable
from pagepool.prefix.stored_pages cimport PageQueue

from pagepool.errors import InvalidBlock, PoolError
from pagepool.prefix.keys import key_digest

__all__ = []

cdef extern from "shared/index.h" nogil:
    ctypedef struct pp_index_path:
        uint64_t root[2]
        const int32_t *tokens
        int64_t n

    int64_t pp_index_match(pp_shared_view *view, const pp_index_path *path, int32_t *counts, int32_t *blocks)
    int64_t pp_index_insert(
        pp_shared_view *view, const pp_index_path *path, const int32_t *blocks, const int32_t *counts, uint64_t epoch,
        int64_t *failed
    )
    int64_t pp_index_evict(pp_shared_view *view, int64_t n)
    int64_t pp_index_evict_held(
        pp_shared_view *view, int64_t n, pp_index_names *names, int32_t *counts, int32_t *blocks
    )
    int64_t pp_index_hold(
        pp_shared_view *view, int64_t n, pp_index_names *names, int32_t *counts, int32_t *blocks, int32_t *next
    )
    void pp_index_know(
        const pp_shared_view *view, pp_index_names *names, const pp_index_path *path, const int32_t *blocks, int64_t n
    )
    bint pp_index_is_known(const pp_shared_view *view, const pp_index_names *names, int32_t b)
    const pp_index_named *pp_index_name(const pp_shared_view *view, pp_index_names *names, int32_t b)
    int64_t pp_index_removed(const pp_shared_view *view, pp_index_names *names, int32_t *blocks)
    int64_t pp_index_added(const pp_shared_view *view, pp_index_names *names, int32_t *blocks)
    const int32_t *pp_index_tokens(const pp_shared_view *view, int32_t b)
    int64_t pp_index_match_part(
        pp_shared_view *view, const pp_index_path *path, const int32_t *blocks, int64_t n, const int32_t *tokens,
        int64_t num_tokens, int32_t *counts, int32_t *block
    )
    int32_t pp_index_parent(const pp_shared_view *view, int32_t b)
    bint pp_index_take(pp_shared_view *view, int32_t b, int32_t *counts)
    bint pp_index_begin(pp_shared_view *view)
    void pp_index_end(pp_shared_view *view)
    uint64_t pp_index_epoch(const pp_shared_view *view)
    int64_t pp_index_forget(pp_shared_view *view, const int32_t *blocks, int64_t n)
    int64_t pp_index_count(const pp_shared_view *view, int only_idle)
    const char *pp_index_audit(pp_shared_view *view)


cdef extern from *:
    """
    #define pp_count_of(view, name) __atomic_load_n(&(view)->header->name, __ATOMIC_RELAXED)
    #define pp_inserted(view) pp_count_of(view, inserted)
    #define pp_evicted(view) pp_count_of(view, evicted)
    #define pp_forgotten(view) pp_count_of(view, forgotten)
    #define pp_changes(view) (pp_inserted(view) + pp_evicted(view) + pp_forgotten(view))
    #define pp_holders(view, b) ((uint32_t)__atomic_load_n(&(view)->words[b], __ATOMIC_ACQUIRE))
    """
    uint64_t pp_inserted(const pp_shared_view *view) nogil
    uint64_t pp_evicted(const pp_shared_view *view) nogil
    uint64_t pp_forgotten(const pp_shared_view *view) nogil
    uint64_t pp_changes(const pp_shared_view *view) nogil
    uint32_t pp_holders(const pp_shared_view *view, int32_t b) nogil


cdef enum:
    AT_ONCE = 64  # blocks that are held while their pages are copied
    NAME_WORDS = 4  # int32 of a name


cdef NamedBlock named_block(const pp_index_names *names, int32_t b) noexcept nogil:
    cdef NamedBlock named
    memcpy(&named.name, names.of[b].name, sizeof(named.name))
    memcpy(&named.parent, names.of[b].parent, sizeof(named.parent))
    named.block = b
    return named


cdef pp_index_path path_of(const int32_t[::1] row, int64_t n, bytes key) except *:
    cdef pp_index_path path
    cdef bytes name = key_digest(key)
    memcpy(path.root, <const char *>name, sizeof(path.root))
    path.tokens = &row[0] if row.shape[0] else NULL
    path.n = n
    return path


@cython.final
@cython.auto_pickle(False)
cdef class SharedOrder(BlockOrder):
    """Knows prefixes by name. What this process finds and caches is entered at once, in the order of its calls; what
    other processes cache and evict is entered before the next eviction. Internal."""

    cdef bint c_in_use(self, int32_t node) noexcept:
        return pp_holders(self.view, self.tree.nodes[node].block) != PP_INDEX_BIT

    cdef void c_set(self, int32_t node, int32_t block) noexcept:
        """Gives a node this block. Another one that it had, and another node that had this block, are out of date."""
        cdef int32_t other = self.node_of[block] - 1, old = self.tree.nodes[node].block
        if other != node:
            if other >= 0:
                self.c_leave(other)
            if old >= 0:
                self.names.of[old].state &= ~<uint32_t>PP_INDEX_LISTED
                self.node_of[old] = 0
                self.tree.nodes[node].block = block
                self.node_of[block] = node + 1
            else:
                self.c_enter(node, block)
        self.names.of[block].state |= PP_INDEX_LISTED

    cdef void c_use(self, const int32_t *blocks, int64_t n, bint is_found) noexcept:
        cdef const int32_t *name
        cdef int32_t node = 0, child  # node 0 is the root
        cdef int64_t i
        cdef bint is_new
        self.tree.c_pin(node)
        for i in range(n):
            if not 0 <= blocks[i] < self.view.num_blocks:  # known already, so its number was not checked
                break
            if self.node_of[blocks[i]] and not self.names.of[blocks[i]].state & PP_INDEX_LISTED:
                self.c_leave(self.node_of[blocks[i]] - 1)  # it was cached for another prefix
            name = <const int32_t *>self.names.of[blocks[i]].name
            child = self.tree.c_find(node, name)
            if child < 0:
                child = self.tree.c_add(node, name)
            self.tree.c_pin(child)
            self.tree.c_unpin(node)
            node = child
            is_new = self.tree.nodes[node].block < 0
            if pp_index_is_known(self.view, self.names, blocks[i]) and pp_holders(self.view, blocks[i]) & PP_INDEX_BIT:
                self.c_set(node, blocks[i])
                if is_found and not is_new:
                    self.c_touch(node)
        self.tree.c_unpin(node)

    cdef int follow(self) except -1:
        cdef int32_t *blocks = <int32_t *>self.room.base
        cdef int32_t parent, node
        cdef int64_t count, i
        if pp_changes(self.view) == self.changes or not pp_index_begin(self.view):
            return 0
        try:
            count = pp_index_removed(self.view, self.names, blocks)
            for i in range(count):
                if self.node_of[blocks[i]]:
                    self.c_leave(self.node_of[blocks[i]] - 1)
            count = pp_index_added(self.view, self.names, blocks)
            try:
                self.tree.reserve(count + 1)
            except BaseException:
                for i in range(count):
                    self.names.of[blocks[i]].state &= ~<uint32_t>PP_INDEX_LISTED
                raise
            for i in range(count):
                parent = pp_index_parent(self.view, blocks[i])
                parent = 0 if parent < 0 else self.node_of[parent] - 1
                if parent < 0:
                    self.names.of[blocks[i]].state = 0
                    continue
                node = self.tree.c_find(parent, <const int32_t *>self.names.of[blocks[i]].name)
                if node < 0:
                    node = self.tree.c_add(parent, <const int32_t *>self.names.of[blocks[i]].name)
                self.c_set(node, blocks[i])
            self.changes = pp_changes(self.view)
        finally:
            pp_index_end(self.view)
        return 0

    cdef int reset(self) except -1:
        cdef int64_t b
        for b in range(self.view.num_blocks):
            self.names.of[b].state = 0
            self.node_of[b] = 0
        self.c_clear()
        self.tree.reserve(1)
        self.tree.nodes[self.tree.root((b"", b""))].ghost = 1  # keeps it
        self.changes = pp_changes(self.view) - 1
        return 0


@cython.final
@cython.auto_pickle(False)
cdef class SharedIndex(NameSource):
    """Looks up and caches blocks for a `PrefixCache` over the allocator of a shared pool. Internal.

    The index holds a block by a bit in the word of the block. So the cached blocks belong to no process, and the
    private reference counts do not include them.
    """

    def __cinit__(self, BlockAllocator allocator not None, int32_t block_size):
        self.allocator = allocator
        self.view = &(<SharedPages?>allocator.shared_pages).view
        self.block_size = block_size
        self.memory = []

    cdef int give_names(self, pp_index_names *names, bytes secret) except -1:
        cdef PageBuffer named = PageBuffer(self.view.num_blocks * <int64_t>sizeof(pp_index_named), "B")
        cdef PageBuffer path = PageBuffer(self.view.num_blocks, "i")
        self.memory += [named, path]
        names.of = <pp_index_named *>named.base
        names.path = <int32_t *>path.base
        memcpy(names.secret, <const char *>secret, sizeof(names.secret))
        return 0

    cdef int evict_by(self, str policy) except -1:
        cdef SharedOrder order
        self.give_names(&self.ordered, bytes(16))
        order = SharedOrder(NodeTable(NAME_WORDS), self.view.num_blocks, policy)
        order.view = self.view
        order.names = &self.ordered
        order.room = PageBuffer(self.view.num_blocks, "i")
        order.reset()
        self.order = order
        return 0

    cdef int note_events(self, int64_t max_events) except -1:
        self.give_names(&self.listed, bytes(16))
        self.log = EventLog(self, 0, max_events)
        return 0

    cdef int offer_to(self, PageQueue queue, bytes secret) except -1:
        self.give_names(&self.stored, secret)
        self.stored.offered = queue.offered
        self.queue = queue
        return 0

    cdef bint c_offer(self, const int32_t *blocks, int64_t n) noexcept:
        cdef NamedBlock named
        cdef bint fits = True
        cdef int64_t i
        for i in range(n):
            if pp_index_is_known(self.view, &self.stored, blocks[i]):
                named = named_block(&self.stored, blocks[i])
                fits = self.queue.c_offer(&named, pp_index_tokens(self.view, blocks[i])) and fits
        return fits

    cdef bint offer_all(self) except -1:
        cdef int32_t blocks[AT_ONCE]
        cdef int32_t next = 0
        cdef int64_t count
        cdef bint fits = True
        while next < self.view.num_blocks and fits:
            count = pp_index_hold(self.view, AT_ONCE, &self.stored, self.allocator.c_counts, blocks, &next)
            fits = self.c_offer(blocks, count)
            self.allocator.c_free_n(blocks, count)
        self.check_alive()
        return fits

    cdef object names_of(self, const int32_t *blocks, int64_t n):
        cdef const pp_index_named *named
        cdef int64_t i
        cdef list names = []
        if not pp_index_begin(self.view):
            return None
        try:
            for i in range(n):
                if 0 <= blocks[i] < self.view.num_blocks:
                    named = pp_index_name(self.view, &self.stored, blocks[i])
                    if named != NULL:
                        names.append((<const char *>named.name)[:16])
        finally:
            pp_index_end(self.view)
        return names

    cdef int64_t c_most_named(self) noexcept nogil:
        return self.view.num_blocks

    cdef int64_t c_list_named(self, int number, NamedBlock *blocks, int32_t *tokens) noexcept nogil:
        """Uses `tokens` first as room for the numbers of blocks."""
        cdef size_t row = self.block_size
        cdef int64_t count = 0
        cdef int32_t b
        if pp_index_begin(self.view):
            self.c_note_changes(tokens)
            for b in range(<int32_t>self.view.num_blocks):
                if self.listed.of[b].state & PP_INDEX_LISTED:
                    blocks[count] = named_block(&self.listed, b)
                    memcpy(tokens + count * row, pp_index_tokens(self.view, b), row * sizeof(int32_t))
                    count += 1
            pp_index_end(self.view)
        return count

    cdef int note_changes(self) except -1:
        cdef uint64_t changes = pp_changes(self.view)
        cdef int32_t *blocks
        if changes == self.changes:
            return 0
        blocks = <int32_t *>PyMem_Malloc(self.view.num_blocks * sizeof(int32_t) + 1)
        if blocks == NULL:
            raise MemoryError(f"no memory for events of {self.view.num_blocks} blocks")
        if pp_index_begin(self.view):
            self.c_note_changes(blocks)
            pp_index_end(self.view)
            self.changes = changes
        PyMem_Free(blocks)
        self.check_alive()
        return 0

    cdef void c_note_changes(self, int32_t *blocks) noexcept nogil:
        cdef NamedBlock named
        cdef int64_t i
        for i in range(pp_index_removed(self.view, &self.listed, blocks)):
            named = named_block(&self.listed, blocks[i])
            self.log.c_add(REMOVED, &named, NULL)
        for i in range(pp_index_added(self.view, &self.listed, blocks)):
            named = named_block(&self.listed, blocks[i])
            self.log.c_add(STORED, &named, pp_index_tokens(self.view, blocks[i]))

    cdef int check_alive(self) except -1:
        if pp_shared_is_stale(self.view):
            raise (<SharedPages>self.allocator.shared_pages).stale()
        return 0

    cdef tuple match(self, const int32_t[::1] row, bytes key, bint in_part, BlockRefs held, bint is_use):
        cdef int64_t n = row.shape[0] // self.block_size, found, common = 0
        cdef pp_index_path path = path_of(row, n, key)
        cdef const int32_t *rest
        cdef int32_t *ids
        blocks = new_int32(n + in_part, &ids)
        if held is not None:
            held.c_reserve(n + in_part)
        if is_use and self.order is not None:
            self.order.tree.reserve(n + 1)
        with nogil:
            pp_lock_acquire(&self.allocator.lock)
            found = pp_index_match(self.view, &path, self.allocator.c_counts, ids)
            pp_lock_release(&self.allocator.lock)
            if in_part and found * self.block_size < row.shape[0]:
                rest = path.tokens + found * self.block_size
                common = pp_index_match_part(
                    self.view, &path, ids, found, rest, row.shape[0] - found * self.block_size,
                    self.allocator.c_counts, &ids[found]
                )
            pp_shared_return_pending(self.view)
        if held is not None:
            held.c_note(ids, found + (common > 0))
        self.check_alive()
        if is_use and found:
            with cython.critical_section(self):
                if self.order is not None:
                    pp_index_know(self.view, &self.ordered, &path, ids, found)
                    self.order.c_use(ids, found, True)
                if self.queue is not None:
                    pp_index_know(self.view, &self.stored, &path, ids, found)
                    self.c_offer(ids, found)
                    self.queue.c_note_found(named_block(&self.stored, ids[found - 1]).name)
        if is_use:
            self.looked_up += n
            self.hits += found
        return blocks[: found + (common > 0)], found * self.block_size + common

    cdef int64_t cached_tokens(self, const int32_t[::1] row, bytes key) except -1:
        cdef pp_index_path path = path_of(row, row.shape[0] // self.block_size, key)
        cdef int64_t found
        with nogil:
            found = pp_index_match(self.view, &path, NULL, NULL)
        self.check_alive()
        return found * self.block_size

    cdef int64_t insert(self, const int32_t[::1] row, bytes key, IdArray *blocks, uint64_t epoch) except -1:
        cdef pp_index_path path = path_of(row, row.shape[0] // self.block_size, key)
        cdef int64_t failed = 0, fresh
        if self.order is not None:
            self.order.tree.reserve(path.n + 1)
        with nogil:
            fresh = pp_index_insert(self.view, &path, blocks.ids, self.allocator.c_counts, epoch, &failed)
        self.check_alive()
        if fresh >= 0:
            with cython.critical_section(self):
                if self.order is not None and fresh:
                    pp_index_know(self.view, &self.ordered, &path, blocks.ids, path.n)
                    self.order.c_use(blocks.ids, path.n, False)
                    self.order.changes += fresh
                if self.queue is not None:
                    pp_index_know(self.view, &self.stored, &path, blocks.ids, path.n)
            return fresh
        block = blocks.ids[failed]
        if not 0 <= block < self.allocator.max_capacity:
            raise InvalidBlock(f"block {block} is out of range: there are {self.allocator.max_capacity} blocks")
        if self.allocator.c_ref_count(block) < 1:
            raise InvalidBlock(f"block {block} cannot be cached: it is free in this process")
        raise InvalidBlock(f"block {block}, given at {failed}, is cached already, for other tokens")

    cdef int64_t evict(self, int64_t n) except -1:
        cdef int32_t blocks[AT_ONCE]
        cdef int64_t done = 0, count = 1, i
        if self.order is not None:
            done = self.evict_ordered(n)
        if self.queue is None and done < n:
            with nogil:
                done += pp_index_evict(self.view, n - done)
        while self.queue is not None and done < n and count:
            with nogil:
                count = pp_index_evict_held(
                    self.view, min(n - done, <int64_t>AT_ONCE), &self.stored, self.allocator.c_counts, blocks
                )
            with cython.critical_section(self):
                for i in range(count):
                    self.queue.dropped += not self.c_offer(&blocks[i], 1)
            for i in range(count):
                done += blocks[i] < pp_shared_limit(self.view)
            self.allocator.c_free_n(blocks, count)
        self.check_alive()
        return done

    cdef int64_t evict_ordered(self, int64_t n) except -1:
        """Evicts what the order knows: not the blocks behind an evicted one, which no look-up can find."""
        cdef SharedOrder order = self.order
        cdef int32_t blocks[AT_ONCE]
        cdef int64_t done = 0, count = 1, i
        cdef int32_t node
        cdef bint all_seen = False
        with cython.critical_section(self):
            order.follow()
            while done < n and count and pp_index_begin(self.view):
                count = 0
                while count < min(n - done, <int64_t>AT_ONCE):
                    node = order.c_victim(&all_seen)
                    if node < 0:
                        break
                    blocks[count] = order.tree.nodes[node].block
                    if self.queue is not None:
                        pp_index_name(self.view, &self.stored, blocks[count])
                    if not pp_index_take(self.view, blocks[count], self.allocator.c_counts):
                        order.c_set_aside(node)  # a process has found it meanwhile
                        continue
                    self.ordered.of[blocks[count]].state = 0
                    order.c_leave(node)
                    order.changes += 1
                    count += 1
                pp_index_end(self.view)
                for i in range(count):
                    if self.queue is not None:
                        self.queue.dropped += not self.c_offer(&blocks[i], 1)
                    done += blocks[i] < pp_shared_limit(self.view)
                self.allocator.c_free_n(blocks, count)
        return done

    cdef int64_t forget(self, const int32_t *blocks, int64_t n) except -1:
        cdef int64_t done
        with nogil:
            done = pp_index_forget(self.view, blocks, n)
        self.check_alive()
        if blocks == NULL and self.order is not None:
            with cython.critical_section(self):
                self.order.reset()
        if done < 0:
            raise (<SharedPages>self.allocator.shared_pages).refuse_wait("the index")
        return done

    cdef int64_t count(self, bint only_idle) noexcept:
        return pp_index_count(self.view, only_idle)

    cdef uint64_t inserted(self) noexcept:
        return pp_inserted(self.view)

    cdef uint64_t epoch(self) noexcept:
        return pp_index_epoch(self.view)

    cdef dict stats(self):
        cdef int64_t capacity = self.allocator.c_capacity(), free = self.allocator.c_free_count()
        cdef int64_t evictable = self.count(True), cached = self.count(False)
        return {
            "policy": "lru" if self.order is None else "gittins",
            "capacity": capacity,
            "cached": cached,
            "used": capacity - free - evictable,
            "evictable": evictable,
            "free": free,
            "looked_up": self.looked_up,
            "hits": self.hits,
            "inserted": self.inserted(),
            "evicted": pp_evicted(self.view),
            "cleared": pp_forgotten(self.view),
            "nodes": cached,
            "collisions": 0,
        }

    cdef int check(self) except -1:
        cdef const char *broken
        with nogil:
            broken = pp_index_audit(self.view)
        self.check_alive()
        if broken != NULL:
            raise PoolError(f"broken invariant: {broken.decode()}")
        if self.order is not None:
            with cython.critical_section(self):
                wrong = self.order.audit_order()
            if wrong is not None:
                raise PoolError(f"broken invariant: {wrong}")
        return 0
