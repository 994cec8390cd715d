"""Appending the same tokens to the block tables of one sequence, each of them with its own window: all or none."""

from libc.stdint cimport int32_t, int64_t

from pagepool.csrc cimport PP_INVALID_ARGUMENT, PP_OK, PP_OVER_MAXIMUM
from pagepool.memory.allocator cimport BlockAllocator
from pagepool.memory.ids cimport read_count
from pagepool.memory.page_buffer cimport PageBuffer
from pagepool.memory.block_table cimport PagedSeqState
from pagepool.memory.block_table cimport saved_needs, saved_takes

import numpy as np

from pagepool.memory.explain import exhausted

__all__ = ["append_each"]

cdef object empty = np.empty
cdef object INT64 = np.dtype(np.int64)


cdef int32_t first_kept(PagedSeqState state, int64_t position) noexcept:
    """The first block that stays when what lies before the position goes."""
    return max(state.first_block, <int32_t>(min(position, state.length) // state.block_size))


cdef bint can_move(PagedSeqState state, int32_t place) noexcept:
    """Whether a block that the window left is nobody else's, so that it may hold new tokens right away."""
    cdef int32_t block = state.c_blocks[place]
    return not state.allocator.c_is_shared(block) and (
        state.saved == NULL or not saved_needs(state.saved, place, block)
    )


cdef int64_t move(PagedSeqState state, int64_t position, const int32_t *moved, int64_t count) noexcept:
    """Takes what lies before the position out of the table; its reference goes to whoever it is due to.

    `moved` are the next that new tokens will have, in the order of the tables; returns how many of them it met.
    """
    cdef int64_t met = 0
    cdef int32_t i, block, first = first_kept(state, position)
    for i in range(state.first_block, first):
        block = state.c_blocks[i]
        if met < count and moved[met] == block:
            met += 1
        elif state.saved == NULL or not saved_takes(state.saved, i, block):
            state.allocator.c_free(block)
        state.c_blocks[i] = -1
    state.first_block = first
    return met


def append_each(list states not None, n, list positions not None):
    """Appends n tokens to every state; returns their slots, one int64 array (n,) for each.

    What lies before positions[i] of state i is given back first, and what was its alone holds new tokens at once: a
    window that moves takes nothing from an allocator that is empty. The states are distinct and may have several
    allocators. Raises as `PagedSeqState.append`; then nothing has changed, and nothing was given back either.
    """
    cdef PagedSeqState state
    cdef BlockAllocator allocator
    cdef int64_t number = read_count(n), wanted, used, total, own
    cdef Py_ssize_t i, k
    cdef int32_t place
    cdef PageBuffer blocks
    cdef list counts = [], slots = [], allocators = [], plans, spare
    cdef int64_t met
    cdef int64_t[::1] starts = np.array(positions, dtype=np.int64)
    cdef list views = []
    cdef int64_t[::1] row
    cdef bint moves = False
    for i in range(len(states)):
        state = <PagedSeqState?>states[i]
        wanted = state.c_blocks_to_append(number)
        if wanted < 0:
            if number < 0 or state.is_closed:
                raise state.failed(PP_INVALID_ARGUMENT, number, 0)
            raise state.failed(PP_OVER_MAXIMUM, state.length + number, 0)
        counts.append(wanted)
        moves = moves or wanted > 0 or first_kept(state, positions[i]) > state.first_block
        row = empty(number, INT64)
        slots.append(row.base)
        views.append(row)
        if not any([state.allocator is known for known in allocators]):
            allocators.append(state.allocator)
    if moves:
        plans = [None] * len(allocators)
        for k in range(len(allocators)):
            allocator = <BlockAllocator>allocators[k]
            spare = []
            total = 0
            for i in range(len(states)):
                state = <PagedSeqState>states[i]
                if state.allocator is allocator:
                    total += counts[i]
                    for place in range(state.first_block, first_kept(state, positions[i])):
                        if can_move(state, place):
                            spare.append(state.c_blocks[place])
            blocks = PageBuffer(total, "i")
            own = min(len(spare), total)
            plans[k] = (allocator, blocks, own, total)
            for i in range(own):
                (<int32_t *>blocks.base)[i] = spare[i]
        for allocator, _, own, total in plans:  # before any grows
            if total - own > allocator.c_available():
                raise exhausted(total - own, allocator.c_available(), allocator.max_capacity)
        for k in range(len(plans)):  # only now is anything taken, and nothing but another thread can make it fail
            allocator, blocks, own, total = plans[k]
            if total > own and allocator.c_allocate_n(<int32_t>(total - own), <int32_t *>blocks.base + own) != PP_OK:
                give_back(plans, k)
                raise exhausted(total - own, allocator.c_available(), allocator.max_capacity)
        for allocator, blocks, own, total in plans:
            met = 0
            for i in range(len(states)):
                state = <PagedSeqState>states[i]
                if state.allocator is allocator:
                    met += move(state, starts[i], <int32_t *>blocks.base + met, own - met)
            used = 0
            for i in range(len(states)):
                state = <PagedSeqState>states[i]
                if state.allocator is allocator:
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
    """What was taken for the allocators before one that had too little."""
    cdef BlockAllocator allocator
    cdef PageBuffer blocks
    cdef int64_t own, total
    for count in range(count - 1, -1, -1):
        allocator, blocks, own, total = plans[count]
        while total > own:
            total -= 1
            allocator.c_free((<int32_t *>blocks.base)[total])
    return 0
