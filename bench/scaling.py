"""Scaling of an engine without the GIL: 1, 2, ... threads, each with its own sequences on one pool.

Every thread does the same work, so the time stays constant under perfect scaling. The figure is the tokens per second
of all threads, divided by the rate of one thread. Thread counts alternate, so that a slow minute of the machine affects
all of them. Run from a checkout: `python bench/scaling.py [THREADS ...]`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "foreign"))

from build_engine import load_engine

from pagepool import KvCachePool, KvLayout

LAYERS, KV_HEADS, QO_HEADS, DIM = 4, 2, 14, 64
PROMPT, LENGTH, TURNS = 64, 1024, 5


def seconds_of(engine, pool, inputs, num_threads):
    """Return the wall time in which `num_threads` workers finish one sequence each."""
    workers = [engine.Worker(pool, *inputs) for _ in range(num_threads)]
    threads = [threading.Thread(target=worker.run, args=(PROMPT, LENGTH, 1)) for worker in workers]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    for worker in workers:
        if worker.status != engine.OK:
            raise RuntimeError(f"a worker stopped with status {worker.status}")
    return seconds


def main(arguments):
    cpus = len(os.sched_getaffinity(0))
    counts = sorted({1, *map(int, arguments)}) if arguments else sorted({1, 2, cpus})
    random = np.random.default_rng(0)
    k, v = random.standard_normal((2, LAYERS, LENGTH, KV_HEADS, DIM), dtype=np.float32)
    inputs = k, v, random.standard_normal((LAYERS, LENGTH, QO_HEADS, DIM), dtype=np.float32)
    pool = KvCachePool.from_layout(KvLayout(LAYERS, KV_HEADS, DIM), max(counts) * LENGTH // 16)
    with tempfile.TemporaryDirectory() as folder:
        engine = load_engine(folder)
    seconds_of(engine, pool, inputs, max(counts))  # touches the pages
    turns = [{count: seconds_of(engine, pool, inputs, count) for count in counts} for _ in range(TURNS)]
    print(f"{LAYERS} layers, {QO_HEADS}/{KV_HEADS} heads of {DIM}, sequences of {LENGTH} tokens, {cpus} CPUs")
    for count in counts:
        seconds = statistics.median(turn[count] for turn in turns)
        scaling = statistics.median(count * turn[1] / turn[count] for turn in turns)
        print(f"{count:3d} threads  {count * LENGTH / seconds:9.0f} tokens/s  {scaling:5.2f} x one thread")
    pool.allocator.check()


if __name__ == "__main__":
    main(sys.argv[1:])
