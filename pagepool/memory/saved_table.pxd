from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator


# A table as it was when a transaction began. While it is open, for each of its places i:
#   kept[i] == 0:  the table has blocks[i] at i, with the table's own reference
#   kept[i] == 1:  this has a reference to blocks[i], whatever the table has at i
# so that nothing which an abort needs can be freed or, since what others share is copied first, be written. `outer` is
# that of the transaction around.
cdef struct SavedTable:
    SavedTable *outer
    int64_t length
    int64_t generation
    int32_t first
    int32_t end
    int32_t *blocks  # blocks[i - first] is place i
    unsigned char *kept  # likewise


# NULL when there is no memory.
cdef SavedTable *saved_new(
    const int32_t *table, int32_t first, int32_t end, int64_t length, int64_t generation, SavedTable *outer
) noexcept nogil
# Takes over the table's reference to its block at a place: False when it has no claim to it.
cdef bint saved_takes(SavedTable *self, int32_t place, int32_t block) noexcept nogil
# Whether an abort needs the block that the table has at a place, and only the table has it.
cdef bint saved_needs(const SavedTable *self, int32_t place, int32_t block) noexcept nogil
# Drops the table's references at begin to end - 1, to the allocator or to this; all or PP_INVALID_BLOCK.
cdef pp_status saved_give_back(
    SavedTable *self, BlockAllocator allocator, const int32_t *table, int32_t begin, int32_t end
) noexcept nogil
# Both free self, and cannot fail. After the first the table is as it is, after the second as it was.
cdef void saved_commit(
    SavedTable *self, BlockAllocator allocator, const int32_t *table, int32_t end, int64_t length
) noexcept nogil
cdef void saved_abort(
    SavedTable *self, BlockAllocator allocator, int32_t *table, int32_t first, int32_t end
) noexcept nogil
# The ids that this and those around it have references to.
cdef list saved_references(const SavedTable *self)
