"""Scaling of 2 Python threads on one shared object, on CPython without a GIL: calls per second, relative to 1 thread.

Each thread makes the same calls on the same object, with its own tokens, slots and queries. Perfect scaling gives 2.
Turns with 1 and 2 threads alternate, and the figure is the median over the turns. The script also runs with a GIL and
then prints a note: only `append` and `decode` release the GIL. Run it from a checkout with pagepool built for the
interpreter: `PYTHONPATH=build/free-threaded/lib build/free-threaded/bin/python bench/free_threading.py`.
"""

from __future__ import annotations

import platform
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fallback: the package of the checkout

from pagepool import BlockAllocator, BlockTables, KvCachePool, KvLayout, PagedSeqState, PrefixCache, decode

THREADS, TURNS, SECONDS = 2, 9, 0.3
LAYOUT = KvLayout(num_layers=1, num_kv_heads=8, head_dim=128)
PROMPT, STEP, CONTEXT = 512, 32, 2048


def allocate_and_free(number, allocator):
    """Allocate and free one block of one allocator."""

    def call():
        allocator.free(allocator.allocate())

    return call


def look_up(number, cache):
    """Look up the blocks of a prompt in one prefix cache and free them."""
    prompt = np.arange(PROMPT, dtype=np.int32) + number * PROMPT
    cache.touch(prompt)
    free = cache.allocator.free

    def call():
        free(cache.match_prefix(prompt))

    return call


def append(number, pool):
    """Append the keys and values of one decode step to one pool."""
    state = PagedSeqState(pool.allocator)
    slots = state.append(STEP)
    k = np.ones((STEP, LAYOUT.num_kv_heads, LAYOUT.head_dim), np.float32)

    def call(state=state):
        pool.append(0, slots, k, k)

    return call


def attend(number, pool):
    """Run `decode` for one sequence on the calling thread."""
    state = PagedSeqState(pool.allocator)
    k = np.random.default_rng(number).standard_normal((CONTEXT, 8, 128), np.float32)
    pool.append(0, state.append(CONTEXT), k, k)
    tables = BlockTables(1, CONTEXT // LAYOUT.block_size).fill([state])
    q, out = np.ones((1, 32, 128), np.float32), np.empty((1, 32, 128), np.float32)

    def call(state=state):
        decode(q, pool, 0, tables.block_tables, tables.seq_lens, out=out, num_threads=1)

    return call


def seconds_of(calls, times):
    """Return the wall time in seconds for all threads to make their calls."""
    start, begins, ends = threading.Barrier(len(calls)), [], []

    def work(call):
        start.wait()
        begins.append(time.perf_counter())
        for _ in range(times):
            call()
        ends.append(time.perf_counter())

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(ends) - min(begins)


def main():
    allocator = BlockAllocator(4096)
    pool = KvCachePool.from_layout(LAYOUT, 1024)
    cases = [
        (f"allocate and free, {THREADS} threads on one allocator", allocate_and_free, allocator),
        (f"match_prefix of {PROMPT} tokens and free, on one prefix cache", look_up, PrefixCache(allocator, 16, "lru")),
        (f"append of {STEP} tokens, into one pool", append, pool),
        (f"decode of {CONTEXT:,} tokens, 32/8 heads, num_threads=1", attend, pool),
    ]
    is_off = not getattr(sys, "_is_gil_enabled", lambda: True)()
    says = "the GIL is off" if is_off else "WITH A GIL: Python threads take turns, which is not what is to be measured"
    print(f"CPython {platform.python_version()}, {says}\n")
    print(f"| what | us a call, 1 thread | {THREADS} threads over 1 |\n|---|---|---|")
    for name, make, shared in cases:
        calls = [make(number, shared) for number in range(THREADS)]
        times = 1
        while (seconds := seconds_of(calls[:1], times)) < SECONDS / 4:
            times *= 2
        times = max(1, int(times * SECONDS / seconds))
        turns = [(seconds_of(calls[:1], times), seconds_of(calls, times)) for _ in range(TURNS)]
        alone = statistics.median(one for one, _ in turns)
        scaling = statistics.median(THREADS * one / both for one, both in turns)
        print(f"| {name} | {alone / times * 1e6:.2f} | {scaling:.2f} |", flush=True)


if __name__ == "__main__":
    main()
