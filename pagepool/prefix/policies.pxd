from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.radix_tree cimport NodeList, NodeTable


cdef class LruPolicy:
    cdef NodeTable tree
    cdef int64_t capacity  # blocks that the cache could have at most
    cdef NodeList order  # every cached node that is not aside (see eviction.pxd); not used by subclasses

    # Room for n more calls of c_insert and c_touch, which then cannot fail. Pointers into the policy end here.
    cdef int c_reserve(self, int64_t n) except -1

    # The interface: O(1) each, amortised. Nodes are given from the head of a prefix to its tail.

    # The node has a block from now on; the policy did not know it, or had it as a ghost.
    cdef void c_insert(self, int32_t node) noexcept
    # The node was found by a look-up.
    cdef void c_touch(self, int32_t node) noexcept
    # Room must be made for this node: whether it had better stay out, as if it came and went at once.
    cdef bint c_refuses(self, int32_t node) noexcept
    # The node to be evicted next, or -1 without nodes; the node stays in its list.
    cdef int32_t c_victim(self) noexcept
    # The node has lost its block; the policy may keep it as a ghost.
    cdef void c_evicted(self, int32_t node) noexcept
    # Out of the policy, and back in as if used just now.
    cdef void c_unlink(self, int32_t node) noexcept
    cdef void c_link(self, int32_t node) noexcept

    cdef void c_clear(self) noexcept
    # The first equation that does not hold, as a sentence, or None. `num_linked`: cached nodes that are not aside.
    cdef str audit(self, int32_t num_linked)
