from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport pp_status
from pagepool.memory.allocator cimport BlockAllocator, Link
from pagepool.memory.page_buffer cimport PageBuffer


# A table as it was when a transaction began. While the transaction is open, for each place i of the snapshot:
#   owned[i] == 0:  the table has blocks[i] at i, with the table's own reference
#   owned[i] == 1:  the snapshot has a reference of its own to blocks[i], whatever the table has at i
# Either way the block has a reference, so it cannot be freed; and it cannot be overwritten, since appending to a block
# with two references copies its page first. `outer` is the snapshot of the enclosing transaction.
cdef struct TableSnapshot:
    TableSnapshot *outer
    int64_t length
    int64_t generation
    int32_t first
    int32_t end
    int32_t *blocks  # blocks[i - first] is place i
    unsigned char *owned  # likewise


# NULL when there is no memory.
cdef TableSnapshot *snapshot_new(
    const int32_t *table, int32_t first, int32_t end, int64_t length, int64_t generation, TableSnapshot *outer
) noexcept nogil
# Takes over the table's reference to its block at a place, if an abort needs the block; False if not.
cdef bint snapshot_take_over(TableSnapshot *self, int32_t place, int32_t block) noexcept nogil
# Whether an abort needs the block that the table has at a place, and the snapshot has no reference to it yet.
cdef bint snapshot_needs(const TableSnapshot *self, int32_t place, int32_t block) noexcept nogil
# Gives up the table's references to its blocks at begin to end - 1: those that an abort needs pass to the snapshot, the
# others are freed. All, or PP_INVALID_BLOCK.
cdef pp_status snapshot_give_back(
    TableSnapshot *self, BlockAllocator allocator, const int32_t *table, int32_t begin, int32_t end
) noexcept nogil
# Both free the snapshot and cannot fail. A commit leaves the table as it is, an abort restores it.
cdef void snapshot_commit(
    TableSnapshot *self, BlockAllocator allocator, const int32_t *table, int32_t end, int64_t length
) noexcept nogil
cdef void snapshot_abort(
    TableSnapshot *self, BlockAllocator allocator, int32_t *table, int32_t first, int32_t end
) noexcept nogil
# The ids that this snapshot and the outer ones have references to.
cdef list snapshot_references(const TableSnapshot *self)


cdef class PagedSeqState:
    #   table[first_block:num_blocks] are the blocks, each with one reference of this sequence's
    #   table[:first_block] == -1: given back before the rest;   table[num_blocks:] == 0
    #   first_block * block_size <= length;   ceil(length / block_size) <= num_blocks <= max_blocks_per_seq
    #   is_closed: length == num_blocks == 0
    cdef Link link
    cdef object _label
    cdef readonly BlockAllocator allocator
    cdef readonly int32_t block_size
    cdef readonly int32_t max_blocks_per_seq
    cdef readonly int32_t first_block
    cdef int32_t num_blocks
    cdef bint is_closed
    cdef int64_t length
    cdef readonly int64_t generation
    cdef int64_t generations  # the highest ever: what an abort puts back may be lower
    cdef int64_t call  # the last batch call that saw this sequence: finds one that is given twice
    cdef int64_t pending  # tokens that this call appends to it
    cdef PageBuffer memory
    cdef int32_t *c_blocks  # == memory.base: the table
    cdef TableSnapshot *snapshot  # of the innermost open transaction, or NULL
    cdef object __weakref__

    # All return PP_OK or have changed nothing. PP_INVALID_ARGUMENT: a number is below 0, a length above the present or
    # below what was given back, or the sequence is closed.

    # PP_OVER_MAXIMUM, PP_EXHAUSTED.
    cdef pp_status c_ensure_capacity(self, int64_t target_len) noexcept nogil
    # PP_OVER_MAXIMUM, PP_EXHAUSTED, PP_NO_MEMORY; slots_out is NULL or takes n slots.
    cdef pp_status c_append(self, int64_t n, int64_t *slots_out) noexcept nogil
    # PP_INVALID_BLOCK when a block was freed behind the sequence's back; so do the next three. PP_OVER_MAXIMUM when, in
    # a transaction, a count of references would pass its maximum.
    cdef pp_status c_truncate(self, int64_t new_len) noexcept nogil
    # Gives back the blocks whose tokens all lie before `position`.
    cdef pp_status c_drop_before(self, int64_t position) noexcept nogil
    cdef pp_status c_release(self) noexcept nogil
    cdef pp_status c_close(self) noexcept nogil

    # An empty sequence gets num_tokens tokens in n blocks, exactly as many as they need, and shares the blocks.
    # PP_OVER_MAXIMUM; PP_INVALID_BLOCK for a block that is free, out of range, or has all the references it can have.
    cdef pp_status c_adopt(self, const int32_t *blocks, Py_ssize_t n, int64_t num_tokens) noexcept nogil

    # A transaction may begin while one is open: the inner one ends first. PP_NO_MEMORY, PP_INVALID_ARGUMENT.
    cdef pp_status c_begin(self) noexcept nogil
    # PP_INVALID_ARGUMENT: none is open.
    cdef pp_status c_commit(self) noexcept nogil
    cdef pp_status c_abort(self) noexcept nogil

    # The most blocks that an append of n tokens takes: new ones, and one for each shared block that it writes.
    # Below 0: n is, or it passes the maximum, or the sequence is closed.
    cdef int64_t c_blocks_to_append(self, int64_t n) noexcept nogil
    # Appends with blocks that were taken for it; returns how many of them, from the first, it used. Cannot fail.
    cdef int64_t c_append_taken(self, int64_t n, const int32_t *taken) noexcept nogil
    cdef void c_slots(self, int64_t first, int64_t n, int64_t *slots_out) noexcept nogil
    # Whether each block has a reference still.
    cdef bint c_holds_all(self) noexcept nogil
    cdef pp_status c_give_back(self, int32_t begin, int32_t end) noexcept nogil
    cdef void c_forget(self, int32_t keep) noexcept nogil
    cdef object failed(self, pp_status status, object number, object wanted)


cdef class SequenceHandle:
    cdef PagedSeqState sequence
    cdef readonly int64_t generation
