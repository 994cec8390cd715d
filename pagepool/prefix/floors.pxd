from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.memory.kept cimport KeptBlocks
from pagepool.prefix.node cimport NodeList
from pagepool.prefix.node_table cimport NodeTable


# Where a cached node is, as node.held tells it: in the lists of the policy, or in one of those beside.
cdef enum:
    LINKED
    HELD
    SPARED
    DUE


cdef class CacheFloors:
    # For each group, by its mark, which is group + 1:
    #   cached[mark] = the cached blocks with that mark
    #   aside[mark]: its nodes that the policy gave while cached[mark] <= least[mark], the first first
    #   due: nodes that were spared, until their group had more; they go before all others
    # Nodes of both have held == SPARED or DUE, and are in no list of the policy. top: the largest mark that was used.
    cdef KeptBlocks kept
    cdef NodeTable table
    cdef int64_t cached_blocks[256]
    cdef int64_t least[256]
    cdef NodeList aside[256]
    cdef NodeList due
    cdef int top

    cdef int mark_of(self, group) except -1
    # A block has a node from now on. One less: cached_blocks[mark] -= 1, once its node is LINKED.
    cdef void c_added(self, uint8_t mark) noexcept
    # Whether its group has no block to give but for requests of the group `own`, a mark.
    cdef bint c_protects(self, int32_t node, uint8_t own) noexcept
    # The next node that is due, or -1; it stays.
    cdef int32_t c_next_due(self) noexcept
    # When the policy has none: the first node that was spared and need not be, or -1; it stays.
    cdef int32_t c_last_resort(self, uint8_t own) noexcept
    # A node that is in no list is spared; one that is SPARED or DUE is in no list from now on.
    cdef void c_spare(self, int32_t node) noexcept
    cdef void c_take_back(self, int32_t node) noexcept
    # Idle blocks of all groups; those of one that are spared when others need room; all that are, when `own` needs it.
    cdef int64_t c_idle(self) noexcept
    cdef int64_t c_spared(self, uint8_t mark) noexcept
    cdef int64_t c_protected(self, uint8_t own) noexcept
    cdef int64_t c_num_aside(self) noexcept
    cdef void c_clear(self) noexcept
    cdef str audit(self)
