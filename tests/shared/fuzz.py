"""Change every byte of the header of a pool, then random bytes while a process is attached.

    python tests/shared/fuzz.py SEED

With a changed header, a call must raise an expected error or return valid blocks. A signal would end this process.
"""

import os
import random
import sys

import numpy as np
import pools

from pagepool import PrefixCache

# The parts of a file before its pages: header, words, nodes, tokens and buckets, each of whole pages of 4,096 bytes.
BLOCKS, HEADER, SIZE = 8, 4096 + 128 + 30 * 64, 6 * 4096
TOKENS = np.arange(48, dtype=np.int32)
EXPECTED = (ValueError, OSError, pools.PoolError)


def use(fd):
    pool = pools.attach(fd, BLOCKS)
    try:
        blocks = [pool.allocator.allocate() for _ in range(3)]
        assert len({*blocks}) == 3 and all(0 <= block < BLOCKS for block in blocks)
        pool.page(blocks[0])[:] = 1
        cache = PrefixCache(pool.allocator)
        cache.cache_blocks(TOKENS, blocks)
        pool.allocator.free(blocks)
        pool.reap()
        found = cache.match_prefix(TOKENS).tolist()
        assert len(found) <= 3 and all(0 <= block < BLOCKS for block in found)
        pool.allocator.free(found)
        assert cache.evict(1) in (0, 1)
        assert 0 <= pool.allocator.free_count <= pool.num_blocks <= BLOCKS
    finally:
        pool.close()


def main(seed):
    choose = random.Random(seed)
    fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
    use(fd)
    size = SIZE
    whole = os.pread(fd, size, 0)
    refused = 0
    for at in [*range(HEADER), *choose.sample(range(HEADER, size), 2000)]:
        for value in (whole[at] ^ 0xFF, whole[at] ^ 1 << choose.randrange(8)):
            os.pwrite(fd, bytes([value]), at)
            try:
                use(fd)
            except EXPECTED:
                refused += 1
            os.pwrite(fd, whole, 0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(choose.randint(1, 200)):
            damaged[choose.randrange(size)] = choose.randrange(256)
        os.pwrite(fd, bytes(damaged), 0)
        try:
            use(fd)
        except EXPECTED:
            refused += 1
        os.pwrite(fd, whole, 0)
    for _ in range(300):  # another process of the user writes while this one is attached
        pool = pools.attach(fd, BLOCKS)
        cache = PrefixCache(pool.allocator)
        try:
            for _ in range(30):
                os.pwrite(fd, choose.randbytes(8), choose.randrange(size - 8))
                try:
                    block = pool.allocator.allocate()
                    assert 0 <= block < BLOCKS
                    pool.page(block)[:] = 2
                    cache.cache_blocks(TOKENS[:16], [block])
                    pool.allocator.free(block)
                    pool.allocator.free(cache.match_prefix(TOKENS))
                    cache.evict(1)
                    pool.reap()
                    pool.stats()
                except EXPECTED:
                    refused += 1
        finally:
            pool.close()
        os.pwrite(fd, whole, 0)
    print(refused)
    assert refused > 300


if __name__ == "__main__":
    main(int(sys.argv[1]))
