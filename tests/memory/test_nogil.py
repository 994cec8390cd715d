"""The c_ methods, called from a module outside the package, from several threads, without the GIL."""

import gc
import os
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from share import WHOLE

import pagepool
from pagepool import (
    AttentionSequenceState,
    BlockAllocator,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    PoolError,
    SsmStatePool,
    StateLayout,
)

LAYOUT = KvLayout(num_layers=1, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
OK, EXHAUSTED, INVALID_BLOCK, INVALID_SLOT, OVER_MAXIMUM, INVALID_ARGUMENT = 0, 1, 2, 3, 4, 6


@pytest.fixture(scope="module")
def foreign(build_foreign):
    return build_foreign(Path(__file__).with_name("foreign_memory.pyx"))


def test_threads_share_an_allocator(foreign):
    allocator = BlockAllocator(700)  # fewer than the threads can hold, so that some calls are refused
    refused = 0
    for _ in range(50):  # until a call is refused: on a slow machine this may take several rounds
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda seed: foreign.hammer(allocator, 2.0 if WHOLE else 0.2, seed), range(6)))
        allocator.check()
        assert allocator.in_use == 0
        assert sum(errors for _, _, errors in results) == 0
        refused += sum(refused for _, refused, _ in results)
        if refused:
            break
    assert refused > 0
    assert sorted(allocator.allocate_n(allocator.peak_in_use)) == list(range(allocator.peak_in_use))


def test_threads_with_and_without_the_gil_share_an_allocator(foreign):
    allocator = BlockAllocator(3 * 256 + 8)  # enough for all threads
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(foreign.hammer, allocator, 0.5, seed) for seed in range(3)]
        while not all(future.done() for future in futures):
            blocks = allocator.allocate_n(8)
            allocator.share(blocks)
            allocator.free(np.concatenate([blocks, blocks]))
            allocator.check()
    assert sum(future.result()[2] for future in futures) == 0
    assert allocator.in_use == 0


def test_stats_of_a_growing_and_shrinking_allocator_are_consistent(foreign):
    allocator = BlockAllocator(0, max_blocks=700)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(foreign.hammer, allocator, 0.5, seed) for seed in range(2)]
        while not all(future.done() for future in futures):
            assert 0 <= allocator.shrink() <= 700 and 0 <= allocator.capacity <= 700
            stats = allocator.stats()
            assert 0 <= stats["used"] <= stats["capacity"] <= 700
    assert sum(future.result()[2] for future in futures) == 0
    assert allocator.shrink() == allocator.capacity == 0


def test_forks_append_in_parallel_while_pools_come_and_go(foreign):
    pool = KvCachePool.from_layout(LAYOUT, 3000)
    parent = PagedSeqState(pool.allocator, 4, 64)
    ones = np.ones((6, 2, 8), np.float32)
    pool.append(0, parent.append(6), ones, ones)
    families = [[parent.fork() for _ in range(50)] for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(foreign.hammer_sequences, pool, family, 120.0, 2.0 + i) for i, family in enumerate(families)
        ]
        while not all(future.done() for future in futures):
            other = KvCachePool.from_layout(LAYOUT, 3000, pool.allocator)
            del other
    for future in futures:
        appended, errors = future.result()
        assert appended == 50 * 40 and errors == 0
    assert pool.gather(0, parent.blocks, 6)[0].tolist() == ones.tolist()
    pool.allocator.check()
    del families, futures
    gc.collect()
    assert pool.allocator.in_use == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # the test forks on purpose
def test_a_forked_child_finds_the_allocator_whole(foreign):
    allocator = BlockAllocator(3 * 256 + 8)  # blocks of the parent's threads stay allocated in the child
    pool = KvCachePool.from_layout(LAYOUT, 3 * 256 + 8, allocator)
    threads = [threading.Thread(target=foreign.hammer, args=(allocator, 1.0, seed)) for seed in range(3)]
    for thread in threads:
        thread.start()
    statuses = []
    end = time.monotonic() + 0.8
    while not statuses or time.monotonic() < end:
        child = os.fork()
        if child == 0:  # the child must not wait for a thread of the parent
            code = 1
            try:
                allocator.check()
                state = PagedSeqState(allocator, 4)
                state.append(3)
                state.fork().append(1)  # copies a page
                del pool
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        statuses.append(os.waitpid(child, 0)[1])
    for thread in threads:
        thread.join()
    assert not any(statuses)
    allocator.check()
    assert allocator.in_use == 0


def test_c_methods_answer_nonsense_with_a_status(foreign):
    state = PagedSeqState(BlockAllocator(4), 4)
    layout = StateLayout(layers=[{"s": ((2,), "float32")}])
    answers = foreign.statuses_of_bad_calls(state, SsmStatePool.from_layout(layout, 2))
    assert answers == [
        INVALID_ARGUMENT,
        INVALID_BLOCK,
        -1,
        INVALID_ARGUMENT,
        OVER_MAXIMUM,
        INVALID_ARGUMENT,
        INVALID_ARGUMENT,
        OK,
        INVALID_SLOT,
    ]
    assert (state.len, state.blocks, state.allocator.in_use) == (0, [], 0)
    objects = SsmStatePool(1, lambda i: AttentionSequenceState(1))
    assert foreign.statuses_of_bad_calls(state, objects)[-1] == INVALID_ARGUMENT


def test_the_table_of_c_functions(foreign):
    allocator = BlockAllocator(5)
    answers, blocks = foreign.through_the_api(allocator)
    version = Path(pagepool.get_include(), "pagepool", "version.h").read_text()
    assert f"#define PP_ABI_VERSION {answers.pop(0)}\n" in version
    assert answers == [OK, OK, EXHAUSTED, OK, 2, 2, OK, INVALID_BLOCK, INVALID_ARGUMENT]
    assert blocks == [0, 1, 2]
    assert [allocator.ref_count(b) for b in range(5)] == [1, 1, 0, 0, 0]
    allocator.check()


def test_the_table_knows_its_own(foreign):
    for other in (None, 3, PagedSeqState(BlockAllocator(1))):
        assert foreign.through_the_api(other) is None


def test_a_count_cannot_overflow(foreign):
    allocator = BlockAllocator(2)
    allocator.allocate_n(2)
    foreign.set_count(allocator, 1, 2**31 - 2)
    with refuses(PoolError, 2147483647):
        allocator.share([0, 1, 1])
    assert [allocator.ref_count(b) for b in (0, 1)] == [1, 2**31 - 2]
    state = PagedSeqState(allocator, 1)
    foreign.set_count(allocator, 1, 0)
    allocator.free(0)
    foreign.set_freed(allocator, 0, 1)
    foreign.set_count(allocator, 0, 1)
    state.append(1)
    foreign.set_count(allocator, 1, 2**31 - 1)
    with refuses(PoolError, "fork"):
        state.fork()
    foreign.set_count(allocator, 1, 1)


@pytest.mark.parametrize(
    "break_it, words",
    [
        (lambda f, a: f.set_count(a, 0, 0), ("free", "in_use", "capacity", 4, 3)),
        (lambda f, a: f.set_count(a, 1, 1), (0, 1)),
        (lambda f, a: f.set_count(a, 0, -7), ("ref_count", 0, -7)),
        (lambda f, a: f.set_freed(a, 0, 3), (3, -1)),
        (lambda f, a: f.set_freed(a, 0, 6), (6,)),
        (lambda f, a: f.set_freed(a, 1, -1), (-1, 6)),
        (lambda f, a: f.set_freed(a, 0, 0), (0, 1)),
        (lambda f, a: f.set_num_freed(a, 1), ("free", "in_use", "capacity", 3, 4)),
        (lambda f, a: f.set_num_freed(a, 7), (0, "num_freed", "capacity", 7, 6)),
        (lambda f, a: f.set_num_freed(a, -1), (0, "num_freed", "capacity", -1, 6)),
    ],
)
def test_check_names_the_broken_equation(foreign, break_it, words):
    allocator = BlockAllocator(8)
    allocator.allocate_n(6)
    allocator.free([1, 3])
    allocator.check()
    break_it(foreign, allocator)
    for _ in range(2):  # a check changes nothing
        with refuses(PoolError, *words):
            allocator.check()


def test_closing_a_pool_waits_for_pages_that_are_being_copied(foreign):
    pool = KvCachePool.from_layout(LAYOUT, 4)
    begun = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        copying = executor.submit(foreign.copy_for, pool, 0.2, begun)
        begun.wait()
        pool.close()
        assert copying.result()
