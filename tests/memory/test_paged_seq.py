"""PagedSeqState: the block table of one sequence. test_copy_on_write.py tests the bytes."""

import gc

import numpy as np
import pytest
from refusals import refuses

import pagepool
from pagepool import (
    BlockAllocator,
    HybridSequence,
    InvalidBlock,
    KvCachePool,
    KvGroup,
    KvLayout,
    PagedSeqState,
    PoolExhausted,
    PrefixCache,
    Scheduler,
    SchedulerConfig,
    reference,
)
from pagepool.memory.batch import append_batch


@pytest.fixture
def allocator():
    allocator = BlockAllocator(8)
    yield allocator
    allocator.check()


def test_defaults(allocator):
    state = PagedSeqState(allocator)
    assert (state.block_size, state.max_blocks_per_seq, state.len, state.blocks) == (16, 8, 0, [])
    assert state.allocator is allocator


def test_append_nothing(allocator):
    state = PagedSeqState(allocator)
    assert state.append(0).shape == (0,) and state.len == 0 and state.blocks == []


@pytest.mark.parametrize("call", [lambda s: s.ensure_capacity(17), lambda s: s.append(12), lambda s: s.append(2**70)])
def test_past_the_maximum_is_a_value_error_and_changes_nothing(allocator, call):
    state = PagedSeqState(allocator, block_size=4, max_blocks_per_seq=4)
    state.append(5)
    with refuses(ValueError, 4):
        call(state)
    assert (state.len, state.blocks, allocator.in_use) == (5, [0, 1], 2)


@pytest.mark.parametrize("call", [lambda s: s.ensure_capacity(16), lambda s: s.append(11)])
def test_an_exhausted_allocator_changes_nothing(allocator, call):
    state = PagedSeqState(allocator, block_size=4)
    state.append(5)
    allocator.allocate_n(5)
    with refuses(PoolExhausted, 2, 1, 8):
        call(state)
    assert (state.len, state.blocks, allocator.free_count) == (5, [0, 1], 1)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda it: it.ensure_capacity(-1), ValueError, (-1,)),
        (lambda it: it.ensure_capacity(-(2**70)), ValueError, (-(2**70),)),
        (lambda it: it.ensure_capacity(1.0), TypeError, ("float",)),
        (lambda it: it.append(-1), ValueError, (-1,)),
        (lambda it: it.append(-(2**70)), ValueError, (-(2**70),)),
        (lambda it: it.append(1.0), TypeError, ("float",)),
        (lambda it: it.truncate(-1), ValueError, (3, -1)),
        (lambda it: it.truncate(-(2**70)), ValueError, (3, -(2**70))),
        (lambda it: it.truncate(1.0), TypeError, ("float",)),
        (lambda it: PagedSeqState(it.allocator, 0), ValueError, ("block_size", 1, 1024, 0)),
        (lambda it: PagedSeqState(it.allocator, 1025), ValueError, ("block_size", 1, 1024, 1025)),
        (lambda it: PagedSeqState(it.allocator, -1), ValueError, ("block_size", 1, 1024, -1)),
        (lambda it: PagedSeqState(it.allocator, 16, -1), ValueError, ("max_blocks_per_seq", 0, -1)),
        (lambda it: PagedSeqState(it.allocator, 16, 2**31), ValueError, (0, 2147483647, 2147483648)),
        (lambda it: PagedSeqState(None), TypeError, ("allocator",)),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(allocator, call, error, words):
    state = PagedSeqState(allocator)
    state.append(3)
    with refuses(error, *words):
        call(state)
    assert (state.len, state.blocks, allocator.in_use) == (3, [0], 1)


def test_block_table_is_live_fixed_and_zero_padded(allocator):
    state = PagedSeqState(allocator, block_size=4, max_blocks_per_seq=5)
    allocator.allocate()
    table = state.block_table
    assert isinstance(table, memoryview) and table.format == "i" and table.tolist() == [0] * 5
    state.append(9)
    assert table.tolist() == [1, 2, 3, 0, 0]
    state.truncate(4)
    assert table.tolist() == [1, 0, 0, 0, 0]
    assert np.asarray(table).dtype == np.int32


def test_block_table_can_only_be_read(allocator):
    state = PagedSeqState(allocator, block_size=4)
    state.append(9)
    table = state.block_table
    with refuses(TypeError, "read"):
        table[0] = 7
    with refuses(ValueError, "read"):
        np.asarray(table)[0] = 7
    assert table.readonly and table.tolist()[:3] == state.blocks == [0, 1, 2]


def test_block_table_outlives_the_state(allocator):
    state = PagedSeqState(allocator, block_size=4)
    table = state.block_table
    state.append(9)
    del state
    assert allocator.in_use == 0 and table.tolist() == [0] * 8


def test_a_freed_state_frees_its_blocks(allocator):
    state = PagedSeqState(allocator, block_size=4)
    state.append(9)
    child = state.fork()
    del state
    gc.collect()
    assert allocator.in_use == 3
    del child
    gc.collect()
    assert allocator.in_use == 0


def test_a_state_keeps_its_allocator():
    state = PagedSeqState(BlockAllocator(4))
    gc.collect()
    assert state.append(20).shape == (20,) and state.allocator.in_use == 2


@pytest.mark.parametrize(
    "blocks, num_tokens, error, words",
    [
        ([0, 1], 9, ValueError, (9, 2, 4)),
        ([0, 1], 4, ValueError, (4, 2)),
        ([0], -1, ValueError, (-1,)),
        ([0, 1, 2, 3], 16, ValueError, (16, 4, 3)),
        ([0, 7], 8, InvalidBlock, ("block", 7)),
        ([0, 99], 8, InvalidBlock, ("block", 99)),
        ([0, 1.5], 8, TypeError, ("float",)),
    ],
)
def test_a_refused_adoption_changes_nothing(allocator, blocks, num_tokens, error, words):
    allocator.allocate_n(4)
    state = PagedSeqState(allocator, 4, 3)
    with refuses(error, *words):
        state.adopt(blocks, num_tokens)
    assert (state.len, state.blocks, allocator.ref_count(0)) == (0, [], 1)


def test_a_sequence_with_blocks_adopts_none(allocator):
    state = PagedSeqState(allocator, block_size=4)
    state.ensure_capacity(1)
    with refuses(ValueError, 1):
        state.adopt(allocator.allocate_n(1))
    assert state.blocks == [0] and allocator.ref_count(1) == 1


def test_append_unshares_reserved_blocks_that_others_hold(allocator):
    state = PagedSeqState(allocator, block_size=4)
    state.ensure_capacity(12)
    allocator.share([1, 2])
    state.append(6)
    assert (state.blocks, allocator.ref_count(1), allocator.ref_count(2)) == ([0, 3, 2], 1, 2)


def test_unsharing_counts_among_the_blocks_asked_for(allocator):
    state = PagedSeqState(allocator, block_size=4)
    state.append(6)
    child = state.fork()
    allocator.allocate_n(5)
    with refuses(PoolExhausted, 2, 1, 8):
        child.append(3)
    assert (child.len, child.blocks, allocator.ref_count(1)) == (6, [0, 1], 2)


def test_appending_many_blocks_at_once():
    allocator = BlockAllocator(3000)
    state = PagedSeqState(allocator, block_size=1)
    assert state.append(3000).tolist() == list(range(3000))
    assert state.fork().len == 3000


@pytest.mark.parametrize("capacity, maximum", [(0, None), (0, 4), (4, 0)])
def test_nothing_to_append_to(capacity, maximum):
    allocator = BlockAllocator(capacity)
    state = PagedSeqState(allocator, max_blocks_per_seq=maximum)
    assert state.append(0).shape == (0,)
    with pytest.raises((ValueError, PoolExhausted)):
        state.append()
    assert state.fork().blocks == [] and len(state.block_table) == state.max_blocks_per_seq
    state.release()


def test_blocks_freed_behind_the_back_are_reported(allocator):
    state = PagedSeqState(allocator, block_size=4)
    state.append(8)
    allocator.free(1)
    for call in (state.release, state.fork, lambda: state.truncate(0)):
        with pytest.raises(InvalidBlock, match="freed by someone else"):
            call()
        assert (state.len, state.blocks, allocator.ref_count(0)) == (8, [0, 1], 1)
    assert allocator.allocate() == 1


def test_a_huge_number_of_tokens_raises_pool_exhausted(allocator):
    """`PoolExhausted` is also a MemoryError, but an engine can handle it, for example by preemption."""
    states = [PagedSeqState(allocator, 1024, 2**30) for _ in range(3)]
    hybrid = HybridSequence([KvGroup(allocator, 1024, None, 2**30)])
    states[0].append(5)
    for append, needed in (
        (lambda: states[0].append(10**12), 976562500),
        (lambda: append_batch(states, [10**12] * 3), 2929687500),
        (lambda: append_batch(states, [10**12, 0, 3]), 976562501),
        (lambda: hybrid.append(10**12), 976562500),
    ):
        with refuses(PoolExhausted, needed, 7, 8):
            append()
        assert [state.len for state in states] == [5, 0, 0] and hybrid.len == 0 and allocator.free_count == 7


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_state_freed_after_such_a_free_touches_no_block(allocator):
    state = PagedSeqState(allocator, block_size=4)
    state.append(8)
    allocator.free(1)
    del state
    assert allocator.ref_count(0) == 1


def test_sequences_and_allocators_are_not_tracked_by_the_garbage_collector():
    """Reference counts free sequences: a sequence cleared by the garbage collector could not free its blocks."""
    allocator = BlockAllocator(4)
    assert not gc.is_tracked(allocator) and not gc.is_tracked(PagedSeqState(allocator))


def test_a_sequence_has_blocks_of_as_many_tokens_as_the_pool_of_its_allocator():
    """Otherwise two sequences would write slots of the same page."""
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=32), 4)
    for make in (PagedSeqState, PrefixCache):
        assert make(pool.allocator).block_size == make(pool.allocator, 32).block_size == 32
        with refuses(ValueError, "block_size", 32, 16):
            make(pool.allocator, 16)
    with refuses(ValueError, "block_size", 32, 16):
        Scheduler(SchedulerConfig(block_size=16), pool.allocator)
    pool.close()
    assert PagedSeqState(pool.allocator).block_size == PagedSeqState(KvCachePool(8, 2).allocator).block_size == 16


@pytest.mark.parametrize("package", [pagepool, reference], ids=["compiled", "reference"])
def test_an_allocator_has_one_block_size(package):
    layouts = [KvLayout(1, 1, 8, block_size=size, dtype="float32") for size in (8, 16)]
    allocator = package.BlockAllocator(4)
    pool = package.KvCachePool.from_layout(layouts[0], 4, allocator)
    with refuses(ValueError, "block_size", 8, 16):
        package.KvCachePool.from_layout(layouts[1], 4, allocator)
    second = package.KvCachePool.from_layout(layouts[0], 4, allocator)
    del pool, second
    third = package.KvCachePool.from_layout(layouts[1], 4, allocator)
    state = package.PagedSeqState(allocator)
    del third
    with refuses(ValueError, "block_size", 16, 8):  # the sequence's slots would be in wrong blocks
        package.KvCachePool.from_layout(layouts[0], 4, allocator)
    assert state.block_size == 16


def test_closed_and_flat_pools_have_no_block_size():
    flat = KvCachePool(8, 4)
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=8), 4, flat.allocator)
    assert PagedSeqState(flat.allocator).block_size == 8
    pool.close()
    KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=32), 4, flat.allocator)
