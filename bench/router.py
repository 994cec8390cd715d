"""A router over a million blocks of 64 workers: microseconds per decision, bytes per block, events per second.

    python bench/router.py [--workers 64] [--blocks 1000000] [--rounds 2000]

Prompts have 8,192 tokens in 512 blocks of 16. A "cached" prompt is complete on one worker, a "new" prompt is on none. A
decision takes the tokens and the root's name, looks up all blocks, compares the workers, and records the blocks that
the chosen worker will hold. Medians are printed. The 99th percentile includes disturbance by other processes.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout

from pagepool.cluster.router import Router
from pagepool.prefix.events import PrefixEvent, prefix_names
from pagepool.prefix.keys import root_key, root_name

BLOCK_SIZE, PROMPT_BLOCKS, VOCABULARY = 16, 512, 30_000


def filled(workers, blocks, random):
    """Return a router, one prompt of each worker, and the seconds of the router's updates."""
    router, root, prompts, seconds = Router(BLOCK_SIZE, workers), root_name(root_key(None, ())), [], 0.0
    for worker in range(workers):
        names = []
        while len(names) < blocks // workers:
            length = min(PROMPT_BLOCKS, blocks // workers - len(names))
            prompt = random.integers(0, VOCABULARY, length * BLOCK_SIZE + 1, dtype=np.int32)
            names += prefix_names(prompt, BLOCK_SIZE, root)
            if length == PROMPT_BLOCKS:
                prompts.append(prompt)
        events = [PrefixEvent(number, "stored", 0, name, b"", b"") for number, name in enumerate(names, 1)]
        begin = time.perf_counter()
        router.update(worker, 1, events, load=0, room=0)
        seconds += time.perf_counter() - begin
    return router, prompts, seconds


def decisions(router, prompts, rounds):
    """Microseconds of each."""
    times = []
    for number in range(rounds):
        prompt = prompts[number % len(prompts)]
        begin = time.perf_counter_ns()
        router.choose(prompt)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2_000)
    options = parser.parse_args(arguments)
    random = np.random.default_rng(1)
    router, prompts, seconds = filled(options.workers, options.blocks, random)
    stats = router.stats()
    print(f"{stats['blocks']:,} blocks of {options.workers} workers: {stats['bytes'] / stats['blocks']:.1f} bytes each")
    print(f"events: {stats['events'] / seconds:,.0f} a second")
    new = random.integers(0, VOCABULARY, (200, PROMPT_BLOCKS * BLOCK_SIZE + 1), dtype=np.int32)
    shuffled = [prompts[number] for number in random.permutation(len(prompts))]
    for name, rows in (("cached", shuffled), ("new", list(new)), ("cached, as a list", [p.tolist() for p in shuffled])):
        times = decisions(router, rows, options.rounds)
        middle, late = np.percentile(times, (50, 99))
        print(f"decision, {name}: {middle:.0f} us, p99 {late:.0f} us")


if __name__ == "__main__":
    main()
