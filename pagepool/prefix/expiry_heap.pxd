from libc.stdint cimport int32_t, int64_t, uint64_t


cdef struct Expiry:
    uint64_t end
    int32_t previous
    int32_t next
    int32_t bucket  # -1: the node has no expiry


# Times as integers in the same order, none of them 0; not for NaN.
cdef uint64_t time_key(double time) noexcept nogil


cdef class ExpiryHeap:
    # Expiries of nodes, by node; a radix heap. With base, the latest time asked for, between two calls of c_expired:
    #   end > base, and the bucket of an expiry is 1 + the highest bit in which end and base differ; bucket 0 is empty
    #   bit b of filled is set when bucket 1 + b is not empty
    cdef Expiry *expiries
    cdef int64_t room
    cdef uint64_t base
    cdef uint64_t filled
    cdef int32_t heads[65]
    cdef int32_t tails[65]

    # Room for the expiries of nodes 0 to room - 1.
    cdef int c_reserve(self, int64_t room) except -1
    # The node, which has none, gets an expiry that ends after base; `c_reserve` first.
    cdef void c_add(self, int32_t node, uint64_t end) noexcept
    # The node has no expiry from now on, if it had one.
    cdef void c_remove(self, int32_t node) noexcept
    # Takes out the node whose expiry ended first, of several the one added first; -1 when no other ended by now. Asked
    # until it says -1. O(1) amortised: an expiry moves to a lower bucket each time that it is looked at.
    cdef int32_t c_expired(self, uint64_t now) noexcept
    cdef void c_clear(self) noexcept
    cdef void c_push(self, int32_t node) noexcept
    cdef void c_spread(self, int bucket, uint64_t now) noexcept
    cdef str audit(self)
