from libc.stdint cimport int32_t, int64_t

from pagepool.prefix.group cimport Cells, Group
from pagepool.prefix.lru_rival cimport LruRival
from pagepool.prefix.policy cimport EvictionPolicy


cdef enum:
    GHOSTS
    WAITING  # cached nodes found with cached children when their turn came
    COUNT = 7  # bits of node.uses: uses, of which 4 is the most that is counted
    CONTINUED = 8  # the node was made behind a cached prefix
    WAITS = 16  # it is in WAITING
    MOST_USES = 4


cdef class GroupedPolicy(EvictionPolicy):
    # Nodes used by one request that are of one kind are a group; node.list is the number of the group:
    #   members = the cached nodes and ghosts whose group it is; one without members is in the list `unused`
    #   a group with nodes is in the cell of its kind and of an age class that it had, its own or a lower one
    #   a cached node that is not held is in its group's nodes, or in the list WAITING with its flag set
    #   cached_children = the children of a node that have a block
    cdef LruRival rival
    cdef Group *groups
    cdef int64_t room
    cdef int32_t num_made
    cdef int32_t num_live
    cdef int32_t unused
    cdef Cells cells
    cdef int32_t open[8]  # the groups of the request that is going on, or -1
    cdef int64_t clock  # nodes used so far
    cdef int32_t victims  # the group that blocks are being taken from, or -1

    # Of n nodes with ids in a row, of one group and as many uses. Among the members of the group of their kind of the
    # request that is going on; no members of their group any more, of whose nodes they are none.
    cdef void c_place(self, int32_t first, int32_t n) noexcept
    cdef void c_leave(self, int32_t first, int32_t n) noexcept
    # Linked one after the other: into their group's nodes, and out of them.
    cdef void c_join(self, int32_t first, int32_t n) noexcept
    cdef void c_part(self, int32_t first, int32_t n) noexcept
