"""Handles and closed sequences: whoever uses what was given back gets a clear error and changes nothing."""

import pytest
from refusals import refuses

from pagepool import BlockAllocator, BlockTables, PagedSeqState, StaleHandle
from pagepool.memory.block_tables import append_batch, release_batch


def test_a_handle_is_stale_once_its_sequence_was_released():
    state = PagedSeqState(BlockAllocator(8), 4, label=7)
    handle = state.handle()
    state.append(5)
    assert handle.state is state and not handle.is_stale
    state.release()
    again = state.handle()
    state.append(3)
    assert handle.is_stale and again.state is state
    with refuses(StaleHandle, 0, 7, 1):
        _ = handle.state
    state.truncate(0)
    assert again.state is state  # emptied by its own holder
    state.close()
    with refuses(StaleHandle, 1, 7):
        _ = again.state


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
        lambda state: state.handle(),
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
