from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.group cimport Cells, Group
from pagepool.prefix.lru_rival cimport LruRival
from pagepool.prefix.policy cimport EvictionPolicy
from pagepool.prefix.reuse_ages cimport ReuseAges


cdef class GittinsPolicy(EvictionPolicy):
    # Nodes used by one request that are of one kind are a group; node.list is the number of the group:
    #   members = the cached nodes and ghosts whose group it is; one without members is in the list `unused`
    #   a group with nodes is in the cell of its kind and of an age class that it had, its own or a lower one
    #   a cached node that is not held is in its group's nodes, or in the list WAITING with its flag set
    #   cached_children = the children of a node that have a block
    cdef ReuseAges ages
    cdef LruRival rival
    cdef Group *groups
    cdef int64_t room
    cdef int32_t num_made
    cdef int32_t num_live
    cdef int32_t unused
    cdef Cells cells
    cdef int32_t open[8]  # the groups of the request that is going on, or -1
    cdef int32_t last  # the node used last, or -1
    cdef bint continued  # whether that request goes on where a cached prefix ends
    cdef int64_t clock  # nodes used so far
    cdef int64_t next_lesson
    cdef int64_t max_ghosts
    cdef int32_t victims  # the group that blocks are being taken from, or -1
    cdef int32_t budget  # blocks to take from it before all groups are looked at again

    cdef void c_arrive(self, int32_t node) noexcept
    cdef void c_into_ghosts(self, int32_t node) noexcept
    cdef void c_tick(self, int32_t node) noexcept
    cdef void c_learn(self) noexcept
    # Of n nodes with ids in a row, of one group and as many uses; c_join and c_part: linked one after the other.
    cdef void c_place(self, int32_t first, int32_t n) noexcept
    cdef void c_used(self, int32_t first, int32_t n, bint here) noexcept
    cdef void c_leave(self, int32_t first, int32_t n) noexcept
    cdef void c_join(self, int32_t first, int32_t n) noexcept
    cdef void c_part(self, int32_t first, int32_t n) noexcept
    cdef int32_t c_choose(self) noexcept
