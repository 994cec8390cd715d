"""Checked mode detects misuse of blocks when it happens: each guarantee of `KvCachePool.checked`; off by default."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from refusals import refuses

from pagepool import (
    BlockAllocator,
    BlockTables,
    InvalidBlock,
    InvalidSlot,
    KvCachePool,
    KvLayout,
    PagedSeqState,
    PrefixCache,
    decode,
    prefill,
)

DTYPES = ["float32", "float16", "bfloat16", "int8", "int4"]


def make_pool(dtype="float32", num_blocks=4, allocator=None, checked=True, **options):
    scale = np.ones((2, 1, 8), np.float32) if dtype == "int4" else None
    layout = KvLayout(2, 1, 8, dtype=dtype)
    return KvCachePool.from_layout(layout, num_blocks, allocator, k_channel_scale=scale, checked=checked, **options)


def rows(count, value=1.0):
    return np.full((count, 1, 8), value, np.float32)


def write(pool, slots, value=1.0):
    for layer in range(2):
        pool.append(layer, slots, rows(len(slots), value), rows(len(slots), value))


def attend(pool, table, length, call=decode):
    tables, lens = np.array([table], np.int32), np.array([length], np.int32)
    options = {"query_start_loc": np.array([0, 1], np.int32)} if call is prefill else {}
    return call(rows(1), pool, 1, tables, lens, **options)


def release(state):
    state.release()


def free_one_by_one(state):
    for block in state.blocks:
        state.allocator.free(block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("give_back", [release, free_one_by_one, lambda state: state.allocator.free(state.blocks)])
def test_pages_of_freed_blocks_are_nan(dtype, give_back):
    pool = make_pool(dtype)
    state, kept = PagedSeqState(pool.allocator), PagedSeqState(pool.allocator)
    write(pool, state.append(20))
    write(pool, kept.append(16))
    blocks = state.blocks
    give_back(state)
    for layer in range(2):
        for values in pool.gather(layer, blocks, 20):
            assert np.isnan(values).all()
    assert not np.isnan(pool.gather(1, kept.blocks, 16)).any()
    if give_back is not release:
        pool.allocator.allocate_n(2)  # the sequence still has its blocks
        kept.release()


def test_a_block_is_filled_with_its_last_reference():
    pool = make_pool()
    state = PagedSeqState(pool.allocator)
    write(pool, state.append(16))
    child, blocks = state.fork(), state.blocks
    state.release()
    assert (pool.gather(0, blocks, 16)[0] == 1).all()
    child.release()
    assert np.isnan(pool.gather(0, blocks, 16)[0]).all()


def test_a_refused_free_fills_nothing():
    pool = make_pool()
    state = PagedSeqState(pool.allocator)
    write(pool, state.append(16))
    with refuses(InvalidBlock, 3, unchanged=lambda: memoryview(pool).tobytes()):
        pool.allocator.free([*state.blocks, 3])


def test_evicted_and_truncated_blocks_are_filled():
    pool = make_pool()
    cache, state = PrefixCache(pool.allocator), PagedSeqState(pool.allocator)
    write(pool, state.append(32))
    cache.cache_blocks(list(range(16)), state.blocks[:1])
    first, second = state.blocks
    state.truncate(16)
    assert np.isnan(pool.gather(0, [second], 16)[0]).all()
    state.release()
    assert (pool.gather(0, [first], 16)[0] == 1).all()
    cache.evict(1)
    assert np.isnan(pool.gather(0, [first], 16)[0]).all()


def test_free_pages_stay_filled_when_memory_is_trimmed():
    pool = make_pool(num_blocks=4096)
    blocks = pool.allocator.allocate_n(4096)
    pool.allocator.free(blocks)
    assert pool.trim() == 0
    assert np.isnan(pool.numpy()).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
def test_pages_of_a_flat_pool_are_filled(dtype):
    pool = KvCachePool(8, 2, dtype, checked=True)
    page = pool.page(pool.alloc())
    page[:] = 1
    pool.free(0)
    assert (page.view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_refuses_slots_of_free_blocks(dtype):
    pool = make_pool(dtype)
    state = PagedSeqState(pool.allocator)
    slots = state.append(20)
    write(pool, slots)
    state.truncate(16)
    for given in (slots, slots.astype(np.int32)):
        with refuses(InvalidSlot, 16, "1", unchanged=lambda: memoryview(pool).tobytes()):
            pool.append(0, given, rows(20), rows(20))
    write(pool, slots[:16])
    pool.append(0, np.array([-1, 3]), rows(2), rows(2))  # -1 is skipped


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_refuses_slots_of_shared_blocks_and_takes_those_of_the_copy(dtype):
    pool = make_pool(dtype)
    state = PagedSeqState(pool.allocator)
    write(pool, state.append(18))
    child = state.fork()
    with refuses(InvalidSlot, 17, "1", 2, unchanged=lambda: memoryview(pool).tobytes()):
        pool.append(0, np.array([17]), rows(1), rows(1))
    write(pool, child.append(1), 2.0)  # copies the page on write
    assert state.blocks[1] != child.blocks[1]
    write(pool, state.append(1), 3.0)
    for sequence, last in ((state, 3.0), (child, 2.0)):
        for values in pool.gather(1, sequence.blocks, 19):
            np.testing.assert_allclose(values[:, 0, 0], [1.0] * 18 + [last], rtol=0.01)


def test_append_refuses_slots_of_cached_blocks():
    pool = make_pool()
    cache, state = PrefixCache(pool.allocator), PagedSeqState(pool.allocator)
    write(pool, state.append(16))
    cache.cache_blocks(list(range(16)), state.blocks)
    with refuses(InvalidSlot, 15, "0", 2):
        pool.append(0, np.array([15]), rows(1), rows(1))


def test_a_slot_out_of_range_has_its_own_error():
    pool = make_pool()
    for slot in (64, -2):
        with refuses(InvalidSlot, slot, 64):
            pool.append(0, np.array([slot]), rows(1), rows(1))


def test_append_refuses_blocks_that_a_growing_pool_does_not_have_yet():
    pool = make_pool(num_blocks=2, max_blocks=8)
    with refuses(InvalidSlot, 112, "7"):
        pool.append(0, np.array([112]), rows(1), rows(1))
    pool.allocator.allocate_n(8)
    pool.append(0, np.array([112]), rows(1), rows(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", [decode, prefill])
def test_attention_refuses_tables_with_free_blocks(call, dtype):
    pool = make_pool(dtype)
    state = PagedSeqState(pool.allocator)
    write(pool, state.append(20))
    table = state.blocks
    assert np.isfinite(attend(pool, table, 20, call)).all()
    state.truncate(16)
    with refuses(InvalidBlock, "block_tables[0, 1]", table[1]):
        attend(pool, table, 20, call)
    assert np.isfinite(attend(pool, table, 16, call)).all()  # entries past the length are not checked


def test_attention_checks_only_blocks_in_the_window():
    pool = make_pool()
    state = PagedSeqState(pool.allocator)
    write(pool, state.append(40))
    table = state.blocks
    pool.allocator.free(table[0])
    tables, lens = np.array([table], np.int32), np.array([40], np.int32)
    assert (decode(rows(1), pool, 0, tables, lens, window_left=7) == 1).all()
    with refuses(InvalidBlock, "block_tables[0, 0]", 0):
        decode(rows(1), pool, 0, tables, lens, window_left=30)
    assert pool.allocator.allocate() == table[0]


def test_attention_refuses_tables_that_were_filled_before_the_release():
    pool = make_pool()
    state = PagedSeqState(pool.allocator)
    write(pool, state.append(3))
    tables = BlockTables(1, 4).fill([state])
    state.release()
    with refuses(InvalidBlock, "block_tables[0, 0]", 0):
        decode(rows(1), pool, 0, tables)


def test_wrong_lengths_have_their_own_errors():
    pool = make_pool()
    pool.allocator.allocate_n(4)
    for length in (-1, 33):
        with refuses(ValueError, length):
            attend(pool, [2, 3], length)


def test_without_it_nothing_is_checked_or_filled():
    pool = make_pool(checked=False)
    state = PagedSeqState(pool.allocator)
    slots = state.append(3)
    write(pool, slots)
    table = state.blocks
    state.release()
    write(pool, slots, 2.0)
    assert (attend(pool, table, 3) == 2).all() and not pool.checked


def test_pools_over_one_allocator_are_checked_together():
    allocator = BlockAllocator(4)
    plain = make_pool(allocator=allocator, checked=False)
    assert not plain.checked
    assert make_pool(allocator=allocator).checked and plain.checked


def test_threads_free_and_write_their_own_blocks_meanwhile():
    pool, wrong = make_pool(num_blocks=64), []

    def work(value):
        for _ in range(50):
            state = PagedSeqState(pool.allocator)
            write(pool, state.append(40), value)
            wrong.append(not (pool.gather(1, state.blocks, 40)[0] == value).all())
            state.release()

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong) and len(wrong) == 200
    pool.allocator.check(others=0)


@pytest.mark.parametrize("value, checked", [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_turns_it_on(value, checked):
    environment = {name: text for name, text in os.environ.items() if name != "PAGEPOOL_CHECK"}
    if value is not None:
        environment["PAGEPOOL_CHECK"] = value
    code = (
        "from pagepool import KvCachePool, KvLayout\n"
        "layout = KvLayout(1, 1, 8)\n"
        "pools = [KvCachePool(8, 2), KvCachePool.from_layout(layout, 2)]\n"
        "given = [KvCachePool.from_layout(layout, 2, checked=checked) for checked in (True, False)]\n"
        "print([pool.checked for pool in pools + given])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([checked, checked, True, False])
