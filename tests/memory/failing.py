"""Make each allocation of an operation fail in turn, in a process with failing_malloc preloaded."""

import ctypes
import gc
import json

from pagepool import PoolError

ROUNDS = 12  # repetitions of each failure, to detect leaks
countdown = ctypes.c_long.in_dll(ctypes.CDLL(None), "failing_countdown")
live = ctypes.c_long.in_dll(ctypes.CDLL(None), "failing_live")
mapped = ctypes.c_long.in_dll(ctypes.CDLL(None), "failing_mapped")


def take_spares():
    """Empty CPython's free lists, so that each new object allocates memory.

    CPython 3.11 then crashes in `dict.items`, so operations that call it cannot use this.
    """
    tuples = [[tuple(range(size)) for _ in range(2010)] for size in range(1, 5)]
    return tuples, [[] for _ in range(100)], [{} for _ in range(100)], [float(i) for i in range(200)]


class Failing:
    """Run operations on objects of the class `world`. A failed operation must not change the world's `picture()`."""

    def __init__(self, world, plain_python, refused):
        self.once = getattr(world, "once", False)  # whether each operation needs a new world
        self.world = world
        self.plain_python = plain_python
        self.refused = refused

    def attempt(self, operation, world, n):
        """Return True if allocation n failed the operation, "survived" if the operation succeeded without it."""
        spares = take_spares() if self.once else None
        countdown.value = n
        try:
            operation(world)
        except MemoryError as error:
            assert not isinstance(error, PoolError), error
            return True
        except PoolError:
            assert operation in self.refused
        except SystemError as error:  # CPython 3.11 loses the MemoryError of a frame
            assert operation in self.plain_python and str(error) == "error return without exception set"
            return operation not in self.refused or "survived"
        finally:
            fired = countdown.value == 0
            countdown.value = 0
            del spares
        return fired and "survived"

    def fail_in_turn(self, operation):
        """Count the failing allocations of the operation. Raises AssertionError if one changes or leaks something."""
        self.attempt(operation, self.world(), 0)  # warm-up: allocates objects that are created on first use
        failures = 0
        for n in range(1, 2000):
            world = self.world()
            before = world.picture()
            outcome = self.attempt(operation, world, n)
            if outcome is False:
                return failures
            if outcome == "survived":
                continue  # the caller did not need the memory
            failures += 1
            now = world.picture()
            assert now == before, f"allocation {n} failed and something changed"
            if self.once:
                continue  # CPython 3.11 itself leaks objects here, such as the list in `list(it)`
            start = live.value, mapped.value
            for _ in range(ROUNDS):
                self.attempt(operation, world, n)
            gc.collect()
            lost = live.value - start[0], mapped.value - start[1]
            assert lost[0] < ROUNDS and lost[1] <= 0, f"allocation {n} failed and {lost} blocks and bytes were lost"
        raise AssertionError("the operation never succeeds")


def fail_all(world, operations, plain_python, refused=()):
    """Print as JSON the number of allocations that failed each operation, or the error."""
    by_name = operations.__getitem__
    failing = Failing(world, list(map(by_name, plain_python)), list(map(by_name, refused)))
    results = {}
    for name, operation in operations.items():
        try:
            results[name] = failing.fail_in_turn(operation)
        except AssertionError as error:
            results[name] = str(error)
    print(json.dumps(results))
