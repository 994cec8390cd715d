"""The audit of an allocator: every equation that its free list and its reference counts must satisfy."""

from libc.stdint cimport int32_t

__all__ = []


cdef Audit audit_counts(const int32_t *freed, int32_t num_freed, int32_t taken, int32_t capacity,
                        int32_t *counts) noexcept nogil:
    """Marks each listed block with a count of -1, so that a block listed twice shows, and takes the marks off."""
    cdef Audit audit = Audit(NULL, 0, 0)
    cdef int32_t i, block, marked = 0, used = 0
    if not 0 <= num_freed <= taken <= capacity:
        return Audit(b"0 <= num_freed <= taken <= capacity", num_freed, taken)
    for i in range(num_freed):
        block = freed[i]
        if not 0 <= block < taken:
            audit = Audit(b"a listed block is below taken", block, taken)
            break
        if counts[block] != 0:
            audit = Audit(b"a listed block has count 0, or -1 if it is listed twice", block, counts[block])
            break
        counts[block] = -1
        marked += 1
    for i in range(marked):
        counts[freed[i]] = 0
    if audit.equation != NULL:
        return audit
    for i in range(taken):
        if counts[i] < 0:
            return Audit(b"ref_count >= 0", i, counts[i])
        used += counts[i] > 0
    if used + num_freed != taken:
        return Audit(b"free + in_use == capacity", capacity - taken + num_freed, used)
    return audit
