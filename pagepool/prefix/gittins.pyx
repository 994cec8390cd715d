"""The policy `gittins`: it keeps the blocks of the highest value. It learns the value of each kind and age of block.

A cache of prefixes knows more than when each block was used. Blocks that one request used come back together or not at
all. A block is useful only while its parent is cached. The number of uses, and whether a prefix continued a cached one,
distinguish a conversation from a single request. So the blocks of one request and one kind form a group with one time
of use. The policy learns for each kind, from look-ups and ghosts, at what ages blocks come back, and computes the value
of every age. An old block can have a higher value than a new one, for example in a loop that is longer than the cache,
or a lower value. The group of the lowest value loses its blocks, the tail first. A block is never evicted before its
cached children.

If no block of a kind and age ever came back, the youngest group is evicted. The groups that stay show whether blocks
come back later, up to an age of 64 times the capacity. The learnt values decide only if the difference is clear: the
longest unused group is evicted unless its value is 1.25 times the lowest. And they decide only while they find no less
than LRU, which `ShadowLru` checks. The groups and the use of the tree are new; the value is known (see `c_learn`), and
so are ghosts (ARC).
"""

cimport cython
from libc.math cimport INFINITY
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t
from libc.string cimport memset

from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.prefix.policies cimport LruPolicy
from pagepool.prefix.radix_tree cimport Node, NodeList, NodeTable, list_clear, list_is_sound, list_push, list_remove

__all__ = ["GittinsPolicy"]

cdef enum:
    KINDS = 8
    AGES = 64
    CELLS = 512  # one for each kind and age class

cdef enum:
    COUNT = 7  # bits of node.uses: the number of uses, counted up to MOST_USES
    CONTINUED = 8  # bit: the node was made behind a cached prefix
    WAITS = 16  # bit: the node is in `waiting`
    MOST_USES = 4
    BUDGET = 16  # evictions after which the groups are compared again
    LESSON = 2000  # the minimum number of uses between two calls of c_learn
    DOUBLINGS = 6  # unknown values: blocks are kept up to an age of 2^6 times the capacity, to learn

cdef double CLEAR = 1.25  # the longest unused group stays if its value is above CLEAR times the lowest value
cdef double NO_VALUE = 1e-4  # a value counts as 0 below this number of hits per block in `capacity` uses
cdef double SHARED = 100.0  # the mean of all kinds counts as this number of blocks, in addition to a kind's own counts
cdef double FADE = 0.97  # factor for all counts after each call of c_learn

cdef extern from *:
    int lowest_bit "__builtin_ctzll"(unsigned long long bits) noexcept nogil
    int leading_zeros "__builtin_clzll"(unsigned long long bits) noexcept nogil


cdef inline int age_class(int64_t age) noexcept nogil:
    """Two classes to each doubling: 0 for age 1, then 2, 3, 4-5, 6-7, 8-11, 12-15, ..."""
    cdef int octave = 63 - leading_zeros(age | 1)
    return min(2 * octave + <int>((age >> (octave - 1)) & 1) - 1, AGES - 1) if octave else 0


cdef inline double first_age(int number) noexcept nogil:
    """The first age of a class."""
    cdef double power = <double>(1ull << ((number + 1) // 2))
    return power if number % 2 or number == 0 else 1.5 * power


# The nodes of one kind that one request used. Groups 0 to CELLS - 1 are heads of rings, doubly linked lists that end
# where they begin: group kind * AGES + age class is the head of that cell, and group 0 also of all groups by time.
cdef struct Group:
    int64_t time  # when its nodes were used
    NodeList nodes  # from the head of the prefix to its tail
    int32_t members  # nodes without a later use: in `nodes`, waiting, set aside, and ghosts
    int32_t kind
    int32_t previous  # in its cell
    int32_t next  # in its cell, or in the list `unused`
    int32_t older  # in the list of all groups with members
    int32_t newer


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
    int64_t size  # the sum of the members of the groups from `oldest` to the newest; at most the capacity
    int32_t oldest  # the first group that LRU would have, or 0
    bint idle  # little can be gained
    bint followed
    int64_t lead  # hits of this cache that LRU would not have, minus hits of LRU that this cache did not have
    int64_t base  # the lead when the last pause ended
    int64_t most  # the highest lead since then
    int64_t pause  # how long LRU is followed after a loss; doubles after each loss without a gain before it
    int64_t resume  # when the pause ends, or 0
    # Counts that fade.
    double hits  # uses of nodes that LRU would have
    double misses  # uses of nodes that are known, but that LRU would not have
    double forgotten  # nodes that were forgotten


@cython.final
@cython.auto_pickle(False)
cdef class GittinsPolicy(LruPolicy):
    """Evicts the least valuable kind and age first; remembers four times as many ghosts as there can be blocks."""

    # node.list is the number of the node's group:
    #   members = number of cached nodes and ghosts of the group; a group without members is in the list `unused`
    #   a group with nodes is in the cell of its kind and of its age class, or of a lower one that it had before
    #   a cached node that is not set aside is in its group's nodes, or in the list `waiting` with its flag set
    #   cached_children = number of children of a node with a block
    # Numbers of groups are 0 for none.
    cdef NodeList ghosts
    cdef NodeList waiting  # cached nodes that were to be evicted but had cached children
    cdef PageBuffer memory
    cdef Group *groups
    cdef int32_t num_made
    cdef int32_t unused
    cdef unsigned long long filled[8]  # for each kind, bit a is set if the cell of age class a may have groups
    cdef int32_t open[8]  # the groups of the current request
    cdef int64_t clock  # nodes used so far
    cdef int32_t last  # the node used last, or -1
    cdef bint continued  # whether the current request continues a cached prefix
    cdef ShadowLru shadow
    # For each cell. The counts fade, so that recent traffic counts most.
    cdef double used[512]  # blocks looked up again at this age
    cdef double gone[512]  # blocks forgotten at this age
    cdef double value[512]  # expected hits per unit of time for which a block of this kind and age is kept
    cdef int64_t next_lesson
    cdef int32_t victims  # the group from which blocks are evicted
    cdef int32_t budget  # blocks to evict from it before all groups are looked at again

    def __cinit__(self, NodeTable tree not None, int64_t capacity):
        # Room for CELLS heads of rings and for the other groups. Each of these has at least one member: one of at most
        # `capacity` cached nodes, or of at most 4 * capacity + 1 ghosts.
        self.memory = PageBuffer(min(CELLS + 5 * capacity + 2, <int64_t>INT32_MAX) * sizeof(Group), "B")
        self.groups = <Group *>self.memory.base
        self.c_clear()

    cdef void c_clear(self) noexcept:
        """Without knowledge, the most recently used block has the highest value."""
        cdef int32_t cell
        list_clear(&self.ghosts)
        list_clear(&self.waiting)
        self.num_made = CELLS
        self.unused = self.victims = 0
        self.clock = 0
        self.last = -1
        self.continued = False
        self.next_lesson = LESSON
        memset(self.filled, 0, sizeof(self.filled))
        memset(self.open, 0, sizeof(self.open))
        memset(&self.shadow, 0, sizeof(self.shadow))
        self.shadow.followed = True
        memset(self.groups, 0, CELLS * sizeof(Group))
        self.groups[0].time = INT64_MAX
        for cell in range(CELLS):
            self.groups[cell].previous = self.groups[cell].next = cell
            self.used[cell] = self.gone[cell] = 0.0
            self.value[cell] = 1.0 / first_age(cell % AGES)

    # The interface of policies.

    cdef void c_insert(self, int32_t node) noexcept:
        self.c_use(node, False)
        self.tree.nodes[self.tree.nodes[node].parent].cached_children += 1
        self.c_link(node)

    cdef bint c_refuses(self, int32_t node) noexcept:
        """True if the parent is not cached or would be evicted for this node. Its value is then below that of all
        cached blocks."""
        cdef Node *nodes = self.tree.nodes
        cdef int32_t parent = nodes[node].parent
        if nodes[parent].parent < 0 or (nodes[parent].block >= 0 and self.c_victim() != parent):
            return False
        self.c_use(node, False)
        self.c_into_ghosts(node)
        return True

    cdef void c_touch(self, int32_t node) noexcept:
        self.c_unlink(node)
        self.c_use(node, True)
        self.c_link(node)

    cdef int32_t c_victim(self) noexcept:
        """O(1) amortised: a node enters `waiting` at most once after each time that it was linked."""
        cdef int32_t node
        while True:
            if self.victims == 0 or self.budget <= 0:
                self.victims = self.c_choose()
                self.budget = BUDGET
                if self.victims == 0:
                    return self.waiting.head  # only nodes in `waiting` are left, and their children are in use
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
                self.victims = 0

    cdef void c_link(self, int32_t node) noexcept:
        cdef int32_t number = self.tree.nodes[node].list
        if self.groups[number].nodes.size == 0:
            self.c_into_cell(number)
        list_push(&self.groups[number].nodes, self.tree.nodes, node)

    # Uses, ghosts and groups.

    cdef void c_use(self, int32_t node, bint cached) noexcept:
        """Counts a use of a node, and makes it a member of the group of its kind and request. A new request begins if
        the parent of the node was not the node used just before."""
        cdef Node *nodes = self.tree.nodes
        cdef int32_t parent = nodes[node].parent
        cdef bint followed = self.shadow.followed, in_lru
        cdef Group *group
        self.clock += 1
        if self.clock >= self.next_lesson:
            self.c_learn()
        if parent != self.last:
            memset(self.open, 0, sizeof(self.open))
            self.continued = nodes[parent].block >= 0
            self.shadow.followed = self.c_follows_lru()
            if self.shadow.followed != followed:
                self.victims = 0
        self.continued |= cached
        self.last = node
        if cached or nodes[node].ghost:
            group = &self.groups[nodes[node].list]
            self.used[self.c_cell(group)] += 1.0
            in_lru = self.c_in_lru(group)
            self.shadow.hits += in_lru
            self.shadow.misses += not in_lru
            self.shadow.lead += cached - in_lru
            nodes[node].uses += (nodes[node].uses & COUNT) < MOST_USES
            self.c_leave(node)
        else:
            nodes[node].uses = CONTINUED if self.continued else 0
        if nodes[node].ghost:
            nodes[node].ghost = 0
            list_remove(&self.ghosts, nodes, node)
        self.c_join(node)

    cdef void c_into_ghosts(self, int32_t node) noexcept:
        """Makes the node a ghost. If there are too many ghosts, the oldest is forgotten."""
        cdef Node *nodes = self.tree.nodes
        cdef Group *group
        cdef int32_t ghost
        nodes[node].ghost = 1
        list_push(&self.ghosts, nodes, node)
        if self.ghosts.size > 4 * self.capacity:
            ghost = self.ghosts.head
            group = &self.groups[nodes[ghost].list]
            self.gone[self.c_cell(group)] += 1.0
            self.shadow.forgotten += 1.0
            self.c_leave(ghost)
            list_remove(&self.ghosts, nodes, ghost)
            nodes[ghost].ghost = 0
            self.tree.c_collect(ghost)

    cdef void c_join(self, int32_t node) noexcept:
        """Makes the node a member of the group of its kind and the current request."""
        cdef uint8_t uses = self.tree.nodes[node].uses
        cdef int count = uses & COUNT
        cdef int kind = 2 * (count - (count > 2)) + ((uses & CONTINUED) != 0)
        cdef int32_t number = self.open[kind]
        cdef Group *groups = self.groups
        if number == 0:
            number = self.unused
            if number:
                self.unused = groups[number].next
            else:
                number = self.num_made
                self.num_made += 1
            self.open[kind] = number
            list_clear(&groups[number].nodes)
            groups[number].members = 0
            groups[number].time = self.clock
            groups[number].kind = kind
            groups[number].newer = 0
            groups[number].older = groups[0].older
            groups[groups[0].older].newer = number
            groups[0].older = number
            if self.shadow.oldest == 0:
                self.shadow.oldest = number
        self.tree.nodes[node].list = number
        groups[number].members += 1
        self.shadow.size += self.c_in_lru(&groups[number])
        while self.shadow.size > self.capacity:
            self.shadow.size -= groups[self.shadow.oldest].members
            self.shadow.oldest = groups[self.shadow.oldest].newer

    cdef void c_leave(self, int32_t node) noexcept:
        """Removes the node, which is not in the list of its group, from the group."""
        cdef int32_t number = self.tree.nodes[node].list
        cdef Group *group = &self.groups[number]
        group.members -= 1
        self.shadow.size -= self.c_in_lru(group)
        if group.members:
            return
        self.groups[group.older].newer = group.newer
        self.groups[group.newer].older = group.older
        if self.shadow.oldest == number:
            self.shadow.oldest = group.newer
        if self.open[group.kind] == number:
            self.open[group.kind] = 0
        group.next = self.unused
        self.unused = number

    cdef bint c_in_lru(self, const Group *group) noexcept:
        """True if LRU would have the nodes of the group. No group is as new as group 0."""
        return group.time >= self.groups[self.shadow.oldest].time

    # Cells and values.

    cdef int32_t c_cell(self, const Group *group) noexcept:
        """The cell of the group's kind and age class."""
        return group.kind * AGES + age_class(self.clock - group.time)

    cdef void c_into_cell(self, int32_t number) noexcept:
        """The first group of a cell is the longest unused one. A group that comes back, because a node has waited for
        its children, can be older than all groups in the cell."""
        cdef Group *groups = self.groups
        cdef int32_t cell = self.c_cell(&groups[number]), next = groups[cell].next
        if groups[number].time > groups[next].time:
            next = cell
        groups[number].next = next
        groups[number].previous = groups[next].previous
        groups[groups[next].previous].next = number
        groups[next].previous = number
        self.filled[groups[number].kind] |= 1ull << (cell % AGES)

    cdef void c_out_of_cell(self, int32_t number) noexcept:
        self.groups[self.groups[number].previous].next = self.groups[number].next
        self.groups[self.groups[number].next].previous = self.groups[number].previous

    cdef int32_t c_choose(self) noexcept:
        """Moves all groups to the cells of their ages. Returns the longest unused group of the cell of the lowest
        value, or of all cells, or 0."""
        cdef Group *groups = self.groups
        cdef double least = INFINITY, oldest_value = 0.0, value
        cdef unsigned long long ages
        cdef int kind, age
        cdef int32_t cell, first, best = 0, oldest = 0
        for kind in range(KINDS):
            ages = self.filled[kind]
            while ages:
                age = lowest_bit(ages)
                cell = kind * AGES + age
                first = groups[cell].next
                if first == cell:
                    self.filled[kind] ^= 1ull << age
                elif self.c_cell(&groups[first]) != cell:
                    self.c_out_of_cell(first)
                    self.c_into_cell(first)
                    ages |= 1ull << (self.c_cell(&groups[first]) % AGES)
                    continue
                else:
                    value = self.value[cell]
                    if groups[first].time < groups[oldest].time:
                        oldest = first
                        oldest_value = value
                    if value < least or (value == least and groups[first].time < groups[best].time):
                        best = first
                        least = value
                ages &= ages - 1
        return oldest if self.shadow.followed or oldest_value <= CLEAR * least else best

    cdef void c_learn(self) noexcept:
        """Computes the values of all kinds and ages. O(number of groups), and called at most once
        in that many uses.

        The value of keeping a block is its Gittins index (Gittins, Bandit processes and dynamic allocation indices,
        1979). For a waiting time T, divide the probability of a lookup within T by the expected time until the lookup
        or until T has passed. The index is the maximum of these ratios over T. Eviction by hit density is from LHD
        (Beckmann, Chen and Cidon, NSDI'18).
        """
        cdef double ended[512]  # blocks that were forgotten at this age, or have it now
        cdef double used[64]
        cdef double all_used[64]
        cdef double all_ended[64]
        cdef double total = 0.0, weight, no_value = NO_VALUE / max(<int64_t>1, self.capacity)
        cdef int cell, age, last = age_class(self.capacity) + 2 * DOUBLINGS
        cdef int32_t number
        memset(ended, 0, sizeof(ended))
        memset(all_used, 0, sizeof(all_used))
        memset(all_ended, 0, sizeof(all_ended))
        for number in range(CELLS, self.num_made):
            ended[self.c_cell(&self.groups[number])] += self.groups[number].members
        for cell in range(CELLS):
            ended[cell] += self.gone[cell]
            all_used[cell % AGES] += self.used[cell]
            all_ended[cell % AGES] += ended[cell]
        for age in range(AGES):
            total += all_used[age] + all_ended[age]
        weight = SHARED / max(total, 1.0)
        for cell in range(0, CELLS, AGES):
            for age in range(AGES):
                used[age] = self.used[cell + age] + weight * all_used[age]
                ended[cell + age] += weight * all_ended[age]
            best_ratios(used, &ended[cell], &self.value[cell])
        for cell in range(CELLS):
            self.used[cell] *= FADE
            self.gone[cell] *= FADE
            if self.value[cell] < no_value:
                age = cell % AGES
                self.value[cell] = age - AGES if age <= last else -AGES - 1
        # Assumes that a tenth of the forgotten nodes come back unseen.
        self.shadow.idle = self.shadow.misses + 0.1 * self.shadow.forgotten < 0.03 * self.shadow.hits
        self.shadow.hits *= FADE
        self.shadow.misses *= FADE
        self.shadow.forgotten *= FADE
        self.next_lesson = self.clock + max(<int64_t>LESSON, self.capacity // 8, <int64_t>(self.num_made - CELLS) // 4)

    cdef bint c_follows_lru(self) noexcept:
        """Decides whether to follow LRU in the request that begins."""
        cdef ShadowLru *shadow = &self.shadow
        cdef int64_t allowed
        if self.clock < 2 * self.capacity:
            shadow.base = shadow.most = shadow.lead
            return True
        if shadow.resume:
            if self.clock >= shadow.resume:
                shadow.resume = 0
                shadow.base = shadow.most = shadow.lead
        elif not shadow.idle:
            shadow.most = max(shadow.most, shadow.lead)
            allowed = self.capacity // 10 + (shadow.most - shadow.base) // 4
            if shadow.most - shadow.lead > allowed:
                if shadow.pause == 0 or shadow.most - shadow.base > allowed:
                    shadow.pause = 4 * self.capacity
                else:
                    shadow.pause *= 2
                shadow.resume = self.clock + shadow.pause
        return shadow.resume or shadow.idle

    cdef str audit(self, int32_t num_linked):
        cdef Node *nodes = self.tree.nodes
        cdef Group *group
        cdef int32_t node, number, cell, linked = self.waiting.size, in_lru = 0
        members, children = {}, {}
        for node in range(self.tree.num_made):
            if nodes[node].alive and nodes[node].parent >= 0 and (nodes[node].block >= 0 or nodes[node].ghost):
                members[nodes[node].list] = members.get(nodes[node].list, 0) + 1
                children[nodes[node].parent] = children.get(nodes[node].parent, 0) + (nodes[node].block >= 0)
        for node in range(self.tree.num_made):
            if nodes[node].alive and nodes[node].cached_children != children.get(node, 0):
                return f"node {node} counts {nodes[node].cached_children} cached children, not {children.get(node, 0)}"
        if not list_is_sound(&self.waiting, nodes) or not list_is_sound(&self.ghosts, nodes):
            return "a list of the policy is broken"
        for cell in range(CELLS):
            number = self.groups[cell].next
            while number != cell:
                group = &self.groups[number]
                linked += group.nodes.size
                if group.kind != cell // AGES or not list_is_sound(&group.nodes, nodes) or group.nodes.size == 0:
                    return f"group {number} does not belong into cell {cell}"
                number = group.next
        number = self.groups[0].older
        while number:
            group = &self.groups[number]
            if group.members != members.pop(number, 0):
                return f"group {number} has not the {group.members} members that it counts"
            in_lru += self.c_in_lru(group) * group.members
            number = group.older
        if members or in_lru != self.shadow.size or in_lru > self.capacity:
            return f"LRU would have {in_lru} nodes, not {self.shadow.size}, or groups are missing: {members}"
        return None if linked == num_linked else f"the policy has {linked} nodes, it should have {num_linked}"


cdef void best_ratios(const double *used, const double *ended, double *value) noexcept nogil:
    """Writes the value of each age. With hits H and time C summed over the ages, it is the steepest line from a point
    (C, H) to a later one, found in one pass over their upper convex hull: `hull` has the points at which it can end.

    Counts are small at the ages that matter, and blocks of one request come back together. In most loads the rate of
    reuse falls about as 1 / age. So the rate times the age is averaged over a class and its two neighbours.
    """
    cdef double reused[66]  # the entry of an age is at index age + 1, so that each has two neighbours
    cdef double waited[66]
    cdef double hits[65]  # summed from the end, so hits and times are negative; only differences matter
    cdef double time[65]
    cdef int hull[65]
    cdef double left = 0.0, width, rate
    cdef int age, top = 0
    reused[0] = waited[0] = reused[AGES + 1] = waited[AGES + 1] = 0.0
    for age in range(AGES - 1, -1, -1):
        width = first_age(age + 1) - first_age(age)
        reused[age + 1] = used[age] * first_age(age + 1)
        waited[age + 1] = left * width + (used[age] + ended[age]) * width * 0.5
        left += used[age] + ended[age]
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
        value[age] = slope(hits, time, age, hull[top])
        top += 1
        hull[top] = age


cdef inline double slope(const double *hits, const double *time, int first, int last) noexcept nogil:
    cdef double waited = time[last] - time[first]
    return (hits[last] - hits[first]) / waited if waited > 0.0 else 0.0
