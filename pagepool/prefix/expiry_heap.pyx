"""ExpiryHeap: nodes by the time at which something of theirs ends, without a clock.

A radix heap (Ahuja, Mehlhorn, Orlin and Tarjan, Faster algorithms for the shortest path problem, 1990): what is taken
out never ends before what was taken out earlier, so that a bucket for each bit of a time is order enough.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int32_t, int64_t, uint64_t

__all__ = ["ExpiryHeap"]


cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static inline uint64_t pp_time_key(double time)
    {
        uint64_t bits;
        time += 0.0; /* -0.0 is 0.0 */
        memcpy(&bits, &time, sizeof(bits));
        return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
    }
    /* Both for bits that are not 0. */
    static inline int pp_highest_bit(uint64_t bits) { return 63 - __builtin_clzll(bits); }
    static inline int pp_lowest_bit(uint64_t bits) { return __builtin_ctzll(bits); }
    """
    uint64_t pp_time_key(double time) noexcept nogil
    int pp_highest_bit(uint64_t bits) noexcept nogil
    int pp_lowest_bit(uint64_t bits) noexcept nogil


cdef uint64_t time_key(double time) noexcept nogil:
    return pp_time_key(time)


cdef inline int bucket_of(uint64_t end, uint64_t base) noexcept nogil:
    return 1 + pp_highest_bit(end ^ base) if end != base else 0


@cython.final
@cython.auto_pickle(False)
cdef class ExpiryHeap:
    """Nodes by their expiry. Internal: a policy adds nodes and takes those whose time has come."""

    def __cinit__(self):
        self.c_clear()

    def __dealloc__(self):
        PyMem_Free(self.expiries)

    cdef void c_clear(self) noexcept:
        cdef int bucket
        PyMem_Free(self.expiries)
        self.expiries = NULL
        self.room = 0
        self.base = self.filled = 0
        for bucket in range(65):
            self.heads[bucket] = self.tails[bucket] = -1

    cdef int c_reserve(self, int64_t room) except -1:
        cdef void *memory
        cdef int64_t node
        if room > self.room:
            memory = PyMem_Realloc(self.expiries, room * sizeof(Expiry))
            if memory == NULL:
                raise MemoryError(f"no memory for the expiries of {room} prefix nodes")
            self.expiries = <Expiry *>memory
            for node in range(self.room, room):
                self.expiries[node].bucket = -1
            self.room = room
        return 0

    cdef void c_add(self, int32_t node, uint64_t end) noexcept:
        self.expiries[node].end = end
        self.c_push(node)

    cdef void c_push(self, int32_t node) noexcept:
        cdef Expiry *expiry = &self.expiries[node]
        cdef int bucket = bucket_of(expiry.end, self.base)
        expiry.bucket = bucket
        expiry.previous = self.tails[bucket]
        expiry.next = -1
        if expiry.previous < 0:
            self.heads[bucket] = node
        else:
            self.expiries[expiry.previous].next = node
        self.tails[bucket] = node
        if bucket:
            self.filled |= <uint64_t>1 << (bucket - 1)

    cdef void c_remove(self, int32_t node) noexcept:
        cdef Expiry *expiry
        cdef int bucket
        if node >= self.room or self.expiries[node].bucket < 0:
            return
        expiry = &self.expiries[node]
        bucket = expiry.bucket
        if expiry.previous < 0:
            self.heads[bucket] = expiry.next
        else:
            self.expiries[expiry.previous].next = expiry.next
        if expiry.next < 0:
            self.tails[bucket] = expiry.previous
        else:
            self.expiries[expiry.next].previous = expiry.previous
        if bucket and self.heads[bucket] < 0:
            self.filled &= ~(<uint64_t>1 << (bucket - 1))
        expiry.bucket = -1

    cdef int32_t c_expired(self, uint64_t now) noexcept:
        cdef int32_t node
        if now < self.base:
            return -1
        while self.heads[0] < 0:
            # In buckets above that of now all ends are later.
            if self.filled == 0 or 1 + pp_lowest_bit(self.filled) > bucket_of(now, self.base):
                self.base = now
                return -1
            self.c_spread(1 + pp_lowest_bit(self.filled), now)
        node = self.heads[0]
        self.c_remove(node)
        return node

    cdef void c_spread(self, int bucket, uint64_t now) noexcept:
        """Moves base to the first end in the lowest bucket, at most to now, and its expiries to lower buckets."""
        cdef int32_t node = self.heads[bucket], next
        self.base = now
        while node >= 0:
            self.base = min(self.base, self.expiries[node].end)
            node = self.expiries[node].next
        node = self.heads[bucket]
        self.heads[bucket] = self.tails[bucket] = -1
        self.filled &= ~(<uint64_t>1 << (bucket - 1))
        while node >= 0:
            next = self.expiries[node].next
            self.c_push(node)
            node = next

    cdef str audit(self):
        """The first equation that does not hold, as a sentence, or None."""
        cdef int64_t node, linked = 0, number = 0
        cdef uint64_t marks = 0
        cdef int32_t before
        cdef int bucket
        for bucket in range(65):
            before, node = -1, self.heads[bucket]
            if bucket and node >= 0:
                marks |= <uint64_t>1 << (bucket - 1)
            while node >= 0:
                if self.expiries[node].previous != before or self.expiries[node].bucket != bucket:
                    return f"bucket {bucket} of expiries is broken at node {node}"
                if self.expiries[node].end <= self.base or bucket != bucket_of(self.expiries[node].end, self.base):
                    return f"the expiry of node {node} does not belong into bucket {bucket}"
                linked += 1
                before = <int32_t>node
                node = self.expiries[node].next
            if before != self.tails[bucket]:
                return f"bucket {bucket} of expiries ends at node {self.tails[bucket]}, not {before}"
        if marks != self.filled:
            return f"buckets {marks:#x} of expiries are not empty, {self.filled:#x} are marked"
        for node in range(self.room):
            number += self.expiries[node].bucket >= 0
        return None if linked == number else f"{number} nodes have expiries, {linked} are in buckets"
