"""Change every byte of the header of a pool, then random bytes while a process is attached.

    python tests/shared/fuzz.py SEED

With a changed header, a call must raise an expected error or return valid blocks. A signal would end this process.
"""

import os
import random
import sys

import pools

BLOCKS, HEADER = 8, 4096 + 64 + 30 * 64
EXPECTED = (ValueError, OSError, pools.PoolError)


def use(fd):
    pool = pools.attach(fd, BLOCKS)
    try:
        blocks = [pool.allocator.allocate() for _ in range(3)]
        assert len({*blocks}) == 3 and all(0 <= block < BLOCKS for block in blocks)
        pool.page(blocks[0])[:] = 1
        pool.allocator.free(blocks)
        pool.reap()
        assert 0 <= pool.allocator.free_count <= pool.num_blocks <= BLOCKS
    finally:
        pool.close()


def main(seed):
    choose = random.Random(seed)
    fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
    use(fd)
    size = HEADER + 2048 + 8 * BLOCKS + 64
    whole = os.pread(fd, size, 0)
    refused = 0
    for at in range(size):
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
        try:
            for _ in range(30):
                os.pwrite(fd, choose.randbytes(8), choose.randrange(size - 8))
                try:
                    block = pool.allocator.allocate()
                    assert 0 <= block < BLOCKS
                    pool.page(block)[:] = 2
                    pool.allocator.free(block)
                    pool.reap()
                    pool.stats()
                except EXPECTED:
                    refused += 1
        finally:
            pool.close()
        os.pwrite(fd, whole, 0)
    print(refused)
    assert refused > 500


if __name__ == "__main__":
    main(int(sys.argv[1]))
