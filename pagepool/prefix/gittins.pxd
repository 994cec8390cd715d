from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.prefix.policies cimport EvictionPolicy
from pagepool.prefix.radix_tree cimport NodeList


cdef enum:
    KINDS = 8
    AGES = 64


cdef class ReuseAges:
    # Of each kind, by the age at which it happened: counts that fade, so that recent traffic weighs most.
    cdef double used[8][64]  # KINDS, AGES: looked up again
    cdef double gone[8][64]  # forgotten
    cdef double alive[8][64]  # not yet either: counted before each c_learn, which clears it
    cdef double first[65]  # age of a class, and of one more
    cdef double value[8][64]  # hits to be had, for each unit of time that a block of that kind and age is kept

    cdef void c_clear(self) noexcept
    # From the counts to the values; nothing is older than `clock`.
    cdef void c_learn(self, int64_t clock) noexcept
    cdef void c_learn_kind(self, int kind, int last, const double *used, const double *ended, double weight) noexcept


# The nodes of one kind that one request used.
cdef struct Group:
    int64_t time  # when its nodes were used
    NodeList nodes  # from the head of the prefix to its tail
    int32_t members  # nodes that were used then and not since: in `nodes`, waiting, aside and ghosts
    int32_t previous  # in its cell
    int32_t next  # in its cell, or of those without members
    int32_t older  # of all groups with members
    int32_t newer
    uint8_t kind
    uint8_t age  # the class whose cell it is in
    uint8_t in_lru  # LRU would have its nodes


# What LRU would have found, and whether to do as it does for a while.
#
# Which blocks LRU would have is known without a second cache: those used last, as many as there can be. With groups in
# the order of their times it has the newest ones, and the oldest of them that does not fit whole has lost the head of a
# prefix, so that nothing of it would be found. A group is in or out, and the count of hits is LRU's own to the block.
#
# To follow LRU means to evict the longest unused group: from the tail, so that never less is found than by LRU. That is
# done at first, when nothing is learnt; where LRU misses less than 3 % of what it finds, so that little can be won;
# and, for a while, after learning has cost more than a tenth of the cache and a quarter of what it had won before.
cdef struct ShadowLru:
    # size = the sum of the members of the groups from `oldest` to `newest`, all `in_lru`; at most the capacity
    int64_t size
    int32_t oldest  # or -1
    int32_t newest  # of all groups, or -1
    int64_t lead  # blocks used that were here and LRU would not have, less those that it would have and were not here
    int64_t base  # the lead when we last stopped following LRU
    int64_t most  # the highest since
    int64_t pause  # how long LRU is followed after a loss: twice as long after each without a gain
    int64_t resume  # when that ends
    # Of uses, fading as those of ReuseAges do: in LRU; known and not in LRU; and nodes forgotten.
    double hits
    double misses
    double forgotten
    bint losing
    bint idle  # too little to be won
    bint followed


cdef class GittinsPolicy(EvictionPolicy):
    # node.list is the number of the node's group:
    #   members = the cached nodes and ghosts whose group it is; one without members is in the list `unused`
    #   a group with nodes is in the cell of its kind and of an age class that it had, its own or a lower one
    #   a cached node that is not aside is in its group's nodes, or in the list WAITING with its flag set
    #   cached_children = the children of a node that have a block
    cdef Group *groups
    cdef int64_t room
    cdef int32_t num_made
    cdef int32_t num_live
    cdef int32_t unused
    cdef int32_t cells[8][64][2]  # first and last group of a kind and age class, or -1
    cdef unsigned long long filled[8]  # bit a of a kind: its cell of age class a is not empty
    cdef int32_t open[8]  # the groups of the request that is going on, or -1
    cdef int64_t clock  # nodes used so far
    cdef int32_t last  # the node used last, or -1
    cdef bint continued  # whether that request goes on where a cached prefix ends
    cdef ReuseAges ages
    cdef ShadowLru shadow
    cdef int64_t next_lesson
    cdef int64_t max_ghosts
    cdef int32_t victims  # the group that blocks are being taken from, or -1
    cdef int32_t budget  # blocks to take from it before all groups are looked at again
    cdef int32_t chosen  # the group that looking at all groups found last; valid while nothing was used, and no cell
    cdef bint settled  # has changed: those of a group that leaves its cell, the first of it, and comes back as the
    cdef int32_t left  # first at once have not. `left` is that group meanwhile, or -1

    # A node that is not cached, among the members of its group.
    cdef void c_arrive(self, int32_t node) noexcept
    # Time passes by a node used; one whose parent was not used just before begins a request.
    cdef void c_tick(self, int32_t node) noexcept
    cdef void c_learn(self) noexcept
    # The node was used again, and was cached or not: counts the age of its group, and one use more.
    cdef void c_used(self, int32_t node, bint cached) noexcept
    cdef void c_into_ghosts(self, int32_t node) noexcept
    cdef int32_t c_choose(self) noexcept
    # Among the members of the group of their kind of the request that is going on; no member of its group any more, of
    # whose nodes it is none.
    cdef void c_place(self, int32_t node) noexcept
    cdef void c_leave(self, int32_t node) noexcept
    cdef void c_into_cell(self, int32_t number, int age) noexcept
    cdef void c_out_of_cell(self, int32_t number) noexcept
    # Whether LRU is followed in the request that begins.
    cdef bint c_follows_lru(self) noexcept
