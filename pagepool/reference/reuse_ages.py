"""After how long blocks are looked up again, and what it is worth to keep one of an age, in plain Python:
`pagepool/prefix/reuse_ages.pyx` says what it is about."""

from __future__ import annotations

__all__ = ["AGES", "KINDS", "ReuseAges", "age_class", "first_age"]

KINDS, AGES = 8, 64


def age_class(age: int) -> int:
    """Two classes to each doubling: 0 for 1, then 2, 3, 4-5, 6-7, 8-11, ...

    >>> [age_class(age) for age in (1, 2, 3, 4, 5, 6, 8, 12)]
    [0, 1, 2, 3, 3, 4, 5, 6]
    """
    octave = max(age, 1).bit_length() - 1
    return min(AGES - 1, 2 * octave - (age < 3 * 2**octave // 2)) if octave else 0


def first_age(number: int) -> float:
    """The first age of a class."""
    octave = (number + 1) // 2
    return 2.0**octave if number % 2 or not octave else 1.5 * 2.0**octave


class ReuseAges:
    """Counts of the ages at which nodes of each kind were used again or forgotten, and the values learnt from them."""

    FADE, SHARED = 0.97, 100.0

    def __init__(self) -> None:
        self.used = [[0.0] * AGES for _ in range(KINDS)]
        self.gone = [[0.0] * AGES for _ in range(KINDS)]
        self.value = [[1.0 / first_age(age) for age in range(AGES)] for _ in range(KINDS)]

    def learn(self, alive: list[list[float]]) -> None:
        """The value of an age: the best ratio of hits to time over every later age that one could wait for."""
        used, ended, total = [0.0] * AGES, [0.0] * AGES, 0.0
        for age in range(AGES):
            for kind in range(KINDS):
                used[age] += self.used[kind][age]
                ended[age] += self.gone[kind][age] + alive[kind][age]
            total += used[age] + ended[age]
        weight = self.SHARED / max(total, 1.0)
        for kind in range(KINDS):
            reused, waited, left = [0.0] * (AGES + 2), [0.0] * (AGES + 2), 0.0  # of an age at age + 1
            for age in reversed(range(AGES)):
                own_used = self.used[kind][age] + weight * used[age]
                own_ended = self.gone[kind][age] + alive[kind][age] + weight * ended[age]
                width = first_age(age + 1) - first_age(age)
                reused[age + 1] = own_used * first_age(age + 1)
                waited[age + 1] = left * width + (own_used + own_ended) * width * 0.5
                left += own_used + own_ended
            self.value[kind] = best_ratios(reused, waited)
            for age in range(AGES):
                self.used[kind][age] *= self.FADE
                self.gone[kind][age] *= self.FADE


def best_ratios(reused: list[float], waited: list[float]) -> list[float]:
    """The rate of reuse times the age is a mean over an age and its neighbours, one part of four from each."""
    hits, time, hull, value = [0.0] * (AGES + 1), [0.0] * (AGES + 1), [AGES], [0.0] * AGES

    def slope(first: int, last: int) -> float:
        waited = time[last] - time[first]
        return (hits[last] - hits[first]) / waited if waited > 0.0 else 0.0

    for age in reversed(range(AGES)):
        rate = waited[age] + 2.0 * waited[age + 1] + waited[age + 2]
        if rate > 0.0:
            rate = (reused[age] + 2.0 * reused[age + 1] + reused[age + 2]) / (rate * first_age(age + 1))
        hits[age] = hits[age + 1] - rate * waited[age + 1]
        time[age] = time[age + 1] - waited[age + 1]
        while len(hull) > 1 and slope(age, hull[-1]) <= slope(hull[-1], hull[-2]):
            hull.pop()
        value[age] = slope(age, hull[-1])
        hull.append(age)
    return value
