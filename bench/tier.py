"""Copies of a `PageTier` compared with memcpy between the same kinds of memory.

    python bench/tier.py [--rounds 15]

Each page is the piece of one block in each layer of an engine. A round copies all pages of a prompt by memcpy into a
file of /dev/shm and back, and then by `put`, by `read` and by a `match` that reads the store. The files of the store
are in the page cache. The first columns are the CPU time of memcpy divided by the CPU time of an operation, from the
medians. `wall` is the wall time of the match divided by the wall time of memcpy out of the file: the match reads on two
threads.
"""

import argparse
import mmap
import os
import tempfile
from time import perf_counter, process_time

import numpy as np

from pagepool import PageTier
from pagepool.prefix.fingerprint import Fingerprint

SHAPES = [(30, 98304, 31, 128), (30, 12288, 250, 16), (1, 65536, 1000, 16)]  # pieces, bytes, pages, tokens of a page


class Pages:
    """The pages of a prompt in the layers of an engine."""

    def __init__(self, layers):
        self.layers = layers

    def __len__(self):
        return self.layers.shape[1]

    def __getitem__(self, place):
        return [layer[place] for layer in self.layers]


def timed(rows, action):
    """Add the CPU time and the time by the clock to `rows`."""
    cpu, clock = process_time(), perf_counter()
    result = action()
    rows.append((process_time() - cpu, perf_counter() - clock))
    return result


def memcpy(into, source):
    for target, page in zip(into, source, strict=True):
        target[...] = page


def measure(pieces, piece, pages, block, rounds):
    """Return medians of CPU time and time by the clock, in s."""
    size, name = pieces * piece, f"bench-{os.getpid()}"
    layers = np.random.default_rng(1).integers(0, 255, (pieces, pages, piece), np.uint8)
    copy = np.zeros_like(layers)
    times = {kind: [] for kind in ("memcpy in", "memcpy out", "put", "read", "store")}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(pages * size)
        shared = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8).reshape(pages, pieces, piece)
        model = Fingerprint("bench", page_bytes=size, block_size=block)
        store = {"store": folder, "store_bytes": 3 * pages * size + (64 << 20)}
        tier = PageTier(name, pages * size + size + (32 << 20), model, **store)
        try:
            for number in range(rounds + 2):
                tokens = np.random.default_rng(number).integers(0, 1000, pages * block).astype(np.int32)
                timed(times["memcpy in"], lambda: memcpy(shared, layers.swapaxes(0, 1)))
                timed(times["memcpy out"], lambda: memcpy(copy.swapaxes(0, 1), shared))
                assert timed(times["put"], lambda tokens=tokens: tier.put(tokens, Pages(layers))) == pages
                assert tier.flush()
                with tier.match(tokens) as found:
                    timed(times["read"], lambda found=found: tier.read(found, Pages(copy)))
                assert np.array_equal(copy, layers)
                tier.make_room(pages)
                with timed(times["store"], lambda tokens=tokens: tier.match(tokens)) as found:
                    assert len(found.blocks) == pages
                tier.make_room(pages)
        finally:
            tier.remove()
    return {kind: np.median(rows[2:], axis=0) for kind, rows in times.items()}  # the first ones commit memory


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print("memcpy / operation        put   read   match with the store   wall")
    for shape in SHAPES:
        found = measure(*shape, options.rounds)
        into, out = found["memcpy in"], found["memcpy out"]
        shares = into[0] / found["put"][0], out[0] / found["read"][0], out[0] / found["store"][0]
        wall = found["store"][1] / out[1]
        columns = f"{shares[0]:8.2f} {shares[1]:6.2f} {shares[2]:10.2f} {wall:17.2f}"
        print(f"{shape[2]:5} x {shape[0]:2} x {shape[1]:6} {columns}")


if __name__ == "__main__":
    main()
