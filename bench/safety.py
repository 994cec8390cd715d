"""What it costs that sequences are known to their allocator, tagged with generations and able to begin transactions.

python bench/safety.py prints nanoseconds, the least of several rounds. Each operation runs directly and, where there is
one, through a handle; `--json` is for comparing two builds, by running both by turns.
"""

import argparse
import json
import sys
from pathlib import Path
from timeit import Timer

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the checkout, where no pagepool is installed
from pagepool import BlockAllocator, PagedSeqState, SsmStatePool, StateLayout
from pagepool.memory.block_tables import append_batch, release_batch

LAYOUT = StateLayout(layers=[{"h": ((256,), "float32")}])
ROUNDS = 25


def operations():
    """name -> (how many calls one run makes, the run)."""
    allocator = BlockAllocator(4096)
    state = PagedSeqState(allocator, 16, 64)
    batch = [PagedSeqState(allocator, 16, 64) for _ in range(64)]
    ones = [1] * 64
    states = SsmStatePool.from_layout(LAYOUT, 8)

    def append():
        for _ in range(256):
            state.append(1)
        state.truncate(0)

    def whole_batch():
        for _ in range(16):
            append_batch(batch, ones)
        release_batch(batch)

    def live():
        for _ in range(64):
            sequence = PagedSeqState(allocator, 16, 64)
            sequence.append(40)
            sequence.release()

    def fork():
        state.append(200)
        for _ in range(64):
            state.fork().release()
        state.truncate(0)

    def lend():
        for _ in range(64):
            states.release(states.alloc(1))

    found = {
        "append a token": (256, append),
        "append_batch, a sequence": (64 * 16, whole_batch),
        "make, append 40, release": (64, live),
        "fork of 13 blocks, release": (64, fork),
        "lend a state, release": (64, lend),
    }
    if hasattr(state, "handle"):
        handle = state.handle()

        def through_handle():
            for _ in range(256):
                handle.state.append(1)
            state.truncate(0)

        def transactions():
            state.append(200)
            for _ in range(64):
                state.begin()
                state.append(4)
                state.abort()
            state.truncate(0)

        def drafts():
            state.append(200)
            for _ in range(64):
                state.append(4)
                state.truncate(200)
            state.truncate(0)

        found["append a token, through a handle"] = (256, through_handle)
        found["append 4 to 200, truncate"] = (64, drafts)
        found["begin, append 4 to 200, abort"] = (64, transactions)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="as one line of JSON")
    arguments = parser.parse_args()
    figures = {}
    for name, (calls, run) in operations().items():
        number = max(1, 20_000 // calls)
        run()
        figures[name] = min(Timer(run).repeat(ROUNDS, number)) / number / calls * 1e9
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:40} {value:8.0f} ns")


if __name__ == "__main__":
    main()
