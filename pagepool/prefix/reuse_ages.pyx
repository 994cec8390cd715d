"""ReuseAges: after how long blocks are looked up again, and what it is worth to keep one of an age.

The value of keeping a block is its Gittins index: over every time T that one could wait, the best ratio of the chance
that it is looked up within T to the time that it is expected to stay until it is looked up or T has passed (Gittins,
Bandit processes and dynamic allocation indices, 1979; hit density as a rule of eviction is in LHD, Beckmann, Chen and
Cidon, NSDI'18). With hits H and time C added up over the ages it is the steepest line from a point (C, H) to a later
one: one pass over their upper convex hull.

Counts are few where it matters, and blocks of one request come back together. So the rate of reuse, which in most
loads falls about as 1 / age, is taken times the age as a mean over a class and its two neighbours.
"""

cimport cython
from libc.stdint cimport int64_t

__all__ = ["ReuseAges"]

cdef double SHARED = 100.0  # blocks of all kinds together that each kind is taken to have beside its own


@cython.final
@cython.auto_pickle(False)
cdef class ReuseAges:
    """Counts of ages and the values learnt from them. Internal: a policy counts and asks."""

    def __cinit__(self):
        cdef int age
        for age in range(AGES + 1):
            self.first[age] = first_age(age)
        self.c_clear()

    cdef void c_clear(self) noexcept:
        """Nothing is known: what was used last is worth most."""
        cdef int kind, age
        for kind in range(KINDS):
            for age in range(AGES):
                self.used[kind][age] = self.gone[kind][age] = self.alive[kind][age] = 0.0
                self.value[kind][age] = 1.0 / self.first[age]

    cdef void c_count_used(self, int kind, int64_t age, int64_t n) noexcept:
        cdef int64_t end = age + n, after
        cdef int now
        while age < end:
            now = age_class(age)
            after = end if now == AGES - 1 else min(end, <int64_t>self.first[now + 1])
            self.used[kind][now] = add_ones(self.used[kind][now], after - age)
            age = after

    cdef void c_learn(self, int64_t clock) noexcept:
        """What happened at no age yet, and not before, has nothing to say: O(kinds * classes up to the age of all)."""
        cdef double used[64]
        cdef double ended[64]
        cdef double total = 0.0
        cdef int kind, age, last = min(AGES - 1, age_class(clock) + 1)
        for age in range(AGES):
            used[age] = ended[age] = 0.0
            for kind in range(KINDS):
                used[age] += self.used[kind][age]
                ended[age] += self.gone[kind][age] + self.alive[kind][age]
            total += used[age] + ended[age]
        for kind in range(KINDS):
            self.c_learn_kind(kind, last, used, ended, SHARED / max(total, 1.0))
            for age in range(AGES):
                self.used[kind][age] *= FADE
                self.gone[kind][age] *= FADE
                self.alive[kind][age] = 0.0

    cdef void c_learn_kind(self, int kind, int last, const double *used, const double *ended, double weight) noexcept:
        """`hull` has those later points that a steepest line may end at; after age `last` all are one."""
        cdef double reused[66]
        cdef double waited[66]
        cdef double hits[65]
        cdef double time[65]
        cdef int hull[65]
        cdef double left = 0.0, own_used, own_ended, width, rate, best
        cdef int age, top = 0
        reused[0] = waited[0] = reused[last + 2] = waited[last + 2] = 0.0
        for age in range(last, -1, -1):
            own_used = self.used[kind][age] + weight * used[age]
            own_ended = self.gone[kind][age] + self.alive[kind][age] + weight * ended[age]
            width = self.first[age + 1] - self.first[age]
            reused[age + 1] = own_used * self.first[age + 1]
            waited[age + 1] = left * width + (own_used + own_ended) * width * 0.5
            left += own_used + own_ended
        hits[64] = time[64] = 0.0
        hits[last + 1] = time[last + 1] = 0.0
        hull[0] = 64
        for age in range(last, -1, -1):
            rate = waited[age] + 2.0 * waited[age + 1] + waited[age + 2]
            if rate > 0.0:
                rate = (reused[age] + 2.0 * reused[age + 1] + reused[age + 2]) / (rate * self.first[age + 1])
            # Counted backwards, both fall below 0: only differences matter.
            hits[age] = hits[age + 1] - rate * waited[age + 1]
            time[age] = time[age + 1] - waited[age + 1]
            best = slope(hits, time, age, hull[top])
            while top > 0 and best <= slope(hits, time, hull[top], hull[top - 1]):
                top -= 1
                best = slope(hits, time, age, hull[top])
            top += 1
            hull[top] = age
            self.value[kind][age] = best
        for age in range(last + 1, AGES):
            self.value[kind][age] = 0.0


cdef inline double slope(const double *hits, const double *time, int first, int last) noexcept:
    cdef double waited = time[last] - time[first]
    return (hits[last] - hits[first]) / waited if waited > 0.0 else 0.0
