from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.prefix.policies cimport EvictionPolicy
from pagepool.prefix.radix_tree cimport NodeList


cdef enum:
    KINDS = 8
    AGES = 64

cdef extern from *:
    """
    #include <stdint.h>
    /* Of what was counted, each time that values are learnt. */
    #define PP_FADE 0.97
    static inline int pp_age_class(int64_t age)
    {
        int octave;
        if (age < 2) return 0;
        octave = 63 - __builtin_clzll((unsigned long long)age);
        octave = 2 * octave + (int)((age >> (octave - 1)) & 1) - 1;
        return octave < 64 ? octave : 63;
    }
    static inline double pp_first_age(int age_class)
    {
        int octave = (age_class + 1) / 2;
        double first = (double)((uint64_t)1 << octave);
        return (age_class + 1) % 2 && octave > 0 ? first * 1.5 : first;
    }
    """
    double FADE "PP_FADE"
    # The class of an age, two to each doubling: 0 for 1, then 2, 3, 4-5, 6-7, 8-11, 12-15, ...
    int age_class "pp_age_class"(int64_t age) noexcept nogil
    # The first age of a class.
    double first_age "pp_first_age"(int age_class) noexcept nogil


# count + 1 + ... + 1, each sum rounded as when they come one at a time: what is decided must not depend on that.
cdef inline double add_ones(double count, int64_t n) noexcept nogil:
    for _ in range(n):
        count += 1.0
    return count


cdef class ReuseAges:
    # Of each kind, by the age at which it happened: counts that fade, so that the recent past has the say.
    cdef double used[8][64]  # KINDS, AGES: looked up again
    cdef double gone[8][64]  # forgotten
    cdef double alive[8][64]  # not yet either: counted before each c_learn, which clears it
    cdef double first[65]  # age of a class, and of one more
    cdef double value[8][64]  # hits to be had, for each unit of time that a block of that kind and age is kept

    cdef void c_clear(self) noexcept
    # n blocks of a kind were looked up again one after the other, the first at that age.
    cdef void c_count_used(self, int kind, int64_t age, int64_t n) noexcept
    # From the counts to the values; nothing is older than `clock`.
    cdef void c_learn(self, int64_t clock) noexcept
    cdef void c_learn_kind(self, int kind, int last, const double *used, const double *ended, double weight) noexcept


# A group of nodes that one request used.
cdef struct Group:
    int64_t time  # when its nodes were used
    NodeList nodes  # from the head of the prefix to its tail
    int32_t members  # nodes that were used then and not since: in `nodes`, waiting, held and ghosts
    int32_t previous  # in its cell
    int32_t next  # in its cell, or of those without members
    int32_t older  # of all groups with members
    int32_t newer
    uint8_t kind
    uint8_t age  # the class whose cell it is in
    uint8_t in_lru  # LRU would have its nodes


# The groups that have nodes, in rows by kind and age class.
cdef struct Cells:
    int32_t ends[8][64][2]  # first and last group of a kind and age class, or -1
    unsigned long long filled[8]  # bit a of a kind: its cell of age class a is not empty
    # A number of its own for each state of the cells: the first of a row that leaves, and comes back as the first
    # before any other comes or goes, has changed nothing.
    unsigned long long stamp
    unsigned long long last_stamp  # the largest so far
    unsigned long long before_take  # the stamp when `taken` left
    int32_t taken  # the group that was the last to come or go, if it left, and was the first of its row; or -1


# `ends`: the first and the last group of a row, or -1. The longest unused group of a row is its first: one that comes
# back, since a node waited for others, may be older than all that are there.
cdef inline void row_put(int32_t *ends, Group *groups, int32_t number) noexcept nogil:
    cdef int32_t first = ends[0], last = ends[1]
    if first >= 0 and groups[number].time < groups[first].time:
        groups[number].previous = -1
        groups[number].next = first
        groups[first].previous = ends[0] = number
        return
    groups[number].previous = last
    groups[number].next = -1
    if last < 0:
        ends[0] = number
    else:
        groups[last].next = number
    ends[1] = number


cdef inline void row_take(int32_t *ends, Group *groups, int32_t number) noexcept nogil:
    cdef int32_t before = groups[number].previous, after = groups[number].next
    if before < 0:
        ends[0] = after
    else:
        groups[before].next = after
    if after < 0:
        ends[1] = before
    else:
        groups[after].previous = before


cdef inline void cells_clear(Cells *self) noexcept nogil:
    cdef int kind, age
    self.stamp = self.last_stamp = self.before_take = 0
    self.taken = -1
    for kind in range(8):
        self.filled[kind] = 0
        for age in range(64):
            self.ends[kind][age][0] = self.ends[kind][age][1] = -1


cdef inline void cells_put(Cells *self, Group *groups, int32_t number, int age) noexcept nogil:
    cdef int kind = groups[number].kind
    cdef bint is_back = self.taken == number and groups[number].age == age
    groups[number].age = <uint8_t>age
    row_put(&self.ends[kind][age][0], groups, number)
    self.filled[kind] |= 1ull << age
    if is_back and self.ends[kind][age][0] == number:
        self.stamp = self.before_take
    else:
        self.last_stamp += 1
        self.stamp = self.last_stamp
    self.taken = -1


cdef inline void cells_take(Cells *self, Group *groups, int32_t number) noexcept nogil:
    cdef int kind = groups[number].kind, age = groups[number].age
    self.before_take = self.stamp
    self.taken = number if self.ends[kind][age][0] == number else -1
    self.last_stamp += 1
    self.stamp = self.last_stamp
    row_take(&self.ends[kind][age][0], groups, number)
    if self.ends[kind][age][0] < 0:
        self.filled[kind] &= ~(1ull << age)


# LRU beside the policy `gittins`: what it would have found, counted, and whether to do as it does for a while.
#
# Which blocks LRU would have is known without a second cache: those used last, as many as there can be. With groups in
# the order of their times it has the newest ones, and the oldest of them that does not fit whole has lost the head of a
# prefix, so that nothing of it would be found. A group is in or out, and the count of hits is LRU's own to the block.
#
# To follow LRU means to evict the longest unused group: from the tail, so that never less is found than by LRU. That is
# done at first, when nothing is learnt; where LRU misses less than 3 % of what it finds, so that little can be won;
# and, for a while, after learning has cost more than a tenth of the cache and a quarter of what it had won before.
cdef struct LruRival:
    # size = the sum of the members of the groups from `oldest` to `newest`, all `in_lru`; at most the capacity
    int64_t capacity
    int64_t size
    int32_t oldest  # or -1
    int32_t newest  # of all groups, or -1
    int64_t lead  # blocks used that were here and LRU would not have, less those that it would have and were not here
    int64_t base  # the lead when we last began to go our own way
    int64_t most  # the highest since
    int64_t pause  # how long LRU is followed after a loss: twice as long after each without a gain
    int64_t resume  # when that ends
    # Of uses, fading as those of ReuseAges do: in LRU; known and not in LRU; and nodes forgotten.
    double hits
    double misses
    double forgotten
    uint8_t losing
    uint8_t idle  # too little to be won
    uint8_t followed


cdef inline void rival_clear(LruRival *self, int64_t capacity) noexcept nogil:
    self.capacity = capacity
    self.size = self.lead = self.base = self.most = self.pause = self.resume = 0
    self.oldest = self.newest = -1
    self.hits = self.misses = self.forgotten = 0.0
    self.losing = self.idle = 0
    self.followed = 1


# A group without members begins to have some.
cdef inline void rival_open(LruRival *self, Group *groups, int32_t number) noexcept nogil:
    groups[number].older = self.newest
    groups[number].newer = -1
    groups[number].in_lru = 1
    if self.newest >= 0:
        groups[self.newest].newer = number
    self.newest = number
    if self.oldest < 0:
        self.oldest = number


# It has n members more: O(1) amortised.
cdef inline void rival_add(LruRival *self, Group *groups, int32_t number, int32_t n) noexcept nogil:
    cdef int32_t out
    self.size += n * groups[number].in_lru
    while self.size > self.capacity:
        out = self.oldest
        groups[out].in_lru = 0
        self.size -= groups[out].members
        self.oldest = groups[out].newer


# It has no members any more.
cdef inline void rival_close(LruRival *self, Group *groups, int32_t number) noexcept nogil:
    cdef int32_t older = groups[number].older, newer = groups[number].newer
    if older >= 0:
        groups[older].newer = newer
    if newer >= 0:
        groups[newer].older = older
    else:
        self.newest = older
    if self.oldest == number:
        self.oldest = newer


# n nodes of the group were used, which were here or not; most often LRU would have them, and they are here.
cdef inline void rival_count(LruRival *self, const Group *group, int32_t n, bint here) noexcept nogil:
    if group.in_lru:
        self.hits = add_ones(self.hits, n)
        if not here:
            self.lead -= n
    else:
        self.misses = add_ones(self.misses, n)
        self.lead += n * here


# Of what is forgotten, a tenth is taken to come back unseen.
cdef inline void rival_learn(LruRival *self, double fade) noexcept nogil:
    self.idle = self.misses + 0.1 * self.forgotten < 0.03 * self.hits
    self.hits *= fade
    self.misses *= fade
    self.forgotten *= fade


# Whether LRU is followed in the request that begins.
cdef inline bint rival_follows(LruRival *self, int64_t clock) noexcept nogil:
    cdef int64_t allowed
    if clock < 2 * self.capacity:
        self.base = self.most = self.lead
        return True
    if self.losing:
        if clock >= self.resume:
            self.losing = 0
            self.base = self.most = self.lead
    elif not self.idle:
        self.most = max(self.most, self.lead)
        allowed = self.capacity // 10 + (self.most - self.base) // 4
        if self.most - self.lead > allowed:
            self.losing = 1
            self.pause = 4 * self.capacity if self.pause == 0 or self.most - self.base > allowed else 2 * self.pause
            self.resume = clock + self.pause
    return self.losing or self.idle


# Once a request: whether it goes another way than the one before.
cdef inline bint rival_turns(LruRival *self, int64_t clock) noexcept nogil:
    cdef uint8_t before = self.followed
    self.followed = rival_follows(self, clock)
    return self.followed != before


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


cdef class GittinsPolicy(GroupedPolicy):
    cdef ReuseAges ages
    cdef int32_t last  # the node used last, or -1
    cdef bint continued  # whether that request goes on where a cached prefix ends
    cdef int64_t next_lesson
    cdef int64_t max_ghosts
    cdef int32_t budget  # blocks to take from `victims` before all groups are looked at again
    cdef int32_t chosen  # when that was done last
    # The clock and the stamp of the cells then: they alone decide, beside the values and whom the rival follows, which
    # change with the clock.
    cdef int64_t chosen_at
    cdef unsigned long long chosen_of

    cdef void c_arrive(self, int32_t node) noexcept
    cdef void c_into_ghosts(self, int32_t node) noexcept
    cdef void c_forget_ghosts(self) noexcept
    cdef void c_tick(self, int32_t node) noexcept
    cdef void c_learn(self) noexcept
    # Of n nodes with ids in a row, of one group and as many uses, each the parent of the next; the one before them is
    # the parent of the first, and was inserted just now.
    cdef void c_insert_alike(self, int32_t first, int32_t n) noexcept
    cdef void c_used(self, int32_t first, int32_t n, bint here) noexcept
    # Whether looking at all groups now would lead to `chosen` again.
    cdef bint c_is_fresh(self) noexcept
    cdef int32_t c_choose(self) noexcept
