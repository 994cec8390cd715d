from libc.stdint cimport int64_t


cdef enum:
    KINDS = 8
    AGES = 64

cdef extern from *:
    """
    #include <stdint.h>
    /* Of what was counted, each time that values are learnt. */
    #define PP_FADE 0.97
    static inline int pp_age_class(int64_t age)
    {
        int octave;
        if (age < 2) return 0;
        octave = 63 - __builtin_clzll((unsigned long long)age);
        octave = 2 * octave + (int)((age >> (octave - 1)) & 1) - 1;
        return octave < 64 ? octave : 63;
    }
    static inline double pp_first_age(int age_class)
    {
        int octave = (age_class + 1) / 2;
        double first = (double)((uint64_t)1 << octave);
        return (age_class + 1) % 2 && octave > 0 ? first * 1.5 : first;
    }
    """
    double FADE "PP_FADE"
    # The class of an age, two to each doubling: 0 for 1, then 2, 3, 4-5, 6-7, 8-11, 12-15, ...
    int age_class "pp_age_class"(int64_t age) noexcept nogil
    # The first age of a class.
    double first_age "pp_first_age"(int age_class) noexcept nogil


# count + 1 + ... + 1, each sum rounded as when they come one at a time: what is decided must not depend on that.
cdef inline double add_ones(double count, int64_t n) noexcept nogil:
    for _ in range(n):
        count += 1.0
    return count


cdef class ReuseAges:
    # Of each kind, by the age at which it happened: counts that fade, so that the recent past has the say.
    cdef double used[8][64]  # KINDS, AGES: looked up again
    cdef double gone[8][64]  # forgotten
    cdef double alive[8][64]  # not yet either: counted before each c_learn, which clears it
    cdef double first[65]  # age of a class, and of one more
    cdef double value[8][64]  # hits to be had, for each unit of time that a block of that kind and age is kept

    cdef void c_clear(self) noexcept
    # n blocks of a kind were looked up again one after the other, the first at that age.
    cdef void c_count_used(self, int kind, int64_t age, int64_t n) noexcept
    # From the counts to the values; nothing is older than `clock`.
    cdef void c_learn(self, int64_t clock) noexcept
    cdef void c_learn_kind(self, int kind, int last, const double *used, const double *ended, double weight) noexcept
