from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.radix_tree cimport NodeList, NodeTable


cdef class EvictionPolicy:
    # Every cached node that is not aside (see eviction.pxd) is in one list, as are the ghosts; node.list says which.
    cdef NodeTable tree
    cdef int64_t capacity  # blocks that the cache could have at most
    cdef NodeList lists[256]
    cdef int num_lists

    # Room for n more calls of c_insert and c_touch, which then cannot fail. Pointers into the policy end
    # here.
    cdef int c_reserve(self, int64_t n) except -1

    # The interface: O(1) each, amortised. Nodes are given from the head of a prefix to its tail.

    # The node has a block from now on; it was none of the policy's, or a ghost.
    cdef void c_insert(self, int32_t node) noexcept
    # The node was found by a look-up.
    cdef void c_touch(self, int32_t node) noexcept
    # Room must be made for this node: whether it had better stay out, as if it came and went at once.
    cdef bint c_refuses(self, int32_t node) noexcept
    # The node to be evicted next, or -1 when no list has a node with a block; it stays where it is.
    cdef int32_t c_victim(self) noexcept
    # The node, in a list, has lost its block; the policy may keep it as a ghost.
    cdef void c_evicted(self, int32_t node) noexcept

    # The same for all: out of the lists and back in at the recent end of the list it was in.
    cdef void c_unlink(self, int32_t node) noexcept
    cdef void c_link(self, int32_t node) noexcept

    # For policies.
    cdef void c_push(self, int list, int32_t node) noexcept
    cdef void c_move(self, int32_t node, int list) noexcept
    cdef void c_forget_oldest(self, int list) noexcept

    cdef void c_clear(self) noexcept
    cdef str audit(self, int32_t num_linked)
