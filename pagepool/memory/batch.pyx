"""Appending to, and releasing, the sequences of a whole batch: all of them or none, in one call."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from pagepool.memory.allocator cimport BlockAllocator
from pagepool.csrc cimport PP_OK, pp_status
from pagepool.memory.ids cimport read_count, read_counts
from pagepool.memory.block_table cimport PagedSeqState
from pagepool.memory.block_table cimport saved_needs

from collections import Counter

from pagepool.errors import InvalidBlock
from pagepool.memory.explain import closed, exhausted

__all__ = ["append_batch", "release_batch"]

cdef int64_t calls = 0  # numbers the calls, so that a state can tell that it was seen in this one


cdef BlockAllocator common_allocator(list states):
    """The allocator of all states, None for no states; finds states that are none, foreign or given twice."""
    global calls
    cdef BlockAllocator allocator = None
    cdef PagedSeqState state
    cdef Py_ssize_t i
    calls += 1
    for i in range(len(states)):
        item = states[i]
        if not isinstance(item, PagedSeqState):
            raise TypeError(f"sequence {i} must be a PagedSeqState, not {type(item).__name__}")
        state = <PagedSeqState>item
        if state.call == calls:
            raise ValueError(f"sequence {i} is given twice in one call")
        state.call = calls
        if allocator is None:
            allocator = state.allocator
        elif allocator is not state.allocator:
            raise ValueError(f"sequences 0 and {i} have different allocators")
    return allocator


cdef int32_t *room_for(int64_t count) except NULL:
    cdef int32_t *blocks = <int32_t *>malloc(<size_t>(count + 1) * sizeof(int32_t))
    if blocks == NULL:
        raise MemoryError(f"no memory for {count} block ids")
    return blocks


cdef int64_t kept_by_last(list states) except -1:
    """How many shared blocks are so no more when their turn comes, since those before have un-shared them.

    What a state un-shares that an open transaction needs stays shared: with that.
    """
    cdef PagedSeqState state
    cdef int64_t i, end, kept = 0
    cdef int32_t block, count
    dropped = Counter()
    for state in states:
        if state.pending:
            end = (state.length + state.pending + state.block_size - 1) // state.block_size
            for i in range(state.length // state.block_size, min(end, state.num_blocks)):
                block = state.c_blocks[i]
                count = state.allocator.c_ref_count(block)
                if count > 1 and count - dropped[block] <= 1:
                    kept += 1
                elif state.saved == NULL or not saved_needs(state.saved, <int32_t>i, block):
                    dropped[block] += 1
    return kept


def append_batch(list states not None, list counts not None):
    """Appends counts[i] tokens to states[i], for all or for none of them.

    The states share one allocator and are given once each. Raises `PoolExhausted` when the allocator has too few blocks
    for all of them together, `ValueError` when one passes its maximum, a count is below 0 or the lists do not match;
    then nothing has changed.

    >>> from pagepool import BlockAllocator, PagedSeqState
    >>> allocator = BlockAllocator(8)
    >>> states = [PagedSeqState(allocator), PagedSeqState(allocator)]
    >>> append_batch(states, [20, 3])
    >>> [state.blocks for state in states]
    [[0, 1], [2]]
    """
    cdef BlockAllocator allocator
    cdef PagedSeqState state
    cdef Py_ssize_t i, n = len(states)
    cdef int64_t wanted, total = 0, used = 0
    cdef int32_t *taken
    counts = read_counts(counts)
    if len(counts) != n or len(states) != n:
        raise ValueError(f"{len(states)} sequences and {len(counts)} counts do not match")
    allocator = common_allocator(states)
    for i in range(n):
        state = <PagedSeqState>states[i]
        state.pending = read_count(counts[i])
        wanted = state.c_blocks_to_append(state.pending)
        if state.is_closed:
            raise closed(f"sequence {i}", state._label)
        if wanted < 0:
            raise ValueError(
                f"cannot append {state.pending} tokens to the {state.length} of sequence {i}: "
                f"it may have from 0 to {state.max_blocks_per_seq * <int64_t>state.block_size}"
            )
        total += wanted
    if total > INT32_MAX:
        raise exhausted(total, allocator.c_available(), allocator.max_capacity)
    taken = room_for(total)
    try:
        if total and total > allocator.c_free_count():  # before it takes or grows for what a last sharer keeps
            total -= kept_by_last(states)
        if total and allocator.c_allocate_n(<int32_t>total, taken) != PP_OK:
            raise exhausted(total, allocator.c_available(), allocator.max_capacity)
        for i in range(n):
            state = <PagedSeqState>states[i]
            used += state.c_append_taken(state.pending, taken + used)
        while total > used:  # backwards: they come out again in the order in which they did
            total -= 1
            allocator.c_free(taken[total])
    finally:
        free(taken)


def release_batch(list states not None, bint close=False):
    """Releases every state, or none of them: gives all their blocks back; their `len` becomes 0. `close`: for good.

    The states share one allocator and are given once each. Raises `InvalidBlock` when a block was freed by someone
    else, `StaleHandle` when a state is closed; then nothing has changed.

    >>> from pagepool import BlockAllocator, PagedSeqState
    >>> allocator = BlockAllocator(8)
    >>> states = [PagedSeqState(allocator), PagedSeqState(allocator)]
    >>> append_batch(states, [20, 3])
    >>> release_batch(states)
    >>> allocator.free_count
    8
    """
    cdef BlockAllocator allocator = common_allocator(states)
    cdef PagedSeqState state
    cdef Py_ssize_t i, n = len(states)
    cdef int64_t total = 0
    cdef int32_t *blocks
    cdef int32_t held
    cdef pp_status status
    if n == 0:
        return
    for i in range(n):
        state = <PagedSeqState>states[i]
        if state.is_closed:
            raise closed(f"sequence {i}", state._label)
        if state.saved == NULL:
            total += state.num_blocks - state.first_block
        elif not state.c_holds_all():
            raise InvalidBlock(f"one of the {state.num_blocks} blocks of sequence {i} was freed by someone else")
    blocks = room_for(total)
    total = 0
    for i in range(n):
        state = <PagedSeqState>states[i]
        if state.saved == NULL:
            held = state.num_blocks - state.first_block
            memcpy(blocks + total, state.c_blocks + state.first_block, <size_t>held * sizeof(int32_t))
            total += held
    status = allocator.c_free_n(blocks, total)
    free(blocks)
    if status != PP_OK:
        raise InvalidBlock(f"one of the {total} blocks of {n} sequences was freed by someone else")
    for i in range(n):
        state = <PagedSeqState>states[i]
        if state.saved == NULL:
            state.c_forget(0)
            state.length = 0
        if close:
            state.c_close()
        else:
            state.c_release()
