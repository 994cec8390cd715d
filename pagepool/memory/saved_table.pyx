"""SavedTable: what a transaction must keep of a sequence's table so that it can be put back.

Beginning costs a copy of the ids. Appending costs nothing more: it writes behind the length that was saved. What would
drop a reference asks here first.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from pagepool.csrc cimport PP_INVALID_BLOCK, PP_OK, pp_status
from pagepool.memory.allocator cimport BlockAllocator

__all__ = []


cdef SavedTable *saved_new(
    const int32_t *table, int32_t first, int32_t end, int64_t length, int64_t generation, SavedTable *outer
) noexcept nogil:
    cdef size_t count = <size_t>(end - first)
    cdef SavedTable *self = <SavedTable *>malloc(sizeof(SavedTable) + count * (sizeof(int32_t) + 1))
    if self != NULL:
        self.outer = outer
        self.length = length
        self.generation = generation
        self.first = first
        self.end = end
        self.blocks = <int32_t *>(self + 1)
        self.kept = <unsigned char *>(self.blocks + count)
        memcpy(self.blocks, table + first, count * sizeof(int32_t))
        memset(self.kept, 0, count)
    return self


cdef bint saved_needs(const SavedTable *self, int32_t place, int32_t block) noexcept nogil:
    cdef int32_t i = place - self.first
    return self.first <= place < self.end and self.blocks[i] == block and not self.kept[i]


cdef bint saved_takes(SavedTable *self, int32_t place, int32_t block) noexcept nogil:
    if not saved_needs(self, place, block):
        return False
    self.kept[place - self.first] = 1
    return True


cdef pp_status saved_give_back(
    SavedTable *self, BlockAllocator allocator, const int32_t *table, int32_t begin, int32_t end
) noexcept nogil:
    """Looks at all of them first, since a block that someone else freed must stop it before anything changes."""
    cdef int32_t i
    for i in range(begin, end):
        if allocator.c_ref_count(table[i]) < 1:
            return PP_INVALID_BLOCK
    for i in range(begin, end):
        if not saved_takes(self, i, table[i]):
            allocator.c_free(table[i])
    return PP_OK


cdef void saved_commit(
    SavedTable *self, BlockAllocator allocator, const int32_t *table, int32_t end, int64_t length
) noexcept nogil:
    """What the transaction around it needs as well goes there.

    A block that the table has still was shared with this one because it was cut within: the one around needs that too
    only if the cut is within its tokens.
    """
    cdef SavedTable *outer = self.outer
    cdef int32_t i, place
    cdef bint uncut
    for i in range(self.end - self.first):
        if self.kept[i]:
            place = self.first + i
            uncut = outer != NULL and length >= outer.length and place < end and table[place] == self.blocks[i]
            if outer == NULL or uncut or not saved_takes(outer, place, self.blocks[i]):
                allocator.c_free(self.blocks[i])
    free(self)


cdef void saved_abort(
    SavedTable *self, BlockAllocator allocator, int32_t *table, int32_t first, int32_t end
) noexcept nogil:
    """The last block first: those that the transaction took come out again in the order in which they did."""
    cdef int32_t i
    for i in range(end - 1, first - 1, -1):
        if not saved_needs(self, i, table[i]):
            allocator.c_free(table[i])
    memset(table, 0, <size_t>end * sizeof(int32_t))
    for i in range(self.first):
        table[i] = -1
    memcpy(table + self.first, self.blocks, <size_t>(self.end - self.first) * sizeof(int32_t))
    free(self)


cdef list saved_references(const SavedTable *self):
    cdef list found = []
    cdef int32_t i
    while self != NULL:
        for i in range(self.end - self.first):
            if self.kept[i]:
                found.append(self.blocks[i])
        self = self.outer
    return found
