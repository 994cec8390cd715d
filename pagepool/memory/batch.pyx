"""Appends to the sequences of a batch, or frees their blocks. Each call changes all sequences or none."""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from pagepool.csrc cimport PP_INVALID_ARGUMENT, PP_INVALID_BLOCK, PP_OK, PP_OVER_MAXIMUM, pp_status
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.arrays cimport HAS_GIL, read_count, read_counts
from pagepool.memory.block_table cimport PagedSeqState
from pagepool.memory.page_buffer cimport PageBuffer

from collections import Counter

import numpy as np

from pagepool.errors import InvalidBlock
from pagepool.memory.explain import closed

__all__ = ["append_batch", "group_append", "group_close", "group_truncate", "release_batch", "require_truncate"]

cdef object empty = np.empty
cdef object INT64 = np.dtype(np.int64)
cdef extern from *:
    """
    #define pp_next_call(calls) (__atomic_fetch_add(calls, 1, __ATOMIC_RELAXED) + 1)
    """
    int64_t pp_next_call(int64_t *calls) nogil

cdef int64_t calls = 0  # numbers the calls: a state that has this number already was given twice


cdef BlockAllocator common_allocator(list states):
    """The one allocator of all states, None without states. Raises for another type, or a state given twice."""
    cdef int64_t call = pp_next_call(&calls)
    cdef BlockAllocator allocator = None
    cdef PagedSeqState state
    cdef Py_ssize_t i
    for i in range(len(states)):
        item = states[i]
        if not isinstance(item, PagedSeqState):
            raise TypeError(f"sequence {i} must be a PagedSeqState, not {type(item).__name__}")
        state = <PagedSeqState>item
        if state.call == call:
            raise ValueError(f"sequence {i} is given twice in one call")
        state.call = call
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


cdef int64_t last_to_share(list states) except -1:
    """Number of shared blocks that need no copy, because earlier states of the batch drop the other references
    first."""
    cdef PagedSeqState state
    cdef int64_t i, end, kept = 0
    cdef int32_t block, count
    dropped = Counter()
    for state in states:
        if state.pending:
            end = state.c_needed(state.length + state.pending)
            for i in range(state.length // state.block_size, min(end, state.num_blocks)):
                block = state.c_blocks[i]
                count = state.allocator.c_ref_count(block)
                if count > 1 and count - dropped[block] <= 1:
                    kept += 1
                else:
                    dropped[block] += 1
    return kept


def append_batch(list states not None, list counts not None):
    """Appends counts[i] tokens to states[i], to all states or to none.

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
    if not HAS_GIL:  # another thread may change the list meanwhile
        states = list(states)
    if len(counts) != n or len(states) != n:
        raise ValueError(f"{len(states)} sequences and {len(counts)} counts do not match")
    allocator = common_allocator(states)
    for i in range(n):
        state = <PagedSeqState>states[i]
        state.pending = read_count(counts[i])
        wanted = state.c_blocks_to_append(state.pending)
        if state.is_closed:
            raise closed(f"sequence {i}", state.label)
        if wanted < 0:
            raise ValueError(
                f"cannot append {counts[i]} tokens to the {state.length} of sequence {i}: "
                f"it may have from 0 to {state.max_blocks_per_seq * <int64_t>state.block_size}"
            )
        total += wanted
    if total and total > allocator.c_free_count():  # no copy is counted for the last sharer of a block
        total -= last_to_share(states)
        if total > allocator.c_available():
            raise allocator.refused(total)
    taken = room_for(total)
    try:
        if total and allocator.c_allocate_n(<int32_t>total, taken) != PP_OK:
            raise allocator.refused(total)
        for i in range(n):
            state = <PagedSeqState>states[i]
            used += state.c_append_taken(state.pending, taken + used)
        while total > used:  # the last one first: they are handed out again in the same order
            total -= 1
            allocator.c_free(taken[total])
    finally:
        free(taken)


def release_batch(list states not None, bint close=False):
    """Releases every state, or none of them. With `close` closes every state.

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
    cdef BlockAllocator allocator
    cdef PagedSeqState state
    cdef Py_ssize_t i, n
    cdef int64_t total = 0
    cdef int32_t *blocks
    cdef int32_t held
    cdef pp_status status
    if not HAS_GIL:
        states = list(states)
    n = len(states)
    if n == 0:
        return
    allocator = common_allocator(states)
    for i in range(n):
        state = <PagedSeqState>states[i]
        if state.is_closed:
            raise closed(f"sequence {i}", state.label)
        total += state.num_blocks - state.first_block
    blocks = room_for(total)
    total = 0
    for i in range(n):
        state = <PagedSeqState>states[i]
        held = state.num_blocks - state.first_block
        memcpy(blocks + total, state.c_blocks + state.first_block, <size_t>held * sizeof(int32_t))
        total += held
    status = allocator.c_free_n(blocks, total)
    free(blocks)
    if status != PP_OK:
        raise InvalidBlock(f"one of the {total} blocks of {n} sequences was freed by someone else")
    for i in range(n):
        state = <PagedSeqState>states[i]
        state.c_forget(0)
        state.length = 0
        state.is_closed = close


cdef int32_t first_needed(PagedSeqState state, int64_t position) noexcept:
    """The first block that is kept when the blocks before a position are freed."""
    return max(state.first_block, <int32_t>(min(position, state.length) // state.block_size))


cdef int64_t move(PagedSeqState state, int64_t position, const int32_t *moved, int64_t count) noexcept:
    """Removes the blocks before the position from the table, and frees them unless they are in `moved`.

    The blocks in `moved`, in the order of the tables, are kept for the new tokens. Returns how many blocks of `moved`
    were in this table.
    """
    cdef int64_t met = 0
    cdef int32_t i, block, first = first_needed(state, position)
    for i in range(state.first_block, first):
        block = state.c_blocks[i]
        if met < count and moved[met] == block:
            met += 1
        else:
            state.allocator.c_free(block)
        state.c_blocks[i] = -1
    state.first_block = first
    return met


def group_append(list states not None, n, list positions not None):
    """Appends n tokens to every state; returns their slots, one int64 array (n,) for each.

    Frees the blocks before positions[i] of state i first. New tokens reuse the freed blocks that were not shared, so a
    window advances in a full pool. The states are distinct and may have several allocators. Raises as
    `PagedSeqState.append`; then nothing has changed.
    """
    cdef PagedSeqState state
    cdef BlockAllocator allocator
    cdef int64_t number = read_count(n), start, wanted, met, used, total, own
    cdef Py_ssize_t i
    cdef int32_t place
    cdef PageBuffer blocks
    cdef list slots = [], views = [], plans = [], spare, members
    cdef dict by_allocator = {}
    cdef int64_t[::1] row
    cdef bint moves = False
    for i in range(len(states)):
        state = <PagedSeqState?>states[i]
        wanted = state.c_blocks_to_append(number)
        if wanted < 0:
            if number < 0 or state.is_closed:
                raise state.failed(PP_INVALID_ARGUMENT, n, 0)
            raise state.failed(PP_OVER_MAXIMUM, state.length + n, 0)
        if wanted > state.allocator.max_capacity:  # instead of a MemoryError for the slots
            raise state.allocator.refused(wanted)
        start = positions[i]
        moves = moves or wanted > 0 or first_needed(state, start) > state.first_block
        row = empty(number, INT64)
        slots.append(row.base)
        views.append(row)
        by_allocator.setdefault(state.allocator, []).append((state, start, wanted))
    if moves:
        for allocator, members in by_allocator.items():
            spare = []
            total = 0
            for state, start, wanted in members:
                total += wanted
                for place in range(state.first_block, first_needed(state, start)):
                    if not allocator.c_is_shared(state.c_blocks[place]):
                        spare.append(state.c_blocks[place])
            blocks = PageBuffer(total, "i")
            own = min(len(spare), total)
            plans.append((allocator, members, blocks, own, total))
            for i in range(own):
                (<int32_t *>blocks.base)[i] = spare[i]
        for allocator, _, _, own, total in plans:  # all are checked before the first sequence grows
            if total - own > allocator.c_available():
                raise allocator.refused(total - own)
        for i in range(len(plans)):  # fails only if another thread takes blocks meanwhile
            allocator, _, blocks, own, total = plans[i]
            if total > own and allocator.c_allocate_n(<int32_t>(total - own), <int32_t *>blocks.base + own) != PP_OK:
                give_back(plans, i)
                raise allocator.refused(total - own)
        for allocator, members, blocks, own, total in plans:
            met = 0
            for state, start, _ in members:
                met += move(state, start, <int32_t *>blocks.base + met, own - met)
            used = 0
            for state, _, _ in members:
                used += state.c_append_taken(number, <int32_t *>blocks.base + used)
            while used < total:
                total -= 1
                allocator.c_free((<int32_t *>blocks.base)[total])
    else:
        for state in states:
            state.c_append_taken(number, NULL)
    for i in range(len(states)):
        state = <PagedSeqState>states[i]
        if number:
            row = views[i]
            state.c_slots(state.length - number, number, &row[0])
    return slots


cdef int give_back(list plans, Py_ssize_t count) except -1:
    """Frees the new blocks of the first `count` plans."""
    cdef BlockAllocator allocator
    cdef PageBuffer blocks
    cdef int64_t own, total
    for count in range(count - 1, -1, -1):
        allocator, _, blocks, own, total = plans[count]
        while total > own:
            total -= 1
            allocator.c_free((<int32_t *>blocks.base)[total])
    return 0


cpdef int require_truncate(list states, int64_t length) except -1:
    """Raises what `group_truncate` would raise; changes nothing."""
    cdef PagedSeqState state
    cdef pp_status status
    cdef Py_ssize_t i
    for i in range(len(states)):
        state = <PagedSeqState?>states[i]
        status = state.c_may_truncate(length)
        if status != PP_OK:
            raise state.failed(status, length, 0)
    return 0


def group_truncate(list states not None, int64_t length):
    """Keeps the first `length` tokens of every state, or changes none of them.

    The states are distinct and may have several allocators. Raises as `PagedSeqState.truncate`. Needs no memory.
    """
    cdef Py_ssize_t i
    require_truncate(states, length)
    for i in range(len(states)):
        (<PagedSeqState>states[i]).c_truncate(length)


def group_close(list states not None):
    """Closes every state, or changes none of them. Raises as `PagedSeqState.close`. Needs no memory."""
    cdef PagedSeqState state
    cdef Py_ssize_t i
    for i in range(len(states)):
        state = <PagedSeqState?>states[i]
        if not state.is_closed and state.c_may_truncate(0) != PP_OK:
            raise state.failed(PP_INVALID_BLOCK, 0, 0)
    for i in range(len(states)):
        (<PagedSeqState>states[i]).c_close()
