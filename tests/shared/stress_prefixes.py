"""Processes cache and find prompts of one pool and are killed at random moments. Prints what was found as JSON.

    python tests/shared/stress_prefixes.py SECONDS SEED

The content of a page follows from its tokens, so a page that was served for other tokens is seen.
"""

import json
import os
import random
import sys
import time

import numpy as np
import pools

from pagepool import PrefixCache

BLOCKS, WORKERS, SIZE = 80, 4, 16


def prompt(choose):
    """Return 12 blocks: the first 8 are one of 6 beginnings."""
    beginning, tail = choose.randrange(6), choose.randrange(10)
    tokens = np.arange(12 * SIZE, dtype=np.int32) + beginning * 1000
    tokens[8 * SIZE :] += tail * 131 + beginning * 7777
    return tokens


def page_of(tokens, i):
    return np.resize(tokens[i * SIZE : (i + 1) * SIZE], 256).astype(np.float32)


def serve(pool, cache, choose):
    """Serve one prompt; return the number of pages that were found."""
    tokens, pages = prompt(choose), pool.numpy()
    match = cache.match_tokens(tokens)
    blocks = match.blocks.tolist()
    found = len(blocks)
    for i, block in enumerate(blocks):
        assert np.array_equal(pages[block], page_of(tokens, i)), f"block {block} has a wrong page"
    own = []
    for i in range(found, 12):
        try:
            block = pool.allocator.allocate()
        except MemoryError:
            cache.evict(choose.randint(1, 16))
            break
        pages[block] = page_of(tokens, i)
        own.append(block)
    n = found + len(own)
    cache.cache_blocks(tokens[: n * SIZE], blocks + own)
    for i, block in enumerate(blocks + own):
        assert np.array_equal(pages[block], page_of(tokens, i)), f"block {block} has changed"
    pool.allocator.free(own)
    match.close()
    if choose.random() < 0.1:
        cache.discard(blocks[:1])
    return found


def work(fd, seed):
    pool, choose, parent = pools.attach(fd, BLOCKS), random.Random(seed), os.getppid()
    cache = PrefixCache(pool.allocator)
    while os.getppid() == parent:
        serve(pool, cache, choose)


def main(seconds, seed):
    fd = os.memfd_create("stress", os.MFD_ALLOW_SEALING)
    choose, children, kills, wrong, served = random.Random(seed), [], 0, 0, 0
    pool = pools.attach(fd, BLOCKS)
    cache = PrefixCache(pool.allocator)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        while len(children) < WORKERS:
            children.append(pools.in_child(work, fd, choose.randrange(1 << 30)))
        until = time.monotonic() + choose.random() * 0.02
        while time.monotonic() < until:
            served += serve(pool, cache, choose)
        child = children.pop(choose.randrange(WORKERS))
        kills += 1
        wrong += pools.kill(child) != -9
        cache.check()
    for child in children:
        wrong += pools.kill(child) != -9
    pool.reap()
    cache.check()
    pool.allocator.check(others=0)
    cached = cache.num_cached
    lost = pool.allocator.in_use - cached
    assert cache.evict(BLOCKS) == cached
    lost += BLOCKS - len(pool.allocator.allocate_n(BLOCKS))
    print(json.dumps({"kills": kills, "wrong": wrong, "lost": lost, "served": served}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
