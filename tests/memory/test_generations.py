"""Generation words of blocks: every allocation increases the generation, and one bit marks allocated blocks."""

import copy
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from share import examples

from pagepool import BlockAllocator, InvalidBlock, KvCachePool, KvLayout, PagedSeqState, PrefixCache
from pagepool.memory.generations import BlockGenerations


def words_of(generations):
    return [(word >> 32, word & 0xFFFFFFFF) for word in generations.words]


OPERATIONS = st.lists(st.tuples(st.sampled_from(["one", "many", "free", "share", "shrink"]), st.integers(0, 7)))


@examples(60)
@given(OPERATIONS, st.integers(0, 12))
def test_a_generation_is_the_number_of_takings(operations, begin):
    allocator = BlockAllocator(4, max_blocks=12)
    generations, taken, counts = None, [0] * 12, [0] * 12
    for step, (what, n) in enumerate([*operations, ("one", 0)]):
        if step == begin or (generations is None and step == len(operations)):
            generations = BlockGenerations(allocator)
            taken = [int(count > 0) for count in counts]
        held = [block for block in range(12) for _ in range(counts[block])]
        blocks = []
        if what == "one" and allocator.available:
            blocks = [allocator.allocate()]
        elif what == "many" and allocator.available >= n:
            blocks = allocator.allocate_n(n).tolist()
        elif what == "share" and held:
            allocator.share(held[n % len(held)])
            counts[held[n % len(held)]] += 1
        elif what == "free":
            allocator.free(held[: n + 1])
            for block in held[: n + 1]:
                counts[block] -= 1
        elif what == "shrink" and n <= allocator.capacity:
            allocator.shrink(n)
        for block in blocks:
            taken[block] += 1
            counts[block] = 1
        if generations is not None:
            assert words_of(generations) == [(taken[b], int(counts[b] > 0)) for b in range(12)]
        allocator.check()


def test_a_refused_free_changes_no_word():
    allocator = BlockAllocator(4)
    generations = BlockGenerations(allocator)
    allocator.allocate_n(2)
    before = words_of(generations)
    for blocks in ([0, 0], [0, 1, 2], [0, 9]):
        with pytest.raises(InvalidBlock):
            allocator.free(blocks)
    assert words_of(generations) == before
    allocator.check()


def test_sequences_copies_on_write_and_caches_take_new_generations():
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=4, dtype="float32"), 8)
    allocator = pool.allocator
    generations = BlockGenerations(allocator)
    first = PagedSeqState(allocator, 4)
    first.append(6)
    second = first.fork()
    assert generations.of([0, 1, 2]).tolist() == [1, 1, 0]
    second.append(1)  # copies the shared block
    assert generations.of([0, 1, 2]).tolist() == [1, 1, 1]
    cache = PrefixCache(allocator, 4)
    cache.cache_blocks([1, 2, 3, 4], first.blocks[:1])
    first.close()
    second.close()
    assert words_of(generations)[:3] == [(1, 1), (1, 0), (1, 0)], "the cache holds the first"
    cache.evict(1)
    assert words_of(generations)[0] == (1, 0)
    assert allocator.allocate() == 0 and generations.of(0).tolist() == [2]


def test_objects_of_one_allocator_share_the_words_at_a_fixed_address():
    allocator = BlockAllocator(3)
    first = BlockGenerations(allocator)
    view = np.frombuffer(first.words, np.uint64)
    allocator.allocate()
    second = BlockGenerations(allocator)
    assert np.frombuffer(second.words, np.uint64).ctypes.data == view.ctypes.data
    del first, second
    allocator.allocate()
    assert view.tolist() == [(1 << 32) + 1, (1 << 32) + 1, 0], "the allocator keeps them on"
    del allocator
    assert view.tolist() == [(1 << 32) + 1, (1 << 32) + 1, 0]


def test_views_are_for_reading_and_ids_are_checked():
    allocator = BlockAllocator(3)
    generations = BlockGenerations(allocator)
    with pytest.raises(TypeError):
        generations.words[0] = 1
    with refuses(InvalidBlock, "block", 3):
        generations.of([0, 3])
    assert generations.of([]).tolist() == [] and generations.allocator is allocator
    assert BlockGenerations(BlockAllocator(0)).words.nbytes == 0
    with pytest.raises(TypeError):
        BlockGenerations(None)
    with pytest.raises(TypeError):
        copy.copy(generations)


def test_threads_that_take_and_free_are_all_counted():
    allocator = BlockAllocator(64)
    generations = BlockGenerations(allocator)

    def work():
        for _ in range(2_000):
            blocks = allocator.allocate_n(3)
            allocator.free(blocks)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(generations.of(range(64)).sum()) == 4 * 2_000 * 3
    assert all(word & 1 == 0 for word in generations.words)
    allocator.check()
