from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.radix_tree cimport NodeList, NodeTable


cdef class LruPolicy:
    cdef NodeTable tree
    cdef int64_t capacity  # maximum number of blocks of the cache
    cdef NodeList order  # every cached node that is not set aside (see eviction.pxd); not used by subclasses

    # The interface of a policy, each function in amortised O(1). Nodes of a prefix are passed from head to tail.

    # The node got a block. It is new to the policy, or a ghost.
    cdef void c_insert(self, int32_t node) noexcept
    # The node was found by a look-up.
    cdef void c_touch(self, int32_t node) noexcept
    # Room is needed for this node. Returns true if caching it is not worth an eviction; it then counts as inserted and
    # evicted.
    cdef bint c_refuses(self, int32_t node) noexcept
    # Returns the node to evict next, or -1 if there is none. The node stays in its list.
    cdef int32_t c_victim(self) noexcept
    # The node lost its block. The policy may keep it as a ghost.
    cdef void c_evicted(self, int32_t node) noexcept
    # Remove a node from the policy, and insert it again as just used.
    cdef void c_unlink(self, int32_t node) noexcept
    cdef void c_link(self, int32_t node) noexcept

    cdef void c_clear(self) noexcept
    # Checks the policy's invariants. Returns a sentence about the first broken one, or None. `num_linked`: number of
    # cached nodes that are not set aside (see eviction.pxd).
    cdef str audit(self, int32_t num_linked)
