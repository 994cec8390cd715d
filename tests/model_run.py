"""Run a long random program on the compiled memory and on the reference. Compare all results and, regularly, all state.

python tests/model_run.py --ops 10000000 --seed 1. The seed is printed first; the same seed runs the same program. At
the end a table shows how often each operation was drawn, done and refused.

One step is one operation on both sides: on allocators that grow and shrink, sequences, hybrid sequences, the prefix
cache, recurrent states and their checkpoints, or closed objects. Keys in the pages encode the token, and states the
tokens that they have seen. So the expected contents of a sequence after forks, copies, truncations, cache hits and
rollbacks are known without any implementation.
"""

import argparse
import ctypes
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import model_blocks
import model_cache
import model_hybrid
from model_world import Divergence

import pagepool
from pagepool import PoolError

STEPS_PER_WORLD = 4000
STEPS_PER_COMPARISON = 100


# Relative frequency of each operation.
OPERATIONS = {
    **model_blocks.OPERATIONS,
    **model_cache.OPERATIONS,
    **model_hybrid.OPERATIONS,
}
NAMES = [name for name, often in OPERATIONS.items() for _ in range(round(10 * often))]


class World(model_blocks.Blocks, model_cache.Cached, model_hybrid.Hybrids):
    """All operations of the random program. `step` does one operation."""

    def step(self, counted):
        """Do one operation; count it as drawn, and as done or refused with an error."""
        name = self.doing = self.one_of(NAMES)
        count = counted[name]
        count[0] += 1
        calls, errors = self.calls, self.errors
        getattr(self, name)()
        if self.errors > errors:
            count[2] += 1
        elif self.calls > calls:
            count[1] += 1


def run(seed, ops, report=None, failing=None):
    """Run `ops` operations and call `report(done)` regularly. Raises `Divergence` with the failing operation.

    Returns for each operation how often it was drawn, done, and refused with an error. A drawn operation without an
    object to apply it to counts as neither done nor refused.
    """
    counted = defaultdict(lambda: [0, 0, 0])
    done = 0
    while done < ops:
        world = World(random.Random(f"{seed}/{done}"), failing)
        for number in range(min(STEPS_PER_WORLD, ops - done)):
            try:
                world.step(counted)
                if number % STEPS_PER_COMPARISON == 0:
                    world.compare()
            except Exception as error:
                raise Divergence(
                    f"seed {seed}, operation {done + number} ({world.doing}): {type(error).__name__}: {error}"
                ) from error
        world.finish()
        done += min(STEPS_PER_WORLD, ops - done)
        if report is not None:
            report(done)
    return counted


class Failing:
    """Let some allocations of the compiled memory fail, through the preloaded tests/memory/failing_malloc.c.

    Only allocations by the extension modules fail, not those by the test program.
    """

    def __init__(self):
        shim = ctypes.CDLL(None)
        self.countdown = ctypes.c_long.in_dll(shim, "failing_countdown")
        self.failed = 0
        folder = f"{Path(pagepool.__file__).parent}{os.sep}"  # not any folder of this name: NumPy can be below it
        ours = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
        borders = [int(border, 16) for fields in ours if "x" in fields[1] for border in fields[0].split("-")]
        (ctypes.c_size_t * len(borders)).in_dll(shim, "failing_ranges")[:] = borders
        ctypes.c_long.in_dll(shim, "failing_num_ranges").value = len(borders) // 2

    def attempt(self, world, call):
        """Return the result of a call. In one of four cases an allocation fails, which changes nothing; then retry."""
        if world.below(4):
            return call()
        before = world.picture()
        self.countdown.value = 1 + world.below(3)
        try:
            return call()
        except MemoryError as error:
            if isinstance(error, PoolError):
                raise
        finally:
            self.countdown.value = 0
        self.failed += 1
        world.same_picture(before, "after an allocation failed")
        return call()


def table(counted):
    """Return the lines of the table."""
    yield f"{'operation':16}{'drawn':>10}{'done':>10}{'raised':>10}"
    for name in OPERATIONS:
        yield f"{name:16}" + "".join(f"{number:10}" for number in counted[name])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=int, default=10**7)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--failing", action="store_true", help="allocations fail (failing_malloc.so is preloaded)")
    arguments = parser.parse_args()
    failing = Failing() if arguments.failing else None
    seed = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.ops} operations", flush=True)
    start = time.monotonic()

    def report(done):
        if done % (STEPS_PER_WORLD * 50) == 0:
            print(f"{done} operations, {time.monotonic() - start:.0f} s", flush=True)

    try:
        counted = run(seed, arguments.ops, report, failing)
    except Divergence as error:
        sys.exit(str(error))
    print(*table(counted), sep="\n")
    if failing is not None:
        print(f"{failing.failed} allocations failed")
    seconds = time.monotonic() - start
    rate = arguments.ops / seconds
    print(f"no divergence in {arguments.ops} operations, seed {seed}, {seconds:.0f} s, {rate:.0f} a second")


if __name__ == "__main__":
    main()
