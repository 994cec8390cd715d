"""Pools that grow and shrink: the capacity changes, memory is returned to the system, the address stays the same."""

import ctypes
import mmap
import threading

import numpy as np
import pytest
from refusals import refuses

from pagepool import (
    BlockAllocator,
    InvalidBlock,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    PoolExhausted,
    PrefixCache,
    reference,
)

LAYOUT = KvLayout(num_layers=4, num_kv_heads=4, head_dim=64, block_size=16)  # 64 KiB per block
MIB, PAGE = 1 << 20, mmap.PAGESIZE


def resident(pool):
    """Return the resident bytes of the pool's pages alone, without other memory of the process."""
    pages = np.frombuffer(memoryview(pool), np.uint8)
    first, end = pages.ctypes.data & -PAGE, pages.ctypes.data + pages.nbytes
    has = np.empty(-(-(end - first) // PAGE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_void_p(has.ctypes.data)):
        raise OSError(ctypes.get_errno(), "mincore")
    return int((has & 1).sum()) * PAGE


def test_an_allocator_grows_when_blocks_are_asked_for():
    allocator = BlockAllocator(2, max_blocks=5)
    assert (allocator.capacity, allocator.max_capacity, allocator.free_count, allocator.available) == (2, 5, 2, 5)
    assert allocator.allocate_n(4).tolist() == [0, 1, 2, 3]
    assert (allocator.capacity, allocator.free_count, allocator.in_use, allocator.available) == (4, 0, 4, 1)
    assert allocator.allocate() == 4
    with refuses(PoolExhausted, 1, 0, 5):
        allocator.allocate()
    allocator.free([1, 3])
    with refuses(PoolExhausted, 3, 2, 5):
        allocator.allocate_n(3)
    allocator.check()


def test_shrink_stops_at_the_highest_block_in_use_and_keeps_the_order():
    allocator = BlockAllocator(8, max_blocks=8)
    allocator.allocate_n(8)
    allocator.free([6, 1, 7, 0, 5])
    assert allocator.shrink(2) == 5  # 4 is in use
    assert (allocator.capacity, allocator.free_count, allocator.peak_in_use) == (5, 2, 8)
    allocator.check()
    assert allocator.allocate_n(4).tolist() == [0, 1, 5, 6]
    allocator.check()


@pytest.mark.parametrize("kind", [BlockAllocator, reference.BlockAllocator])
def test_numbers_out_of_range_change_nothing(kind):
    allocator = kind(3, 6)
    for number in (2, 7, -1):
        with refuses(ValueError, number):
            allocator.grow(number)
    for number in (4, -1):
        with refuses(ValueError, number):
            allocator.shrink(number)
    assert (allocator.capacity, allocator.available) == (3, 6)
    with refuses(ValueError, "max_blocks"):
        kind(3, 2)
    allocator.grow(6)
    assert allocator.free_count == 6


def test_a_sequence_and_a_cache_follow_the_growth():
    allocator = BlockAllocator(0, max_blocks=6)
    cache = PrefixCache(allocator, block_size=4)
    state = PagedSeqState(allocator, 4)
    assert state.max_blocks_per_seq == 6
    state.append(20)
    assert cache.cache_blocks(list(range(20)), state.blocks) == 5
    with refuses(PoolExhausted, 2, 1, 6):
        PagedSeqState(allocator, 4).append(5)
    cache.check()


def test_growth_moves_nothing_and_views_stay_valid():
    pool = KvCachePool.from_layout(LAYOUT, 2, max_blocks=64)
    view, flat = pool.page(1), memoryview(pool)
    address = np.frombuffer(pool, np.uint16).ctypes.data
    view[:] = 7
    assert (pool.num_blocks, pool.total_pages, pool.max_blocks, pool.nbytes) == (2, 2, 64, 64 * LAYOUT.block_bytes)
    pool.grow(10)
    assert pool.num_blocks == 10
    pool.allocator.allocate_n(60)
    pool.page(59)[:] = 9
    assert np.frombuffer(pool, np.uint16).ctypes.data == address and flat[-1] == 0
    assert (view == 7).all() and flat[59 * LAYOUT.page_size] == 9
    pool.allocator.free(np.arange(59))
    assert pool.shrink() == 60 and (pool.page(59) == 9).all()
    with refuses(ValueError, 60, 64, 65):
        pool.grow(65)


def test_the_bound_is_hard_and_sizes_are_checked():
    pool = KvCachePool.from_layout(LAYOUT, 2, max_blocks=3)
    for _ in range(3):
        pool.alloc()
    with refuses(PoolExhausted, 0, 3):
        pool.alloc()
    with pytest.raises(InvalidBlock):
        pool.page(3)
    with refuses(ValueError, "max_blocks", 1):
        KvCachePool.from_layout(LAYOUT, 2, max_blocks=1)
    with refuses(ValueError, 9, 4):
        KvCachePool.from_layout(LAYOUT, 4, BlockAllocator(2, max_blocks=9))
    pool.close()
    with refuses(ValueError, "closed"):
        pool.grow(3)
    with refuses(ValueError, "closed"):
        pool.trim()


def test_free_memory_is_given_back_and_used_memory_is_not():
    blocks = 64 * MIB // LAYOUT.block_bytes
    pool = KvCachePool.from_layout(LAYOUT, 0, max_blocks=blocks)
    before = resident(pool)
    taken = pool.allocator.allocate_n(blocks)
    pages = pool.numpy()
    pages.view(np.uint16)[:] = np.arange(1, blocks + 1, dtype=np.uint16)[:, None]
    full = resident(pool)
    assert full - before >= 60 * MIB
    kept = taken[blocks // 2 : blocks // 2 + 3]
    pool.allocator.free(np.setdiff1d(taken, kept))
    given = pool.trim()
    # One or two huge pages contain the blocks in use and their neighbours.
    assert given >= 58 * MIB and full - resident(pool) >= 56 * MIB
    for block in kept.tolist():
        assert (pool.page(block).view(np.uint16) == block + 1).all()
    assert pool.page(0).view(np.uint16)[0] == 0
    pool.page(0)[:] = 5  # the page can be used again
    pool.allocator.free(kept)
    assert pool.shrink() == 0 and pool.allocator.available == blocks
    assert resident(pool) - before <= 4 * MIB
    pool.allocator.check()


def test_a_long_run_is_given_back_whole_though_it_takes_turns():
    layout = KvLayout(num_layers=4, num_kv_heads=4, head_dim=64, block_size=48)  # blocks do not divide a huge page
    pool = KvCachePool.from_layout(layout, 0, max_blocks=80 * MIB // layout.block_bytes)
    blocks = pool.allocator.allocate_n(pool.max_blocks)
    pool.numpy().view(np.uint16)[:] = 1
    full = resident(pool)
    pool.allocator.free(blocks)
    assert pool.trim() >= 78 * MIB
    assert full - resident(pool) >= 74 * MIB
    assert not pool.numpy().view(np.uint16)[:-11].any()  # the last ones end within a huge page


def test_pages_allocated_by_other_threads_keep_their_contents():
    pool = KvCachePool.from_layout(LAYOUT, 0, max_blocks=512)
    done, lost = threading.Event(), []

    def write(seed):
        rng = np.random.default_rng(seed)
        while not done.is_set():
            blocks = pool.allocator.allocate_n(int(rng.integers(1, 90)))
            for block in blocks.tolist():
                pool.page(block)[:8] = block + 1
            lost.extend(block for block in blocks.tolist() if (pool.page(block)[:8].view(np.uint16) != block + 1).any())
            pool.allocator.free(blocks)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        pool.trim()
        pool.shrink()
    done.set()
    for thread in threads:
        thread.join()
    assert not lost and pool.allocator.in_use == 0
    pool.allocator.check()
