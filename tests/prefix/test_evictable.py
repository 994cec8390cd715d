"""`evictable`, the number of cached blocks without other references: updated with each reference, by any caller."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from refusals import refuses
from share import WHOLE

from pagepool import BlockAllocator, InvalidBlock, PagedSeqState, PrefixCache


@pytest.fixture(scope="module")
def foreign(build_foreign):
    return build_foreign(Path(__file__).with_name("foreign_prefix.pyx"))


def filled(num_blocks, policy="lru"):
    """Return a cache of `num_blocks` blocks of one token, in an allocator twice as large, and the blocks."""
    allocator = BlockAllocator(2 * num_blocks)
    cache = PrefixCache(allocator, 1, policy)
    blocks = allocator.allocate_n(num_blocks)
    cache.cache_blocks(list(range(num_blocks)), blocks)
    allocator.free(blocks)
    return cache, blocks


def test_threads_without_the_gil_are_counted(foreign):
    cache, blocks = filled(64)
    allocator, seconds = cache.allocator, 1.0 if WHOLE else 0.25
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(foreign.use_cached, allocator, blocks, seconds, seed) for seed in range(4)]
        while not all(future.done() for future in futures):
            others = allocator.allocate_n(20)
            cache.cache_blocks([100 + i for i in range(20)], others)
            assert 0 <= cache.evictable <= 64
            assert cache.discard(others[:10]) == 10
            allocator.free(others)
            assert cache.evictable >= 10
            assert cache.discard(others[10:]) == 10
            cache.check()
    results = [future.result() for future in futures]
    assert sum(errors for _, errors in results) == 0
    assert all(rounds > 0 for rounds, _ in results)
    assert cache.evictable == cache.num_cached == 64
    cache.check()


def test_two_caches_of_one_allocator_count_apart():
    allocator = BlockAllocator(8)
    first, second = PrefixCache(allocator, 1), PrefixCache(allocator, 1)
    blocks = allocator.allocate_n(4)
    first.cache_blocks([1, 2, 3], blocks)
    second.cache_blocks([1, 2], blocks[2:])
    allocator.free(blocks)
    assert (first.evictable, second.evictable) == (2, 1)  # the third block is in both caches
    assert second.discard([2]) == 1
    assert (first.evictable, second.evictable) == (3, 1)
    for cache in (first, second):
        cache.check()
    del second, cache
    assert first.evictable == 3 == allocator.in_use
    first.reset_prefix_cache()
    assert first.evictable == 0 == allocator.in_use


def test_each_way_to_take_and_to_drop_a_reference_counts():
    cache, _ = filled(6)
    allocator = cache.allocator
    expected = 6

    def now(change):
        nonlocal expected
        expected += change
        assert cache.evictable == expected == allocator.stats()["evictable"]

    found = cache.match_prefix([0, 1, 2])
    now(-3)
    state = PagedSeqState(allocator, 1)
    state.adopt(found, 3)
    allocator.free(found)
    now(0)
    fork = state.fork()
    state.release()
    now(0)
    fork.truncate(1)
    now(2)
    fork.release()
    now(1)
    allocator.share(5)
    now(-1)
    assert cache.evict(6) == 5
    now(-5)
    allocator.free(5)
    now(1)
    with refuses(InvalidBlock, "block", 0):
        allocator.free([5, 0])  # block 0 is free already: nothing changes
    now(0)
    cache.check()


def test_a_refused_call_counts_nothing():
    cache, _ = filled(4)
    allocator = cache.allocator
    others = allocator.allocate_n(3).tolist()
    for named, wrong in ((7, [*others[:2], 7]), (others[0], [*others[:2], others[0]]), (-1, [others[0], -1, 3])):
        with refuses(InvalidBlock, "block", named):
            cache.cache_blocks([9, 8, 7], wrong)
        assert (cache.evictable, cache.num_cached) == (4, 4)
        assert [allocator.ref_count(block) for block in others] == [1, 1, 1]
        cache.check()
