"""The policy `gittins`: it keeps the blocks of the highest value. It learns the value of each kind and age of block.

A cache of prefixes knows more than when each block was used. Blocks that one request used come back together or not at
all. A block is useful only while its parent is cached. The number of uses, and whether a prefix continued a cached one,
distinguish a conversation from a single request. So the blocks of one request and one kind form a group with one time
of use. `ReuseAges` learns for each kind, from look-ups and ghosts, at what ages blocks come back, and computes the
value of every age. An old block can have a higher value than a new one, for example in a loop that is longer than the
cache, or a lower value. The group of the lowest value loses its blocks, the tail first. A block is never evicted before
its cached children.

If no block of a kind and age ever came back, the youngest group is evicted. The groups that stay show whether blocks
come back later, up to an age of 64 times the capacity. The learnt values decide only if the difference is clear: the
longest unused group is evicted unless its value is 1.25 times the lowest. And they decide only while they find no less
than LRU, which `ShadowLru` checks. The groups and the use of the tree are new; the value is known (see `ReuseAges`),
and so are ghosts (ARC).
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.prefix.policies cimport LruPolicy
from pagepool.prefix.radix_tree cimport Node, NodeList, NodeTable, list_clear, list_is_sound, list_push, list_remove

__all__ = ["GittinsPolicy", "ReuseAges"]

cdef enum:
    KINDS = 8
    AGES = 64

cdef enum:
    COUNT = 7  # bits of node.uses: the number of uses, counted up to MOST_USES
    CONTINUED = 8  # bit: the node was made behind a cached prefix
    WAITS = 16  # bit: the node is in `waiting`
    MOST_USES = 4
    BUDGET = 16
    LESSON = 2000  # the minimum number of uses between two calls of c_learn
    DOUBLINGS = 6  # unknown values: blocks are kept up to an age of 2^6 times the capacity, to learn

cdef double CLEAR = 1.25  # the longest unused group stays if its value is above CLEAR times the lowest value
cdef double NO_VALUE = 1e-4  # a value counts as 0 below this number of hits per block in `capacity` uses
cdef double SHARED = 100.0  # the mean of all kinds counts as this number of blocks, in addition to a kind's own counts
cdef double FADE = 0.97  # factor for all counts after each call of c_learn

cdef extern from *:
    """
    #include <stdint.h>
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
    # The class of an age, two to each doubling: 0 for 1, then 2, 3, 4-5, 6-7, 8-11, 12-15, ...
    int age_class "pp_age_class"(int64_t age) noexcept nogil
    # The first age of a class.
    double first_age "pp_first_age"(int age_class) noexcept nogil
    int lowest_bit "__builtin_ctzll"(unsigned long long bits) noexcept nogil


# The nodes of one kind that one request used.
cdef struct Group:
    int64_t time  # when its nodes were used
    NodeList nodes  # from the head of the prefix to its tail
    int32_t members  # nodes without a later use: in `nodes`, waiting, aside and ghosts
    int32_t previous  # in its cell
    int32_t next  # in its cell, or in the list `unused`
    int32_t older  # in the list of all groups with members
    int32_t newer
    uint8_t kind
    uint8_t age  # the age class of its cell
    uint8_t in_lru  # LRU would have its nodes


# Computes what LRU would have found, and decides whether to follow LRU for a while.
#
# LRU needs no second cache for this: it would have the most recently used blocks, up to the capacity. These are the
# newest groups. If the oldest of them does not fit completely, LRU has lost the head of its prefix and would find none
# of its blocks. So LRU has all blocks of a group or none, and the number of hits is exact.
#
# Following LRU means to evict the longest unused group, tail first. Then at least as many blocks are found as by LRU.
# LRU is followed in three cases: while nothing has been learnt; if LRU's misses are below 3 % of its hits, because
# little can be gained; and for a while after the policy has lost more than a tenth of the cache and a quarter of its
# earlier gain.
cdef struct ShadowLru:
    # size = the sum of the members of the groups from `oldest` to `newest`, all `in_lru`; at most the capacity
    int64_t size
    int32_t oldest  # or -1
    int32_t newest  # of all groups, or -1
    int64_t lead  # hits of this cache that LRU would not have, minus hits of LRU that this cache did not have
    int64_t base  # the lead when the last pause ended
    int64_t most  # the highest lead since then
    int64_t pause  # how long LRU is followed after a loss; doubles after each loss without a gain before it
    int64_t resume  # when the pause ends
    # Counts that fade as the counts of ReuseAges do.
    double hits  # uses of nodes that LRU would have
    double misses  # uses of nodes that are known, but that LRU would not have
    double forgotten  # nodes that were forgotten
    bint losing
    bint idle  # little can be gained
    bint followed


@cython.final
@cython.auto_pickle(False)
cdef class ReuseAges:
    """Learns at what ages blocks are looked up again, and the value of keeping a block of an age. Internal.

    The value of keeping a block is its Gittins index (Gittins, Bandit processes and dynamic allocation indices, 1979).
    For a waiting time T, divide the probability of a lookup within T by the expected time until the lookup or until T
    has passed. The index is the maximum of these ratios over T. With hits H and time C summed over the ages, it is the
    steepest line from a point (C, H) to a later one: one pass over their upper convex hull. Eviction by hit density is
    from LHD (Beckmann, Chen and Cidon, NSDI'18).

    Counts are small at the ages that matter, and blocks of one request come back together. In most loads the rate of
    reuse falls about as 1 / age. So the rate times the age is averaged over a class and its two neighbours.
    """

    # Counts by kind and age class (KINDS, AGES). They fade, so that recent traffic counts most.
    cdef double used[8][64]  # blocks looked up again at this age
    cdef double gone[8][64]  # blocks forgotten at this age
    cdef double alive[8][64]  # blocks of this age; counted before each c_learn, which clears it
    cdef double value[8][64]  # expected hits per unit of time for which a block of this kind and age is kept

    def __cinit__(self):
        self.c_clear()

    cdef void c_clear(self) noexcept:
        """Starts without knowledge: the most recently used block has the highest value."""
        cdef int kind, age
        for kind in range(KINDS):
            for age in range(AGES):
                self.used[kind][age] = self.gone[kind][age] = self.alive[kind][age] = 0.0
                self.value[kind][age] = 1.0 / first_age(age)

    cdef void c_learn(self) noexcept:
        """O(kinds * age classes)."""
        cdef double used[64]
        cdef double ended[64]
        cdef double total = 0.0
        cdef int kind, age
        for age in range(AGES):
            used[age] = ended[age] = 0.0
            for kind in range(KINDS):
                used[age] += self.used[kind][age]
                ended[age] += self.gone[kind][age] + self.alive[kind][age]
            total += used[age] + ended[age]
        for kind in range(KINDS):
            self.c_learn_kind(kind, used, ended, SHARED / max(total, 1.0))
            for age in range(AGES):
                self.used[kind][age] *= FADE
                self.gone[kind][age] *= FADE
                self.alive[kind][age] = 0.0

    cdef void c_learn_kind(self, int kind, const double *used, const double *ended, double weight) noexcept:
        """`hull` has the later points at which a steepest line can end."""
        cdef double reused[66]  # the entry of an age is at index age + 1, so that each has two neighbours
        cdef double waited[66]
        cdef double hits[65]  # summed from the end, so hits and times are negative; only differences matter
        cdef double time[65]
        cdef int hull[65]
        cdef double left = 0.0, own_used, own_ended, width, rate
        cdef int age, top = 0
        reused[0] = waited[0] = reused[AGES + 1] = waited[AGES + 1] = 0.0
        for age in range(AGES - 1, -1, -1):
            own_used = self.used[kind][age] + weight * used[age]
            own_ended = self.gone[kind][age] + self.alive[kind][age] + weight * ended[age]
            width = first_age(age + 1) - first_age(age)
            reused[age + 1] = own_used * first_age(age + 1)
            waited[age + 1] = left * width + (own_used + own_ended) * width * 0.5
            left += own_used + own_ended
        hits[AGES] = time[AGES] = 0.0
        hull[0] = AGES
        for age in range(AGES - 1, -1, -1):
            rate = waited[age] + 2.0 * waited[age + 1] + waited[age + 2]
            if rate > 0.0:
                rate = (reused[age] + 2.0 * reused[age + 1] + reused[age + 2]) / (rate * first_age(age + 1))
            hits[age] = hits[age + 1] - rate * waited[age + 1]
            time[age] = time[age + 1] - waited[age + 1]
            while top > 0 and slope(hits, time, age, hull[top]) <= slope(hits, time, hull[top], hull[top - 1]):
                top -= 1
            self.value[kind][age] = slope(hits, time, age, hull[top])
            top += 1
            hull[top] = age


cdef inline double slope(const double *hits, const double *time, int first, int last) noexcept:
    cdef double waited = time[last] - time[first]
    return (hits[last] - hits[first]) / waited if waited > 0.0 else 0.0


@cython.final
@cython.auto_pickle(False)
cdef class GittinsPolicy(LruPolicy):
    """Evicts the least valuable kind and age first; remembers four times as many ghosts as there can be blocks."""

    # node.list is the number of the node's group:
    #   members = number of cached nodes and ghosts of the group; a group without members is in the list `unused`
    #   a group with nodes is in the cell of its kind and of its age class, or of a lower one that it had before
    #   a cached node that is not aside is in its group's nodes, or in the list `waiting` with its flag set
    #   cached_children = number of children of a node with a block
    cdef NodeList ghosts
    cdef NodeList waiting  # cached nodes that were to be evicted but had cached children
    cdef Group *groups
    cdef int64_t room
    cdef int32_t num_made
    cdef int32_t num_live
    cdef int32_t unused
    cdef int32_t cells[8][64][2]  # first and last group of a kind and age class, or -1
    cdef unsigned long long filled[8]  # for each kind, bit a: the cell of age class a is not empty
    cdef int32_t open[8]  # the groups of the current request, or -1
    cdef int64_t clock  # nodes used so far
    cdef int32_t last  # the node used last, or -1
    cdef bint continued  # whether the current request continues a cached prefix
    cdef ReuseAges ages
    cdef ShadowLru shadow
    cdef int64_t next_lesson
    cdef int64_t max_ghosts
    cdef int32_t victims  # the group from which blocks are evicted, or -1
    cdef int32_t budget  # blocks to evict from it before all groups are looked at again

    def __cinit__(self, NodeTable tree not None, int64_t capacity):
        self.ages = ReuseAges()
        self.max_ghosts = 4 * capacity
        self.c_clear()

    def __dealloc__(self):
        PyMem_Free(self.groups)

    cdef int c_reserve(self, int64_t n) except -1:
        cdef int64_t room = max(64, self.room)
        cdef void *memory
        while room < self.num_live + n:
            room *= 2
        if room > self.room:
            memory = PyMem_Realloc(self.groups, room * sizeof(Group))
            if memory == NULL:
                raise MemoryError(f"no memory for {room} groups of prefix nodes")
            self.groups = <Group *>memory
            self.room = room
        return 0

    cdef void c_clear(self) noexcept:
        cdef int kind, age
        list_clear(&self.ghosts)
        list_clear(&self.waiting)
        PyMem_Free(self.groups)
        self.groups = NULL
        self.room = self.num_made = self.num_live = 0
        self.unused = self.victims = self.last = -1
        self.clock = 0
        self.continued = False
        self.next_lesson = LESSON
        self.ages.c_clear()
        self.shadow = ShadowLru(0, -1, -1, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, False, False, True)
        for kind in range(KINDS):
            self.open[kind] = -1
            self.filled[kind] = 0
            for age in range(AGES):
                self.cells[kind][age][0] = self.cells[kind][age][1] = -1

    # The interface of policies.

    cdef void c_insert(self, int32_t node) noexcept:
        self.c_arrive(node)
        self.tree.nodes[self.tree.nodes[node].parent].cached_children += 1
        self.c_link(node)

    cdef bint c_refuses(self, int32_t node) noexcept:
        """True if the parent is not cached or would be evicted for this node. Its value is then below that of all
        cached blocks."""
        cdef Node *nodes = self.tree.nodes
        cdef int32_t parent = nodes[node].parent
        if nodes[parent].parent < 0 or (nodes[parent].block >= 0 and self.c_victim() != parent):
            return False
        self.c_arrive(node)
        self.c_into_ghosts(node)
        return True

    cdef void c_touch(self, int32_t node) noexcept:
        self.c_tick(node)
        self.continued = True
        self.c_unlink(node)
        self.c_used(node, True)
        self.c_place(node)
        self.c_link(node)

    cdef int32_t c_victim(self) noexcept:
        """O(1) amortised: a node enters `waiting` at most once after each time that it was linked."""
        cdef int32_t node
        while True:
            if self.victims < 0 or self.budget <= 0:
                self.victims = self.c_choose()
                self.budget = BUDGET
                if self.victims < 0:
                    return self.waiting.head  # all their cached children are in use
            node = self.groups[self.victims].nodes.tail
            if self.tree.nodes[node].cached_children == 0:
                return node
            self.c_unlink(node)
            self.tree.nodes[node].uses |= WAITS
            list_push(&self.waiting, self.tree.nodes, node)

    cdef void c_evicted(self, int32_t node) noexcept:
        cdef Node *nodes = self.tree.nodes
        cdef int32_t parent = nodes[node].parent
        self.budget -= 1
        self.c_unlink(node)
        nodes[parent].cached_children -= 1
        if nodes[parent].cached_children == 0 and nodes[parent].uses & WAITS:
            self.c_unlink(parent)
            self.c_link(parent)
        if self.last == node:
            self.last = -1
        self.c_into_ghosts(node)

    cdef void c_unlink(self, int32_t node) noexcept:
        cdef Node *nodes = self.tree.nodes
        cdef int32_t number = nodes[node].list
        if nodes[node].uses & WAITS:
            nodes[node].uses ^= WAITS
            list_remove(&self.waiting, nodes, node)
            return
        list_remove(&self.groups[number].nodes, nodes, node)
        if self.groups[number].nodes.size == 0:
            self.c_out_of_cell(number)
            if self.victims == number:
                self.victims = -1

    cdef void c_link(self, int32_t node) noexcept:
        cdef int32_t number = self.tree.nodes[node].list
        cdef Group *group = &self.groups[number]
        if group.nodes.size == 0:
            self.c_into_cell(number, age_class(self.clock - group.time))
        list_push(&group.nodes, self.tree.nodes, node)

    # Uses, ghosts and time.

    cdef void c_arrive(self, int32_t node) noexcept:
        """Makes a node that is not cached a member of its group."""
        cdef Node *nodes = self.tree.nodes
        cdef int32_t parent = nodes[node].parent
        if parent != self.last:
            self.continued = nodes[parent].block >= 0
        self.c_tick(node)
        if nodes[node].ghost:
            nodes[node].ghost = 0
            list_remove(&self.ghosts, nodes, node)
            self.c_used(node, False)
        else:
            nodes[node].uses = CONTINUED if self.continued else 0
        self.c_place(node)

    cdef void c_into_ghosts(self, int32_t node) noexcept:
        """Makes the node a ghost. If there are too many ghosts, the oldest is forgotten."""
        cdef Node *nodes = self.tree.nodes
        cdef Group *group
        cdef int32_t ghost
        nodes[node].ghost = 1
        list_push(&self.ghosts, nodes, node)
        if self.ghosts.size > self.max_ghosts:
            ghost = self.ghosts.head
            group = &self.groups[nodes[ghost].list]
            self.ages.gone[group.kind][age_class(self.clock - group.time)] += 1.0
            self.shadow.forgotten += 1.0
            self.c_leave(ghost)
            list_remove(&self.ghosts, nodes, ghost)
            nodes[ghost].ghost = 0
            self.tree.c_collect(ghost)

    cdef void c_used(self, int32_t node, bint cached) noexcept:
        """Records another use of a node, cached or not: counts the age of its group and one more use of the node."""
        cdef Group *group = &self.groups[self.tree.nodes[node].list]
        self.ages.used[group.kind][age_class(self.clock - group.time)] += 1.0
        if group.in_lru:
            self.shadow.hits += 1.0
            self.shadow.lead -= not cached
        else:
            self.shadow.misses += 1.0
            self.shadow.lead += cached
        if (self.tree.nodes[node].uses & COUNT) < MOST_USES:
            self.tree.nodes[node].uses += 1
        self.c_leave(node)

    cdef void c_tick(self, int32_t node) noexcept:
        """Counts one use. A new request begins if the parent of the node was not the node used just before."""
        cdef bint followed
        cdef int kind
        self.clock += 1
        if self.clock >= self.next_lesson:
            self.c_learn()
        if self.tree.nodes[node].parent != self.last:
            for kind in range(KINDS):
                self.open[kind] = -1
            followed = self.shadow.followed
            self.shadow.followed = self.c_follows_lru()
            if self.shadow.followed != followed:
                self.victims = -1
        self.last = node

    cdef void c_learn(self) noexcept:
        """O(number of groups), and called at most once in that many uses."""
        cdef Group *group
        cdef int32_t i
        for i in range(self.num_made):
            group = &self.groups[i]
            if group.members:
                self.ages.alive[group.kind][age_class(self.clock - group.time)] += group.members
        self.ages.c_learn()
        # Assumes that a tenth of the forgotten nodes come back unseen.
        self.shadow.idle = self.shadow.misses + 0.1 * self.shadow.forgotten < 0.03 * self.shadow.hits
        self.shadow.hits *= FADE
        self.shadow.misses *= FADE
        self.shadow.forgotten *= FADE
        self.next_lesson = self.clock + max(<int64_t>LESSON, self.capacity // 8, <int64_t>self.num_made // 4)

    # Groups and cells.

    cdef void c_place(self, int32_t node) noexcept:
        """Makes the node a member of the group of its kind and the current request."""
        cdef uint8_t uses = self.tree.nodes[node].uses
        cdef int count = uses & COUNT
        cdef int kind = 2 * (count - (count > 2)) + ((uses & CONTINUED) != 0)
        cdef int32_t number = self.open[kind]
        cdef Group *group
        if number < 0:
            number = self.unused
            if number >= 0:
                self.unused = self.groups[number].next
            else:
                number = self.num_made
                self.num_made += 1
            self.num_live += 1
            self.open[kind] = number
            group = &self.groups[number]
            group.time = self.clock
            group.kind = <uint8_t>kind
            group.members = 0
            list_clear(&group.nodes)
            group.in_lru = 1
            group.older = self.shadow.newest
            group.newer = -1
            if group.older >= 0:
                self.groups[group.older].newer = number
            self.shadow.newest = number
            if self.shadow.oldest < 0:
                self.shadow.oldest = number
        self.tree.nodes[node].list = number
        group = &self.groups[number]
        group.members += 1
        self.shadow.size += group.in_lru
        while self.shadow.size > self.capacity:
            group = &self.groups[self.shadow.oldest]
            group.in_lru = 0
            self.shadow.size -= group.members
            self.shadow.oldest = group.newer

    cdef void c_leave(self, int32_t node) noexcept:
        """Removes the node, which is not in the list of its group, from the group."""
        cdef int32_t number = self.tree.nodes[node].list
        cdef Group *group = &self.groups[number]
        group.members -= 1
        self.shadow.size -= group.in_lru
        if group.members:
            return
        if group.older >= 0:
            self.groups[group.older].newer = group.newer
        if group.newer >= 0:
            self.groups[group.newer].older = group.older
        else:
            self.shadow.newest = group.older
        if self.shadow.oldest == number:
            self.shadow.oldest = group.newer
        if self.open[group.kind] == number:
            self.open[group.kind] = -1
        group.next = self.unused
        self.unused = number
        self.num_live -= 1

    cdef void c_into_cell(self, int32_t number, int age) noexcept:
        """The first group of a cell is the longest unused one. A group that comes back, because a node has waited for
        its children, can be older than all groups in the cell."""
        cdef Group *group = &self.groups[number]
        cdef int32_t *ends = &self.cells[group.kind][age][0]
        group.age = <uint8_t>age
        self.filled[group.kind] |= 1ull << age
        if ends[0] >= 0 and group.time < self.groups[ends[0]].time:
            group.previous = -1
            group.next = ends[0]
            self.groups[ends[0]].previous = number
            ends[0] = number
            return
        group.previous = ends[1]
        group.next = -1
        if ends[1] < 0:
            ends[0] = number
        else:
            self.groups[ends[1]].next = number
        ends[1] = number

    cdef void c_out_of_cell(self, int32_t number) noexcept:
        cdef Group *group = &self.groups[number]
        cdef int32_t *ends = &self.cells[group.kind][group.age][0]
        if group.previous < 0:
            ends[0] = group.next
        else:
            self.groups[group.previous].next = group.next
        if group.next < 0:
            ends[1] = group.previous
        else:
            self.groups[group.next].previous = group.previous
        if ends[0] < 0:
            self.filled[group.kind] &= ~(1ull << group.age)

    cdef int32_t c_choose(self) noexcept:
        """Moves all groups to the cells of their ages. Returns the longest unused group of the cell of the lowest
        value, or of all cells, or -1."""
        cdef double least = 0.0, oldest_value = 0.0, value, no_value = NO_VALUE / max(<int64_t>1, self.capacity)
        cdef unsigned long long ages
        cdef int kind, age, now, last = age_class(self.capacity) + 2 * DOUBLINGS
        cdef int32_t first, best = -1, oldest = -1
        for kind in range(KINDS):
            ages = self.filled[kind]
            while ages:
                age = lowest_bit(ages)
                ages &= ages - 1
                first = self.cells[kind][age][0]
                while first >= 0:
                    now = age_class(self.clock - self.groups[first].time)
                    if now <= age:
                        break
                    self.c_out_of_cell(first)
                    self.c_into_cell(first, now)
                    ages |= 1ull << now
                    first = self.cells[kind][age][0]
                if first < 0:
                    continue
                value = self.ages.value[kind][age]
                if value < no_value:
                    value = age - AGES if age <= last else -AGES - 1
                if oldest < 0 or self.groups[first].time < self.groups[oldest].time:
                    oldest = first
                    oldest_value = value
                if best < 0 or value < least or (value == least and self.groups[first].time < self.groups[best].time):
                    best = first
                    least = value
        return oldest if self.shadow.followed or oldest_value <= CLEAR * least else best

    cdef bint c_follows_lru(self) noexcept:
        """Decides whether to follow LRU in the request that begins."""
        cdef ShadowLru *shadow = &self.shadow
        cdef int64_t allowed
        if self.clock < 2 * self.capacity:
            shadow.base = shadow.most = shadow.lead
            return True
        if shadow.losing:
            if self.clock >= shadow.resume:
                shadow.losing = False
                shadow.base = shadow.most = shadow.lead
        elif not shadow.idle:
            shadow.most = max(shadow.most, shadow.lead)
            allowed = self.capacity // 10 + (shadow.most - shadow.base) // 4
            if shadow.most - shadow.lead > allowed:
                shadow.losing = True
                if shadow.pause == 0 or shadow.most - shadow.base > allowed:
                    shadow.pause = 4 * self.capacity
                else:
                    shadow.pause *= 2
                shadow.resume = self.clock + shadow.pause
        return shadow.losing or shadow.idle

    cdef str audit(self, int32_t num_linked):
        cdef Node *nodes = self.tree.nodes
        cdef Group *group
        cdef int32_t node, number, linked = self.waiting.size, in_cells = 0, in_lru = 0, in_order = 0
        cdef int kind, age
        members, children = {}, {}
        for node in range(self.tree.num_made):
            if not nodes[node].alive or nodes[node].parent < 0 or (nodes[node].block < 0 and not nodes[node].ghost):
                continue
            members[nodes[node].list] = members.get(nodes[node].list, 0) + 1
            if nodes[node].block >= 0:
                children[nodes[node].parent] = children.get(nodes[node].parent, 0) + 1
        for node in range(self.tree.num_made):
            if nodes[node].alive and nodes[node].cached_children != children.get(node, 0):
                return f"node {node} counts {nodes[node].cached_children} cached children, not {children.get(node, 0)}"
        for kind in range(KINDS):
            for age in range(AGES):
                number = self.cells[kind][age][0]
                while number >= 0:
                    group = &self.groups[number]
                    in_cells += 1
                    linked += group.nodes.size
                    if group.kind != kind or not list_is_sound(&group.nodes, nodes) or group.nodes.size == 0:
                        return f"group {number} does not belong into the cell of kind {kind} and age class {age}"
                    number = group.next
        if not list_is_sound(&self.waiting, nodes) or not list_is_sound(&self.ghosts, nodes):
            return "a list of the policy is broken"
        number = self.shadow.newest
        while number >= 0:
            group = &self.groups[number]
            if group.members != members.get(number, 0):
                return f"group {number} counts {group.members} members, not {members.get(number, 0)}"
            if group.in_lru != (self.shadow.oldest >= 0 and group.time >= self.groups[self.shadow.oldest].time):
                return f"group {number} of time {group.time} is on the wrong side of what LRU would have"
            in_lru += group.in_lru * group.members
            in_order += 1
            number = group.older
        if in_lru != self.shadow.size or in_lru > self.capacity or in_order != self.num_live:
            return f"LRU would have {in_lru} nodes, not {self.shadow.size}, of {in_order} groups, not {self.num_live}"
        if len(members) != self.num_live or in_cells > self.num_live:
            return f"{len(members)} groups have members, {in_cells} are in cells, not {self.num_live}"
        return None if linked == num_linked else f"the policy has {linked} nodes, it should have {num_linked}"
