"""GroupedPolicy: nodes that one request used, of one kind, are a group; what `gittins` ages and compares."""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.prefix.group cimport Group, cells_clear, cells_put, cells_take
from pagepool.prefix.lru_rival cimport rival_add, rival_clear, rival_close, rival_open
from pagepool.prefix.node cimport Node, list_append, list_clear, list_cut, list_is_sound
from pagepool.prefix.policy cimport EvictionPolicy
from pagepool.prefix.reuse_ages cimport AGES, KINDS, age_class

__all__ = ["GroupedPolicy"]


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
