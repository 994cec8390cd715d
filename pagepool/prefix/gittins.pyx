"""Our own policy: keep what is most worth its room, by what was learnt about blocks of its kind and age.

A cache of prefixes knows more than which block was used when. Blocks that one request used stay or go together; a
block is of use only while its parent is there; and how often a prefix came back, and whether it continued a cached
one, tell a conversation from a one-off. So blocks of one request and one kind are a group, with one time of use. For
each kind `ReuseAges` learns from look-ups and ghosts at what ages blocks come back, and from that the value of every
age: an old block may be worth more than a new one (in a loop that is longer than the cache) or less. The group whose
kind and age are worth least gives its blocks, from the tail, and no block goes before its cached children.

Where nothing of a kind and age ever came back, the youngest goes: what stays shows whether blocks come back later, up
to an age of 64 times the capacity. What was learnt is followed only where it is clear: the longest unused group goes
unless it is worth 1.25 times the least; and only while that is no loss against LRU, which `LruRival` watches.
Its own are the groups and the tree; the value is known (see `ReuseAges`), and so are ghosts (ARC).
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.prefix.policies cimport EvictionPolicy
from pagepool.prefix.radix_tree cimport (
    Node,
    NodeList,
    NodeTable,
    list_append,
    list_clear,
    list_cut,
    list_is_sound,
    list_push,
    list_remove,
    list_remove_run,
)

__all__ = ["GittinsPolicy", "GroupedPolicy", "ReuseAges"]

cdef enum:
    BUDGET = 16
    LESSON = 2000  # uses between two lessons, at least
    DOUBLINGS = 6  # of the capacity, up to which an age is waited for of which nothing is known

cdef extern from *:
    int lowest_bit "__builtin_ctzll"(unsigned long long bits) noexcept nogil

cdef double CLEAR = 1.25  # times what another group is worth, or more: worth keeping for longer than by LRU
cdef double WORTHLESS = 1e-4  # less than so many hits, where a block stays for as many uses as there are blocks


cdef double SHARED = 100.0  # blocks of all kinds together that each kind is taken to have beside its own


@cython.final
@cython.auto_pickle(False)
cdef class ReuseAges:
    """After how long blocks are looked up again, and what it is worth to keep one of an age. Internal.

    The value of keeping a block is its Gittins index: over every time T that one could wait, the best ratio of the
    chance that it is looked up within T to the time that it is expected to stay until it is looked up or T has passed
    (Gittins, Bandit processes and dynamic allocation indices, 1979; hit density as a rule of eviction is in LHD,
    Beckmann, Chen and Cidon, NSDI'18). With hits H and time C added up over the ages it is the steepest line from a
    point (C, H) to a later one: one pass over their upper convex hull.

    Counts are few where it matters, and blocks of one request come back together. So the rate of reuse, which in most
    loads falls about as 1 / age, is taken times the age as a mean over a class and its two neighbours.
    """

    def __cinit__(self):
        cdef int age
        for age in range(AGES + 1):
            self.first[age] = first_age(age)
        self.c_clear()

    cdef void c_clear(self) noexcept:
        """Nothing is known: what was used last is worth most."""
        cdef int kind, age
        for kind in range(KINDS):
            for age in range(AGES):
                self.used[kind][age] = self.gone[kind][age] = self.alive[kind][age] = 0.0
                self.value[kind][age] = 1.0 / self.first[age]

    cdef void c_count_used(self, int kind, int64_t age, int64_t n) noexcept:
        cdef int64_t end = age + n, after
        cdef int now
        while age < end:
            now = age_class(age)
            after = end if now == AGES - 1 else min(end, <int64_t>self.first[now + 1])
            self.used[kind][now] = add_ones(self.used[kind][now], after - age)
            age = after

    cdef void c_learn(self, int64_t clock) noexcept:
        """What happened at no age yet, and not before, has nothing to say: O(kinds * classes up to the age of all)."""
        cdef double used[64]
        cdef double ended[64]
        cdef double total = 0.0
        cdef int kind, age, last = min(AGES - 1, age_class(clock) + 1)
        for age in range(AGES):
            used[age] = ended[age] = 0.0
            for kind in range(KINDS):
                used[age] += self.used[kind][age]
                ended[age] += self.gone[kind][age] + self.alive[kind][age]
            total += used[age] + ended[age]
        for kind in range(KINDS):
            self.c_learn_kind(kind, last, used, ended, SHARED / max(total, 1.0))
            for age in range(AGES):
                self.used[kind][age] *= FADE
                self.gone[kind][age] *= FADE
                self.alive[kind][age] = 0.0

    cdef void c_learn_kind(self, int kind, int last, const double *used, const double *ended, double weight) noexcept:
        """`hull` has those later points that a steepest line may end at; after age `last` all are one."""
        cdef double reused[66]
        cdef double waited[66]
        cdef double hits[65]
        cdef double time[65]
        cdef int hull[65]
        cdef double left = 0.0, own_used, own_ended, width, rate, best
        cdef int age, top = 0
        reused[0] = waited[0] = reused[last + 2] = waited[last + 2] = 0.0
        for age in range(last, -1, -1):
            own_used = self.used[kind][age] + weight * used[age]
            own_ended = self.gone[kind][age] + self.alive[kind][age] + weight * ended[age]
            width = self.first[age + 1] - self.first[age]
            reused[age + 1] = own_used * self.first[age + 1]
            waited[age + 1] = left * width + (own_used + own_ended) * width * 0.5
            left += own_used + own_ended
        hits[64] = time[64] = 0.0
        hits[last + 1] = time[last + 1] = 0.0
        hull[0] = 64
        for age in range(last, -1, -1):
            rate = waited[age] + 2.0 * waited[age + 1] + waited[age + 2]
            if rate > 0.0:
                rate = (reused[age] + 2.0 * reused[age + 1] + reused[age + 2]) / (rate * self.first[age + 1])
            # Counted backwards, both fall below 0: only differences matter.
            hits[age] = hits[age + 1] - rate * waited[age + 1]
            time[age] = time[age + 1] - waited[age + 1]
            best = slope(hits, time, age, hull[top])
            while top > 0 and best <= slope(hits, time, hull[top], hull[top - 1]):
                top -= 1
                best = slope(hits, time, age, hull[top])
            top += 1
            hull[top] = age
            self.value[kind][age] = best
        for age in range(last + 1, AGES):
            self.value[kind][age] = 0.0


cdef inline double slope(const double *hits, const double *time, int first, int last) noexcept:
    cdef double waited = time[last] - time[first]
    return (hits[last] - hits[first]) / waited if waited > 0.0 else 0.0


@cython.auto_pickle(False)
cdef class GroupedPolicy(EvictionPolicy):
    """Keeps the groups, by kind and age, and in the order of their times. Internal: see `GittinsPolicy`."""

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
        cdef int kind
        EvictionPolicy.c_clear(self)
        PyMem_Free(self.groups)
        self.groups = NULL
        self.room = self.num_made = self.num_live = 0
        self.unused = self.victims = -1
        self.clock = 0
        rival_clear(&self.rival, self.capacity)
        for kind in range(KINDS):
            self.open[kind] = -1
        cells_clear(&self.cells)

    cdef void c_place(self, int32_t first, int32_t n) noexcept:
        cdef uint8_t uses = self.table.nodes[first].uses
        cdef int count = uses & COUNT
        cdef int kind = 2 * (count - (count > 2)) + ((uses & CONTINUED) != 0)
        cdef int32_t number = self.open[kind], node
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
            rival_open(&self.rival, self.groups, number)
        self.groups[number].members += n
        rival_add(&self.rival, self.groups, number, n)
        for node in range(first, first + n):
            self.table.nodes[node].list = number

    cdef void c_leave(self, int32_t first, int32_t n) noexcept:
        cdef int32_t number = self.table.nodes[first].list
        cdef Group *group = &self.groups[number]
        group.members -= n
        self.rival.size -= n * group.in_lru
        if group.members == 0:
            rival_close(&self.rival, self.groups, number)
            if self.open[group.kind] == number:
                self.open[group.kind] = -1
            group.next = self.unused
            self.unused = number
            self.num_live -= 1

    cdef void c_join(self, int32_t first, int32_t n) noexcept:
        cdef int32_t number = self.table.nodes[first].list
        cdef Group *group = &self.groups[number]
        if group.nodes.size == 0:
            cells_put(&self.cells, self.groups, number, age_class(self.clock - group.time))
        list_append(&group.nodes, self.table.nodes, first, first + n - 1, n)

    cdef void c_part(self, int32_t first, int32_t n) noexcept:
        cdef int32_t number = self.table.nodes[first].list
        list_cut(&self.groups[number].nodes, self.table.nodes, first, first + n - 1, n)
        if self.groups[number].nodes.size == 0:
            cells_take(&self.cells, self.groups, number)
            if self.victims == number:
                self.victims = -1

    cdef str audit(self, int32_t num_linked):
        cdef Node *nodes = self.table.nodes
        cdef Group *group
        cdef int32_t node, number, linked = self.lists[WAITING].size, in_cells = 0, in_lru = 0, in_order = 0
        cdef int kind, age
        members, children = {}, {}
        for node in range(self.table.num_made):
            if not nodes[node].alive or nodes[node].parent < 0 or (nodes[node].block < 0 and not nodes[node].ghost):
                continue
            members[nodes[node].list] = members.get(nodes[node].list, 0) + 1
            if nodes[node].block >= 0:
                children[nodes[node].parent] = children.get(nodes[node].parent, 0) + 1
        for node in range(self.table.num_made):
            if nodes[node].alive and nodes[node].cached_children != children.get(node, 0):
                return f"node {node} counts {nodes[node].cached_children} cached children, not {children.get(node, 0)}"
        for kind in range(KINDS):
            for age in range(AGES):
                number = self.cells.ends[kind][age][0]
                while number >= 0:
                    group = &self.groups[number]
                    in_cells += 1
                    linked += group.nodes.size
                    if group.kind != kind or not list_is_sound(&group.nodes, nodes) or group.nodes.size == 0:
                        return f"group {number} does not belong into the cell of kind {kind} and age class {age}"
                    number = group.next
        if not list_is_sound(&self.lists[WAITING], nodes) or not list_is_sound(&self.lists[GHOSTS], nodes):
            return "a list of the policy is broken"
        number = self.rival.newest
        while number >= 0:
            group = &self.groups[number]
            if group.members != members.get(number, 0):
                return f"group {number} counts {group.members} members, not {members.get(number, 0)}"
            if group.in_lru != (self.rival.oldest >= 0 and group.time >= self.groups[self.rival.oldest].time):
                return f"group {number} of time {group.time} is on the wrong side of what LRU would have"
            in_lru += group.in_lru * group.members
            in_order += 1
            number = group.older
        if in_lru != self.rival.size or in_lru > self.capacity or in_order != self.num_live:
            return f"LRU would have {in_lru} nodes, not {self.rival.size}, of {in_order} groups, not {self.num_live}"
        if len(members) != self.num_live or in_cells > self.num_live:
            return f"{len(members)} groups have members, {in_cells} are in cells, not {self.num_live}"
        return None if linked == num_linked else f"the policy has {linked} nodes, it should have {num_linked}"


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
