"""Groups of nodes that one request used: what the policy `gittins` keeps of each, and rows of groups in cells."""

from libc.stdint cimport int32_t, int64_t, uint8_t

from pagepool.prefix.node cimport NodeList


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
