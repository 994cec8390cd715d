"""begin, commit and abort of one sequence: an abort restores blocks, length and bytes; a commit frees what was left."""

import numpy as np
import pytest

from pagepool import BlockAllocator, InvalidBlock, KvCachePool, KvLayout, PagedSeqState
from pagepool.memory.block_tables import append_batch, release_batch

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")


class Written:
    """A sequence whose tokens can be told apart by their keys."""

    def __init__(self, pool, tokens):
        self.pool = pool
        self.state = PagedSeqState(pool.allocator, 4)
        self.write(tokens)

    def write(self, tokens):
        k = np.repeat(np.asarray(tokens, np.float32), 8).reshape(-1, 1, 8)
        self.pool.append(0, self.state.append(len(tokens)), k, k)

    def tokens(self):
        return self.pool.gather(0, self.state.blocks, self.state.len)[0][:, 0, 0].astype(int).tolist()


def sequence(n=10):
    return Written(KvCachePool.from_layout(LAYOUT, 12), range(n))


@pytest.mark.parametrize("cut", [0, 1, 4, 6, 8, 9, 10])
def test_tokens_overwritten_after_a_cut_come_back(cut):
    ours = sequence()
    state, blocks = ours.state, ours.state.blocks
    state.begin()
    state.truncate(cut)
    ours.write(range(100, 112))
    assert ours.tokens() == [*range(cut), *range(100, 112)]
    state.abort()
    assert ours.tokens() == list(range(10)) and state.blocks == blocks
    state.allocator.check(others=0)
    assert state.allocator.in_use == 3


def test_a_commit_keeps_the_new_and_frees_the_old():
    ours = sequence()
    ours.state.begin()
    ours.state.truncate(5)
    ours.write([50, 51])
    assert ours.state.allocator.in_use == 4  # the cut block was copied, and the last one is kept for an abort
    ours.state.commit()
    assert ours.tokens() == [0, 1, 2, 3, 4, 50, 51] and ours.state.allocator.in_use == 2
    ours.state.allocator.check(others=0)


def test_appending_in_place_costs_no_copy_and_no_block():
    ours = sequence(9)
    ours.state.begin()
    ours.write([9, 10])
    assert ours.state.blocks == [0, 1, 2] and ours.state.allocator.in_use == 3
    ours.state.abort()
    assert ours.tokens() == list(range(9))


def test_a_shared_block_that_was_copied_is_shared_again():
    ours = sequence()
    child = ours.state.fork()
    ours.state.begin()
    ours.write([10])
    assert ours.state.blocks == [0, 1, 3]
    ours.state.abort()
    assert ours.state.blocks == child.blocks == [0, 1, 2] and ours.state.allocator.in_use == 3
    ours.state.begin()
    later = ours.state.fork()  # made within: both copy before they write
    ours.write([10, 11])
    later.append(3)
    child.release()
    ours.state.abort()
    assert ours.tokens() == list(range(10))
    later.close()
    ours.state.allocator.check(others=0)


def test_transactions_nest():
    ours = sequence()
    state = ours.state
    state.begin()
    state.truncate(9)
    ours.write([70, 71, 72])
    state.begin()
    state.truncate(2)
    ours.write(range(80, 90))
    state.drop_before(9)
    state.abort()
    assert ours.tokens() == [*range(9), 70, 71, 72]
    state.begin()
    state.truncate(3)
    ours.write([90])
    state.begin()
    state.release()
    state.commit()
    state.commit()
    assert state.len == 0
    state.abort()
    assert ours.tokens() == list(range(10)) and state.allocator.in_use == 3
    state.allocator.check(others=0)


def test_release_close_reserve_window_and_batches_are_taken_back():
    ours = sequence()
    state = ours.state
    state.ensure_capacity(20)
    blocks = state.blocks
    changes = [
        lambda other: state.release(),
        lambda other: state.close(),
        lambda other: state.drop_before(9),
        lambda other: release_batch([state, other]),
        lambda other: (append_batch([state, other], [11, 2]), state.drop_before(20)),
        lambda other: (state.release(), state.adopt(other.blocks, 1)),
        lambda other: state.ensure_capacity(28),
    ]
    for change in changes:
        other = PagedSeqState(state.allocator, 4)
        other.append(1)
        state.begin()
        change(other)
        state.allocator.check(others=0)
        state.abort()
        assert ours.tokens() == list(range(10)) and state.blocks == blocks and not state.closed
        assert list(state.block_table) == blocks + [0] * 7
        del other
        state.allocator.check(others=0)
        assert state.allocator.in_use == 5


def test_a_last_sharer_in_a_transaction_needs_a_block_of_its_own():
    """append_batch lets the last of the sharers keep a block, which one whose abort needs it back must not do."""
    allocator = BlockAllocator(3)
    first = PagedSeqState(allocator, 4)
    first.append(2)
    second = first.fork()
    append_batch([first, second], [1, 1])
    assert allocator.in_use == 2
    second.release()
    second = first.fork()
    allocator.allocate()
    first.begin()
    with pytest.raises(MemoryError, match="asked for 2 blocks, 1 of 3 is free"):
        append_batch([first, second], [1, 1])
    first.abort()
    assert first.blocks == second.blocks and allocator.in_use == 2


def test_nothing_changes_when_a_block_was_freed_behind_its_back():
    allocator = BlockAllocator(8)
    state = PagedSeqState(allocator, 4)
    state.append(10)
    state.begin()
    allocator.free(1)
    for use in (state.release, lambda: state.truncate(3), lambda: release_batch([state])):
        with pytest.raises(InvalidBlock, match="freed by someone else"):
            use()
    assert state.len == 10 and allocator.ref_count(0) == 1
    assert allocator.allocate() == 1
    state.abort()
    allocator.check(others=0)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_only_what_began_ends(end):
    state = PagedSeqState(BlockAllocator(8), 4)
    with pytest.raises(ValueError, match="the sequence is in no transaction"):
        getattr(state, end)()


def test_a_sequence_that_goes_within_a_transaction_leaves_nothing():
    allocator = BlockAllocator(8)
    state = PagedSeqState(allocator, 4)
    state.append(10)
    state.begin()
    state.truncate(3)
    state.begin()
    state.append(9)
    del state
    assert allocator.in_use == 0
