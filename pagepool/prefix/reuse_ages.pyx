"""ReuseAges: after how long blocks are looked up again, and what it is worth to keep one of an age.

The value of keeping a block is its Gittins index: over every time T that one could wait, the best ratio of the chance
that it is looked up within T to the time that it is expected to stay until it is looked up or T has passed (Gittins,
Bandit processes and dynamic allocation indices, 1979; hit density as a rule of eviction is in LHD, Beckmann, Chen and
Cidon, NSDI'18). With hits H and time C added up over the ages it is the steepest line from a point (C, H) to a later
one: one pass over their upper convex hull.
"""

cimport cython
from libc.stdint cimport int64_t

__all__ = ["ReuseAges"]

cdef double FADE = 0.98  # of the counts, each time that values are learnt
cdef double SHARED = 500.0  # blocks of all kinds together that each kind is taken to have beside its own


cdef extern from *:
    """
    static inline int pp_age_class(int64_t age)
    {
        int octave;
        if (age < 2) return 0;
        octave = 63 - __builtin_clzll((unsigned long long)age);
        octave = 2 * octave + (int)((age >> (octave - 1)) & 1) - 1;
        return octave < 64 ? octave : 63;
    }
    /* The first age of a class. */
    static inline double pp_first_age(int age_class)
    {
        int octave = (age_class + 1) / 2;
        double first = (double)((uint64_t)1 << octave);
        return (age_class + 1) % 2 && octave > 0 ? first * 1.5 : first;
    }
    """
    int pp_age_class(int64_t age) noexcept nogil
    double pp_first_age(int age_class) noexcept nogil


cdef int age_class(int64_t age) noexcept nogil:
    return pp_age_class(age)


@cython.final
@cython.auto_pickle(False)
cdef class ReuseAges:
    """Counts of ages and the values learnt from them. Internal: a policy counts and asks."""

    def __cinit__(self):
        self.c_clear()

    cdef void c_clear(self) noexcept:
        """Nothing is known: what was used last is worth most."""
        cdef int kind, age
        for kind in range(KINDS):
            for age in range(AGES):
                self.used[kind][age] = self.gone[kind][age] = self.alive[kind][age] = 0.0
                self.value[kind][age] = 1.0 / pp_first_age(age)

    cdef void c_learn(self) noexcept:
        cdef double used[64]
        cdef double ended[64]
        cdef double total = 0.0
        cdef int kind, age
        for age in range(AGES):
            used[age] = ended[age] = 0.0
            for kind in range(KINDS):
                used[age] += self.used[kind][age]
                ended[age] += self.gone[kind][age] + self.alive[kind][age]
            total += used[age] + ended[age]
        for kind in range(KINDS):
            self.c_learn_kind(kind, used, ended, SHARED / max(total, 1.0))
            for age in range(AGES):
                self.used[kind][age] *= FADE
                self.gone[kind][age] *= FADE

    cdef void c_learn_kind(self, int kind, const double *used, const double *ended, double weight) noexcept:
        """The points from the last age to the first; `hull` has those later ones that a steepest line may end at."""
        cdef double hits[65]
        cdef double time[65]
        cdef int hull[65]
        cdef double left = 0.0, own_used, own_ended, width, best
        cdef int age, top = 0
        hits[64] = time[64] = 0.0
        hull[0] = 64
        for age in range(AGES - 1, -1, -1):
            own_used = self.used[kind][age] + weight * used[age]
            own_ended = self.gone[kind][age] + self.alive[kind][age] + weight * ended[age]
            width = pp_first_age(age + 1) - pp_first_age(age)
            # Counted backwards, both fall below 0: only differences matter.
            hits[age] = hits[age + 1] - own_used
            time[age] = time[age + 1] - (left * width + (own_used + own_ended) * width * 0.5)
            left += own_used + own_ended
            best = slope(hits, time, age, hull[top])
            while top > 0 and best <= slope(hits, time, hull[top], hull[top - 1]):
                top -= 1
                best = slope(hits, time, age, hull[top])
            top += 1
            hull[top] = age
            self.value[kind][age] = best


cdef inline double slope(const double *hits, const double *time, int first, int last) noexcept:
    cdef double waited = time[last] - time[first]
    return (hits[last] - hits[first]) / waited if waited > 0.0 else 0.0
