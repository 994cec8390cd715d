"""Closed sequences: any use raises a clear error and changes nothing."""

import pytest
from refusals import refuses

from pagepool import BlockAllocator, BlockTables, PagedSeqState, StaleHandle
from pagepool.memory.block_tables import append_batch, release_batch


@pytest.mark.parametrize(
    "use",
    [
        lambda state: state.append(),
        lambda state: state.ensure_capacity(1),
        lambda state: state.truncate(0),
        lambda state: state.drop_before(0),
        lambda state: state.fork(),
        lambda state: state.adopt([]),
        lambda state: state.release(),
        lambda state: append_batch([state], [1]),
        lambda state: release_batch([state]),
        lambda state: BlockTables(1, 8).fill([state]),
    ],
)
def test_a_closed_sequence_refuses_every_use(use):
    allocator = BlockAllocator(8)
    state = PagedSeqState(allocator, 4, label="request 3")
    state.append(6)
    state.close()
    state.close()
    other = PagedSeqState(allocator, 4)
    other.append(6)
    with refuses(StaleHandle, "request 3"):
        use(state)
    assert state.blocks == [] and state.len == 0 and other.blocks == [1, 0] and allocator.in_use == 2


def test_release_batch_may_close():
    allocator = BlockAllocator(8)
    states = [PagedSeqState(allocator, 4) for _ in range(3)]
    append_batch(states, [5, 1, 2])
    release_batch(states[:2])
    release_batch(states, close=True)
    assert [state.closed for state in states] == [True] * 3 and allocator.in_use == 0
