"""Blocks before a sliding window are freed. Attention over the remaining blocks has the same bits."""

import numpy as np
import pytest
from refusals import refuses

from pagepool import BlockAllocator, BlockTables, InvalidBlock, KvCachePool, KvLayout, PagedSeqState, decode


def test_attention_reads_nothing_that_was_given_back():
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16, dtype="float32")
    pool = KvCachePool.from_layout(layout, 16)
    random = np.random.default_rng(3)
    state = PagedSeqState(pool.allocator)
    k, v = random.standard_normal((2, 100, 1, 16), dtype=np.float32)
    pool.append(0, state.append(100), k, v)
    q = random.standard_normal((1, 2, 16), dtype=np.float32)
    tables = BlockTables(1, 8)

    def attend(**options):
        tables.fill([state])
        return decode(q, pool, 0, tables.block_tables, tables.seq_lens, **options)

    whole = attend(window_left=40)
    state.drop_before(100 - 41)
    assert state.first_block == 3 and pool.allocator.in_use == 4
    pool.append(0, PagedSeqState(pool.allocator).append(48), *np.full((2, 48, 1, 16), np.nan, np.float32))
    assert np.array_equal(attend(window_left=40), whole)
    with refuses(InvalidBlock, "block_tables[0, 0]", -1):
        attend()


def test_the_window_moves_on_and_the_rest_stays_in_place():
    allocator = BlockAllocator(8)
    state = PagedSeqState(allocator, 4)
    state.append(11)
    state.drop_before(3)
    assert state.first_block == 0
    state.drop_before(9)
    assert (state.first_block, state.blocks, state.len) == (2, [2], 11)
    assert list(state.block_table)[:4] == [-1, -1, 2, 0]
    assert state.append(3).tolist() == [11, 4, 5]
    state.drop_before(100)
    assert (state.first_block, state.blocks, allocator.in_use) == (3, [1], 1)
    child = state.fork()
    assert (child.first_block, child.blocks) == (3, [1])
    state.truncate(13)
    with refuses(ValueError, 11, 12):
        state.truncate(11)
    with refuses(ValueError, 3, 13, 0, 12):
        BlockTables(1, 8).fill([state], [3])
    state.truncate(0)
    child.release()
    assert (state.first_block, child.first_block, allocator.in_use) == (0, 0, 0)
    assert not any(state.block_table)


def test_a_bad_position_changes_nothing():
    state = PagedSeqState(BlockAllocator(8), 4)
    state.append(9)
    with refuses(ValueError, "position", -1):
        state.drop_before(-1)
    state.allocator.free(state.blocks[0])
    with pytest.raises(InvalidBlock, match="freed by someone else"):
        state.drop_before(8)
    assert state.first_block == 0 and state.len == 9
    state.allocator.allocate()
