"""The reference sequences and tables: mapping, sharing, copy-on-write, all or nothing."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from pagepool import KvLayout, PoolExhausted
from pagepool.reference import BlockAllocator, BlockTables, KvCachePool, PagedSeqState, append_batch, release_batch


def test_slots_follow_the_blocks():
    allocator = BlockAllocator(8)
    allocator.allocate_n(3)
    state = PagedSeqState(allocator, block_size=4)
    assert state.append(6).tolist() == [12, 13, 14, 15, 16, 17]
    assert (state.blocks, state.len, state.context_len) == ([3, 4], 6, 6)
    assert state.block_table.tolist() == [3, 4, 0, 0, 0, 0, 0, 0]


def test_ensure_capacity_reserves_without_changing_len_and_is_idempotent():
    state = PagedSeqState(BlockAllocator(8), block_size=4)
    for _ in range(2):
        state.ensure_capacity(9)
        assert (state.blocks, state.len) == ([0, 1, 2], 0)
    state.ensure_capacity(1)
    assert state.blocks == [0, 1, 2]


def test_fork_leaves_reserved_blocks_with_the_parent():
    allocator = BlockAllocator(8)
    parent = PagedSeqState(allocator, block_size=4)
    parent.append(5)
    parent.ensure_capacity(16)
    child = parent.fork()
    assert (parent.blocks, child.blocks, child.len) == ([0, 1, 2, 3], [0, 1], 5)
    assert [allocator.ref_count(block) for block in range(4)] == [2, 2, 1, 1]


def test_append_copies_a_shared_block_in_every_attached_pool_before_it_writes():
    allocator = BlockAllocator(4)
    layout = KvLayout(2, 1, 8, block_size=3, dtype="float32")
    pools = [KvCachePool.from_layout(layout, 4, allocator) for _ in range(2)]
    parent = PagedSeqState(allocator, block_size=3)
    parent.append(2)
    for number, pool in enumerate(pools):
        pool.page(0)[:] = np.arange(layout.page_size) + number
    child = parent.fork()
    assert child.append().tolist() == [1 * 3 + 2]
    for number, pool in enumerate(pools):
        np.testing.assert_array_equal(pool.page(1), np.arange(layout.page_size) + number)
    assert [allocator.ref_count(block) for block in (0, 1)] == [1, 1]
    assert parent.append().tolist() == [2]


def test_a_full_shared_block_is_not_copied():
    allocator = BlockAllocator(4)
    parent = PagedSeqState(allocator, block_size=2)
    parent.append(2)
    child = parent.fork()
    child.append()
    assert (parent.blocks, child.blocks, allocator.ref_count(0)) == ([0], [0, 1], 2)


def test_truncate_gives_back_the_tail_and_release_everything():
    allocator = BlockAllocator(8)
    state = PagedSeqState(allocator, block_size=2)
    state.append(5)
    state.ensure_capacity(10)
    state.truncate(3)
    assert (state.blocks, state.len, state.block_table.tolist()[:4]) == ([0, 1], 3, [0, 1, 0, 0])
    with pytest.raises(ValueError, match="4"):
        state.truncate(4)
    state.release()
    assert (state.blocks, state.len, allocator.in_use) == ([], 0, 0)
    assert state.append().tolist() == [2]  # block 1 was given back last


def test_failed_calls_change_nothing():
    allocator = BlockAllocator(4)
    parent = PagedSeqState(allocator, block_size=2, max_blocks_per_seq=4)
    parent.append(5)
    child = parent.fork()
    allocator.allocate()
    before = parent.blocks, child.blocks, child.len, [allocator.ref_count(b) for b in range(4)]
    with pytest.raises(PoolExhausted, match="asked for 1 blocks, 0 of 4 are free"):
        child.append()
    for call in (lambda: child.append(4), lambda: child.ensure_capacity(9), lambda: child.append(-1)):
        with pytest.raises(ValueError, match=r"at most|at least"):
            call()
    assert before == (parent.blocks, child.blocks, child.len, [allocator.ref_count(b) for b in range(4)])


def test_append_batch_is_all_or_nothing_and_counts_copies_exactly():
    allocator = BlockAllocator(4)
    parent = PagedSeqState(allocator, block_size=4)
    parent.append(2)
    family = [parent, parent.fork(), parent.fork()]
    allocator.allocate_n(2)
    with pytest.raises(PoolExhausted, match="asked for 2 blocks, 1 of 4 are free"):
        append_batch(family, [1, 1, 1])
    assert [state.len for state in family] == [2, 2, 2]
    assert allocator.ref_count(0) == 3
    allocator.free(2)
    append_batch(family, [1, 1, 1])  # the third writer is alone by then: two copies, not three
    assert [state.len for state in family] == [3, 3, 3]
    assert sorted(state.blocks[0] for state in family) == [0, 2, 3]
    with pytest.raises(ValueError, match="twice"):
        append_batch([parent, parent], [1, 1])
    with pytest.raises(ValueError, match="twice"):
        release_batch([parent, parent])
    release_batch(family)
    assert allocator.in_use == 1


def test_tables_cover_the_last_tokens_of_each_state():
    allocator = BlockAllocator(8)
    states = [PagedSeqState(allocator, block_size=2) for _ in range(3)]
    for state, tokens in zip(states, (3, 0, 2), strict=True):
        state.append(tokens)
    tables = BlockTables(3, 4)
    assert tables.fill(states) is tables
    assert tables.slot_mapping.tolist() == [2, 5]
    assert tables.query_start_loc.tolist() == [0, 1, 1, 2]
    batch = SimpleNamespace(states=states, num_tokens=[3, 0, 1])
    tables.fill(batch)
    assert tables.block_tables.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0]]
    assert tables.seq_lens.tolist() == [3, 0, 2]
    assert tables.slot_mapping.tolist() == [0, 1, 2, 5]
    dtypes = [a.dtype for a in (tables.block_tables, tables.seq_lens, tables.slot_mapping, tables.query_start_loc)]
    assert dtypes == [np.int32, np.int32, np.int64, np.int32]
    for wrong in ((states * 2,), (states, [1]), (states, [4, 0, 0])):
        with pytest.raises(ValueError, match=r"\d"):
            tables.fill(*wrong)
    assert tables.slot_mapping.tolist() == [0, 1, 2, 5]


def test_references_equal_the_tables_entries():
    allocator = BlockAllocator(16)
    root = PagedSeqState(allocator, block_size=2)
    root.append(7)
    states = [root, root.fork(), root.fork()]
    states[1].append(3)
    states[2].truncate(3)
    held = Counter(block for state in states for block in state.blocks)
    assert [allocator.ref_count(block) for block in range(16)] == [held[block] for block in range(16)]
