"""A long random program on the compiled memory and on reference: every answer, and again and again all state, compared.

python tests/model_run.py --ops 10000000 --seed 1. The seed is printed first; the same seed runs the same program. At
the end a table says how often each operation was drawn, how often within a transaction, and how it went.

One step is one operation on allocators that grow and shrink, on sequences, hybrid sequences, prefix cache, pins,
recurrent states and their checkpoints, on stale handles, or on transactions that nest and end by commit, by abort, by
an exception or by being dropped, on both sides. Keys in the pages say which token was written and states which tokens
they passed over, so that what a sequence reads after forks, copies, cuts, hits in the cache, rollbacks and aborts is
known without any implementation. After an abort all that can be seen is as it was when the transaction began.
"""

import argparse
import random
import sys
import time
from collections import defaultdict

import model_blocks
import model_cache
import model_hybrid
from model_world import Divergence

STEPS_PER_WORLD = 4000
STEPS_PER_COMPARISON = 100


# How often each is drawn.
OPERATIONS = {
    **model_blocks.OPERATIONS,
    **model_cache.OPERATIONS,
    **model_hybrid.OPERATIONS,
    "begin": 5,
    "end": 8,
}
NAMES = [name for name, often in OPERATIONS.items() for _ in range(round(10 * often))]


class World(model_blocks.Blocks, model_cache.Cached, model_hybrid.Hybrids):
    """Everything together. `step` does one operation."""

    def step(self, counted):
        """Does one; counts it as drawn, drawn within a transaction, and done or refused with an error."""
        name = self.doing = self.one_of(NAMES)
        count = counted[name]
        count[0] += 1
        count[1] += bool(self.taking_part)
        calls, errors = self.calls, self.errors
        getattr(self, name)()
        if self.errors > errors:
            count[3] += 1
        elif self.calls > calls:
            count[2] += 1


def run(seed, ops, report=None, failing=None):
    """Runs `ops` operations; raises `Divergence` that says where. Calls `report(done)` now and then.

    Returns, by operation, how often it was drawn, drawn within a transaction, done, and refused with an error; of the
    rest nothing was there to do it to.
    """
    counted = defaultdict(lambda: [0, 0, 0, 0])
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


def table(counted):
    """The lines of the table."""
    yield f"{'operation':16}{'drawn':>10}{'within':>10}{'done':>10}{'raised':>10}"
    for name in OPERATIONS:
        yield f"{name:16}" + "".join(f"{number:10}" for number in counted[name])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=int, default=10**7)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.ops} operations", flush=True)
    start = time.monotonic()

    def report(done):
        if done % (STEPS_PER_WORLD * 50) == 0:
            print(f"{done} operations, {time.monotonic() - start:.0f} s", flush=True)

    try:
        counted = run(seed, arguments.ops, report)
    except Divergence as error:
        sys.exit(str(error))
    print(*table(counted), sep="\n")
    seconds = time.monotonic() - start
    rate = arguments.ops / seconds
    print(f"no divergence in {arguments.ops} operations, seed {seed}, {seconds:.0f} s, {rate:.0f} a second")


if __name__ == "__main__":
    main()
