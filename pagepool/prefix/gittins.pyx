"""Our own policy: keep what is most worth its room, by what was learnt about blocks of its kind and age.

A cache of prefixes knows more than which block was used when. Blocks that one request used stay or go together; a
block is of use only while its parent is there; and how often a prefix came back, and whether it continued a cached
one, tell a conversation from a one-off. So blocks of one request and one kind are a group, with one time of use. For
each kind `ReuseAges` learns from look-ups and ghosts at what ages blocks come back, and from that the value of every
age: an old block may be worth more than a new one (in a loop that is longer than the cache) or less. The group whose
kind and age are worth least gives its blocks, from the tail, and no block goes before its cached children.

Where nothing of a kind and age ever came back, the youngest goes: what stays shows whether blocks come back later, up
to an age of 64 times the capacity. What was learnt is followed only where it is clear: the longest unused group goes
unless it is worth 1.25 times the least; and only while that is no loss against LRU, which lru_rival.pxd watches.
Its own are the groups and the tree; the value is known (see reuse_ages.pyx), and so are ghosts (ARC).
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.prefix.group cimport Group, cells_put, cells_take
from pagepool.prefix.grouped cimport CONTINUED, COUNT, GHOSTS, MOST_USES, WAITING, WAITS, GroupedPolicy
from pagepool.prefix.lru_rival cimport rival_count, rival_learn, rival_turns
from pagepool.prefix.node cimport Node, NodeList, list_append, list_cut, list_push, list_remove, list_remove_run
from pagepool.prefix.node_table cimport NodeTable
from pagepool.prefix.reuse_ages cimport AGES, FADE, KINDS, ReuseAges, add_ones, age_class

__all__ = ["GittinsPolicy"]

cdef enum:
    BUDGET = 16
    LESSON = 2000  # uses between two lessons, at least
    DOUBLINGS = 6  # of the capacity, up to which an age is waited for of which nothing is known

cdef extern from *:
    int lowest_bit "__builtin_ctzll"(unsigned long long bits) noexcept nogil

cdef double CLEAR = 1.25  # times what another group is worth, or more: worth keeping for longer than by LRU
cdef double WORTHLESS = 1e-4  # less than so many hits, where a block stays for as many uses as there are blocks


@cython.final
@cython.auto_pickle(False)
cdef class GittinsPolicy(GroupedPolicy):
    """Evicts the least valuable kind and age first; remembers four times as many ghosts as there can be blocks."""

    def __cinit__(self, NodeTable table not None, int64_t capacity):
        self.ages = ReuseAges()
        self.max_ghosts = 4 * capacity
        self.c_clear()

    cdef void c_clear(self) noexcept:
        GroupedPolicy.c_clear(self)
        self.last = self.chosen_at = -1
        self.continued = False
        self.next_lesson = LESSON
        self.ages.c_clear()

    cdef void c_insert(self, int32_t node) noexcept:
        self.c_arrive(node)
        self.table.nodes[self.table.nodes[node].parent].cached_children += 1
        self.c_join(node, 1)

    cdef void c_insert_run(self, int32_t first, int32_t n) noexcept:
        """As one by one: what comes behind a node and is alike, new or ghosts, comes at once, up to a lesson."""
        cdef Node *nodes = self.table.nodes
        cdef int32_t end = first + n, last, group
        cdef uint8_t uses, ghost
        while first < end:
            ghost, uses, group = nodes[first].ghost, nodes[first].uses, nodes[first].list
            self.c_insert(first)
            first += 1
            last = first
            while last < end and nodes[last].ghost == ghost and (
                not ghost or (nodes[last].uses == uses and nodes[last].list == group)
            ):
                last += 1
            n = <int32_t>min(<int64_t>(last - first), self.next_lesson - self.clock - 1)
            if n > 0:
                self.c_insert_alike(first, n)
                first += n

    cdef void c_insert_alike(self, int32_t first, int32_t n) noexcept:
        cdef Node *nodes = self.table.nodes
        cdef int32_t end = first + n, node
        self.clock += n
        self.last = end - 1
        if nodes[first].ghost:
            list_remove_run(&self.lists[GHOSTS], nodes, first, end - 1)
            for node in range(first, end):
                nodes[node].ghost = 0
            self.c_used(first, n, False)
        else:
            for node in range(first, end):
                nodes[node].uses = CONTINUED if self.continued else 0
        self.c_place(first, n)
        for node in range(first, end):
            nodes[node - 1].cached_children += 1
            nodes[node].previous = node - 1
            nodes[node].next = node + 1
        self.c_join(first, n)

    cdef bint c_refuses(self, int32_t node) noexcept:
        """Whether it is worth less than all that is there: its parent would have to go for it, or stayed out, too."""
        cdef Node *nodes = self.table.nodes
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
        self.c_used(node, 1, True)
        self.c_place(node, 1)
        self.c_join(node, 1)

    cdef void c_touch_run(self, int32_t first, int32_t n) noexcept:
        """As one by one: what is linked behind a node touched, or waits like it, and is alike goes where that went, up
        to a lesson."""
        cdef Node *nodes = self.table.nodes
        cdef int32_t end = first + n, last, node
        cdef bint waits
        while first < end:
            waits = nodes[first].uses & WAITS
            last = first
            while last + 1 < end and nodes[last + 1].uses == nodes[first].uses and (
                nodes[last + 1].list == nodes[first].list if waits else nodes[last].next == last + 1
            ):
                last += 1
            self.c_touch(first)
            n = <int32_t>min(<int64_t>(last - first), self.next_lesson - self.clock - 1)
            first += 1
            if n > 0:
                self.clock += n
                self.last = first + n - 1
                if waits:
                    list_remove_run(&self.lists[WAITING], nodes, first, self.last)
                    for node in range(first, first + n):
                        nodes[node].uses ^= WAITS
                        nodes[node].previous = node - 1
                        nodes[node].next = node + 1
                else:
                    self.c_part(first, n)
                self.c_used(first, n, True)
                self.c_place(first, n)
                self.c_join(first, n)
                first += n

    cdef int32_t c_victim(self) noexcept:
        """A node that has to wait for its children was placed or joined for it: O(1) amortised."""
        cdef int32_t node
        while True:
            if self.victims < 0 or self.budget <= 0:
                if not self.c_is_fresh():
                    self.chosen = self.c_choose()
                    self.chosen_at = self.clock
                    self.chosen_of = self.cells.stamp
                self.victims = self.chosen
                self.budget = BUDGET
                if self.victims < 0:
                    return self.lists[WAITING].head  # children that stay are held by sequences
            node = self.groups[self.victims].nodes.tail
            if self.table.nodes[node].cached_children == 0:
                return node
            self.c_part(node, 1)
            self.table.nodes[node].uses |= WAITS
            list_push(&self.lists[WAITING], self.table.nodes, node)

    cdef void c_evicted(self, int32_t node) noexcept:
        cdef Node *nodes = self.table.nodes
        cdef int32_t parent = nodes[node].parent
        self.budget -= 1
        self.c_unlink(node)
        nodes[parent].cached_children -= 1
        if nodes[parent].cached_children == 0 and nodes[parent].uses & WAITS:
            self.c_unlink(parent)
            self.c_join(parent, 1)
        if self.last == node:
            self.last = -1
        self.c_into_ghosts(node)

    cdef int32_t c_victims(self, int32_t node, int32_t n, int32_t *step) noexcept:
        """From the tail of the group up, while each is the parent of the one before and has no other cached child.

        When the group has no more, those of it that wait for just that come back one by one, and it is chosen again.
        """
        cdef Node *nodes = self.table.nodes
        cdef bint fresh = self.c_is_fresh()
        cdef int32_t low = node, end = node - (n if fresh else min(n, self.budget)), up
        cdef int32_t behind
        step[0] = -1
        if self.victims < 0:
            return 1
        behind = self.groups[self.victims].next  # in its row, whose first it is when it has come back, or is not
        fresh = fresh and (behind < 0 or self.groups[self.victims].time < self.groups[behind].time)
        while low - 1 > end and nodes[low].parent == low - 1 and nodes[low - 1].cached_children == 1:
            up = low - 1
            if nodes[up].uses & WAITS:
                if not fresh or nodes[up].list != self.victims:
                    break
                if not nodes[low].uses & WAITS and nodes[low].previous >= 0:
                    break
            elif nodes[low].previous != up:
                break
            low = up
        return node - low + 1

    cdef void c_evicted_run(self, int32_t node, int32_t n, int32_t step) noexcept:
        cdef Node *nodes = self.table.nodes
        cdef NodeList *linked = &self.groups[nodes[node].list].nodes
        cdef int32_t low = node - n + 1, top = low, i
        if n > 1:
            while nodes[top].uses & WAITS:
                nodes[top].uses ^= WAITS
                top += 1
            if top > low:
                # The group has left its cell and come back for each of them; what it has now is the last one.
                list_remove_run(&self.lists[WAITING], nodes, low, top - 1)
                list_cut(linked, nodes, top, node, node - top + 1)
                list_append(linked, nodes, low, low, 1)
                self.budget = BUDGET
            else:
                self.c_part(low + 1, n - 1)
                self.budget -= n - 1
                while self.budget <= 0:
                    self.budget += BUDGET
            for i in range(node, low, -1):
                nodes[i - 1].cached_children = 0
                nodes[i].ghost = 1
                nodes[i].previous = i + 1
                nodes[i].next = i - 1
            if low < self.last <= node:
                self.last = -1
            list_append(&self.lists[GHOSTS], nodes, node, low + 1, n - 1)
            self.c_forget_ghosts()
        self.c_evicted(low if n > 1 else node)

    cdef void c_arrive(self, int32_t node) noexcept:
        """A node that is not cached, among the members of its group."""
        cdef Node *nodes = self.table.nodes
        cdef int32_t parent = nodes[node].parent
        if parent != self.last:
            self.continued = nodes[parent].block >= 0
        self.c_tick(node)
        if nodes[node].ghost:
            nodes[node].ghost = 0
            list_remove(&self.lists[GHOSTS], nodes, node)
            self.c_used(node, 1, False)
        else:
            nodes[node].uses = CONTINUED if self.continued else 0
        self.c_place(node, 1)

    cdef void c_into_ghosts(self, int32_t node) noexcept:
        self.table.nodes[node].ghost = 1
        list_push(&self.lists[GHOSTS], self.table.nodes, node)
        self.c_forget_ghosts()

    cdef void c_forget_ghosts(self) noexcept:
        """The oldest that are too many; those of a group whose ids fall, each the parent of the one before, at once."""
        cdef Node *nodes = self.table.nodes
        cdef Group *group
        cdef double *gone
        cdef int32_t ghost, low, n
        while self.lists[GHOSTS].size > self.max_ghosts:
            ghost = low = self.lists[GHOSTS].head
            n = <int32_t>(self.lists[GHOSTS].size - self.max_ghosts)
            while low > ghost - n + 1 and nodes[low].next == low - 1 == nodes[low].parent:
                if nodes[low - 1].list != nodes[ghost].list:
                    break
                low -= 1
            n = ghost - low + 1
            group = &self.groups[nodes[ghost].list]
            gone = &self.ages.gone[group.kind][age_class(self.clock - group.time)]
            gone[0] = add_ones(gone[0], n)
            self.rival.forgotten = add_ones(self.rival.forgotten, n)
            self.c_leave(low, n)
            list_cut(&self.lists[GHOSTS], nodes, ghost, low, n)
            for low in range(low, ghost + 1):
                nodes[low].ghost = 0
            self.table.c_collect(ghost)

    cdef void c_unlink(self, int32_t node) noexcept:
        cdef Node *nodes = self.table.nodes
        if nodes[node].uses & WAITS:
            nodes[node].uses ^= WAITS
            list_remove(&self.lists[WAITING], nodes, node)
        else:
            self.c_part(node, 1)

    cdef void c_link(self, int32_t node) noexcept:
        self.c_join(node, 1)

    cdef void c_tick(self, int32_t node) noexcept:
        """Time passes by a node used; one whose parent was not used just before begins a request."""
        cdef int kind
        self.clock += 1
        if self.clock >= self.next_lesson:
            self.c_learn()
        if self.table.nodes[node].parent != self.last:
            for kind in range(KINDS):
                self.open[kind] = -1
            if rival_turns(&self.rival, self.clock):
                self.victims = -1
        self.last = node

    cdef void c_learn(self) noexcept:
        """O(groups), once in as many uses."""
        cdef Group *group
        cdef int32_t i
        for i in range(self.num_made):
            group = &self.groups[i]
            if group.members:
                self.ages.alive[group.kind][age_class(self.clock - group.time)] += group.members
        self.ages.c_learn(self.clock)
        rival_learn(&self.rival, FADE)
        self.next_lesson = self.clock + max(<int64_t>LESSON, self.capacity // 8, <int64_t>self.num_made // 4)

    cdef void c_used(self, int32_t first, int32_t n, bint here) noexcept:
        """Used again, the last of them now: what their group tells of their ages, and one use more."""
        cdef Node *nodes = self.table.nodes
        cdef Group *group = &self.groups[nodes[first].list]
        cdef int32_t node
        self.ages.c_count_used(group.kind, self.clock - group.time - n + 1, n)
        rival_count(&self.rival, group, n, here)
        if (nodes[first].uses & COUNT) < MOST_USES:
            for node in range(first, first + n):
                nodes[node].uses += 1
        self.c_leave(first, n)

    cdef bint c_is_fresh(self) noexcept:
        return self.chosen_at == self.clock and self.chosen_of == self.cells.stamp

    cdef int32_t c_choose(self) noexcept:
        """The longest unused group of the cell that is worth least, or of all, or -1; all groups are aged first."""
        cdef double least = 0.0, oldest_value = 0.0, value, worthless = WORTHLESS / max(<int64_t>1, self.capacity)
        cdef unsigned long long ages
        cdef int kind, age, now, last = age_class(self.capacity) + 2 * DOUBLINGS
        cdef int32_t first, best = -1, oldest = -1
        for kind in range(KINDS):
            ages = self.cells.filled[kind]
            while ages:
                age = lowest_bit(ages)
                ages &= ages - 1
                first = self.cells.ends[kind][age][0]
                while first >= 0:
                    now = age_class(self.clock - self.groups[first].time)
                    if now <= age:
                        break
                    cells_take(&self.cells, self.groups, first)
                    cells_put(&self.cells, self.groups, first, now)
                    ages |= 1ull << now
                    first = self.cells.ends[kind][age][0]
                if first < 0:
                    continue
                value = self.ages.value[kind][age]
                if value < worthless:
                    value = age - AGES if age <= last else -AGES - 1
                if oldest < 0 or self.groups[first].time < self.groups[oldest].time:
                    oldest = first
                    oldest_value = value
                if best < 0 or value < least or (value == least and self.groups[first].time < self.groups[best].time):
                    best = first
                    least = value
        return oldest if self.rival.followed or oldest_value <= CLEAR * least else best
