from libc.stdint cimport int32_t


cdef struct Audit:
    const char *equation  # the broken one, or NULL
    int32_t left
    int32_t right


# Marks and unmarks counts while it works: the caller holds the lock that guards them.
cdef Audit audit_counts(const int32_t *freed, int32_t num_freed, int32_t taken, int32_t capacity,
                        int32_t *counts) noexcept nogil
