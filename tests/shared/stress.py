"""Processes take, mark and free blocks of one pool and are killed at random moments. Prints what was found as JSON.

    python tests/shared/stress.py SECONDS SEED

Every page carries the mark of the process that holds it, in its first and last element. A mark that has changed was
written by a process that got the same block.
"""

import json
import os
import random
import sys
import time

import pools

BLOCKS, WORKERS = 48, 4


def work(fd, seed):
    """Take and free blocks until killed; exit with status 1 when a page has changed."""
    pool = pools.attach(fd, BLOCKS)
    allocator, pages = pool.allocator, pool.numpy()
    held, choose, mark, parent = {}, random.Random(seed), float(seed), os.getppid()
    while os.getppid() == parent:
        action = choose.random()
        if action < 0.5 and len(held) < 20:
            n = choose.randint(1, 4)
            try:
                blocks = allocator.allocate_n(n).tolist()
            except MemoryError:
                continue
            for block in blocks:
                assert block not in held, f"block {block} was handed out twice"
                mark += 1
                held[block] = mark
                pages[block, 0] = pages[block, -1] = mark
        elif held:
            block = choose.choice(list(held))
            assert pages[block, 0] == held[block] == pages[block, -1], f"block {block} has another owner"
            if action < 0.6:
                allocator.share(block)
                allocator.free(block)
            else:
                del held[block]
                allocator.free(block)


def main(seconds, seed):
    fd = os.memfd_create("stress", os.MFD_ALLOW_SEALING)
    choose, children, kills, wrong, reaped = random.Random(seed), {}, 0, 0, 0
    pool = pools.attach(fd, BLOCKS)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        while len(children) < WORKERS:
            mark = choose.randrange(1 << 20) * 4
            children[pools.in_child(work, fd, mark)] = True
        time.sleep(choose.random() * 0.02)
        child = choose.choice(list(children))
        del children[child]
        kills += 1
        wrong += pools.kill(child) != -9
        if choose.random() < 0.3:
            reaped += pool.reap()
    for child in children:
        kills += 1
        wrong += pools.kill(child) != -9
    pool.reap()
    pool.allocator.check(others=0)
    blocks = sorted(pool.allocator.allocate_n(BLOCKS).tolist())
    print(json.dumps({"kills": kills, "wrong": wrong, "lost": BLOCKS - len(blocks), "reaped": reaped}))
    assert blocks == list(range(BLOCKS))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
