"""BlockTables, append_batch and release_batch: operations on a whole batch."""

from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refuses

import pagepool
from pagepool import BlockAllocator, BlockTables, InvalidBlock, PagedSeqState, reference
from pagepool.memory.block_tables import append_batch, release_batch


@pytest.fixture
def allocator():
    allocator = BlockAllocator(16)
    yield allocator
    allocator.check()


def sequences(allocator, *lengths, block_size=4, **options):
    states = [PagedSeqState(allocator, block_size, **options) for _ in lengths]
    for state, length in zip(states, lengths, strict=True):
        state.append(length)
    return states


def test_fill_takes_a_batch_of_the_scheduler(allocator):
    batch = SimpleNamespace(states=sequences(allocator, 5, 2), num_tokens=[2, 1])
    tables = BlockTables(2, 2).fill(batch)
    assert tables.slot_mapping.tolist() == [3, 4, 9]
    with refuses(ValueError, "num_tokens"):
        tables.fill(batch, [1, 1])


def test_fill_leaves_nothing_of_an_earlier_batch(allocator):
    tables = BlockTables(2, 4)
    tables.fill(sequences(allocator, 16, 16))
    states = sequences(allocator, 1, 5)
    assert tables.fill(states).block_tables[:, 2:].tolist() == [[0, 0], [0, 0]]
    assert tables.fill([]).block_tables.shape == (0, 4)
    assert tables.query_start_loc.tolist() == [0]


def test_writes_to_the_arrays_change_no_sequence_and_no_later_batch(allocator):
    states = sequences(allocator, 6, 9)
    tables = BlockTables(2, 3).fill(states)
    for array in (tables.block_tables, tables.seq_lens, tables.slot_mapping, tables.query_start_loc):
        array[:] = 2**30
    assert [state.blocks for state in states] == [[0, 1], [2, 3, 4]]
    tables.fill(states)
    assert tables.seq_lens.tolist() == [6, 9] and tables.slot_mapping.tolist() == [5, 16]
    assert tables.query_start_loc.tolist() == [0, 1, 2]
    assert [tables.block_tables[row, :blocks].tolist() for row, blocks in ((0, 2), (1, 3))] == [[0, 1], [2, 3, 4]]


def test_arrays_are_allocated_once(allocator):
    tables = BlockTables(3, 4)
    names = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping")
    before = {name: getattr(tables.fill(sequences(allocator, 3, 3)), name) for name in names}
    tables.fill(sequences(allocator, 2, 7, 1))
    for name in names:
        assert np.shares_memory(before[name], getattr(tables, name))
    assert before["seq_lens"].tolist() == [2, 7], "a view shows the next fill"


def test_slot_mapping_grows_with_the_batch(allocator):
    tables = BlockTables(1, 10)
    for length in (1, 2, 9, 5):
        assert tables.fill(sequences(allocator, length), [length]).slot_mapping.shape == (length,)


def test_reserved_blocks_need_no_room_in_a_row(allocator):
    [state] = sequences(allocator, 4)
    state.ensure_capacity(16)
    assert BlockTables(1, 1).fill([state]).block_tables.tolist() == [[0]]


def test_views_outlive_the_tables(allocator):
    view = BlockTables(1, 2).fill(sequences(allocator, 5)).block_tables
    assert view.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "lengths, num_tokens, words",
    [
        ([1, 1, 1], None, (3, 2)),
        ([1, 9], None, ("sequence", 1, 3, 2)),
        ([1, 1], [1], (1, 2)),
        ([1, 2], [1, 3], ("sequence", 1, 2, 3)),
        ([1, 2], [1, -1], (-1,)),
    ],
)
def test_a_batch_that_does_not_fit_changes_nothing(allocator, lengths, num_tokens, words):
    tables = BlockTables(2, 2).fill(sequences(allocator, 3, 6))
    before = [tables.block_tables.copy(), tables.seq_lens.copy(), tables.slot_mapping.copy()]
    with refuses(ValueError, *words):
        tables.fill(sequences(allocator, *lengths), num_tokens)
    for old, new in zip(before, [tables.block_tables, tables.seq_lens, tables.slot_mapping], strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("package", [pagepool, reference], ids=["compiled", "reference"])
@pytest.mark.parametrize("as_batch", [False, True])
def test_sequences_of_two_allocators_are_refused(package, as_batch):
    one, two = package.BlockAllocator(4), package.BlockAllocator(4)
    states = [package.PagedSeqState(allocator) for allocator in (one, one, two)]
    for state in states:
        state.append(3)
    tables = package.BlockTables(4, 4).fill(states[:1])
    before = tables.block_tables.copy(), tables.seq_lens.copy(), tables.slot_mapping.copy()
    with pytest.raises(ValueError, match=r"states.*0 and 2"):
        tables.fill(SimpleNamespace(states=states, num_tokens=[1, 1, 1]) if as_batch else states)
    for old, new in zip(before, (tables.block_tables, tables.seq_lens, tables.slot_mapping), strict=True):
        np.testing.assert_array_equal(old, new)
    assert tables.allocator is one
    assert tables.fill([]).allocator is None
    assert tables.fill(states[2:]).allocator is two


def test_an_object_that_is_not_a_sequence_is_a_type_error(allocator):
    tables = BlockTables(2, 2)
    for states in ([None], [sequences(allocator, 1)], 3):
        with pytest.raises(TypeError):
            tables.fill(states)
    with pytest.raises(TypeError):
        tables.fill(sequences(allocator, 2), [1.0])


@pytest.mark.parametrize("sizes", [(-1, 1), (1, -1), (2**31, 1)])
def test_sizes_out_of_range(sizes):
    with pytest.raises(ValueError):
        BlockTables(*sizes)


def test_no_rows_or_no_width():
    assert BlockTables(0, 3).fill([]).block_tables.shape == (0, 3)
    tables = BlockTables(2, 0).fill([PagedSeqState(BlockAllocator(0))])
    assert tables.block_tables.shape == (1, 0) and tables.slot_mapping.shape == (0,)


@pytest.mark.parametrize(
    "counts, error, words",
    [
        ([1], ValueError, (2, 1)),
        ([1, -1], ValueError, (-1, 4, 1)),
        ([1, 13], ValueError, (0, 16)),
        ([1, 2**61], ValueError, (0, 16)),
        ([1, 1.0], TypeError, ("float",)),
        ([1, None], TypeError, ("NoneType",)),
    ],
)
def test_bad_counts_change_nothing(allocator, counts, error, words):
    states = sequences(allocator, 6, 4, max_blocks_per_seq=4)
    with refuses(error, *words):
        append_batch(states, counts)
    assert [state.len for state in states] == [6, 4] and allocator.in_use == 3


@pytest.mark.parametrize("call", [lambda states: append_batch(states, [1] * len(states)), release_batch])
def test_bad_states(allocator, call):
    states = sequences(allocator, 6, 4)
    with refuses(ValueError, "sequence", 2):
        call([*states, states[0]])
    with refuses(ValueError, "allocators"):
        call([*states, PagedSeqState(BlockAllocator(1))])
    with pytest.raises(TypeError):
        call([*states, None])
    with pytest.raises(TypeError):
        call(None)
    assert [state.len for state in states] == [6, 4] and allocator.in_use == 3
    call([])


def test_release_batch_is_all_or_none(allocator):
    states = sequences(allocator, 6, 4)
    allocator.free(1)
    with refuses(InvalidBlock, 3, 2):
        release_batch(states)
    assert [state.len for state in states] == [6, 4] and allocator.ref_count(0) == 1
    allocator.allocate()


def test_a_batch_allocates_no_block_for_the_last_sharer():
    allocator = BlockAllocator(3, 8)
    parent = PagedSeqState(allocator, 4)
    parent.append(6)
    child = parent.fork()
    append_batch([parent, child], [1, 1])  # the first sequence copies the block, then the second owns it alone
    assert (allocator.capacity, allocator.in_use) == (3, 3)
    append_batch([], [])


def test_a_number_may_do_anything_while_it_is_read():
    """A number's `__index__` can release a sequence. The call sees the change and accesses no freed memory."""
    allocator = BlockAllocator(5000)
    states = [PagedSeqState(allocator, 1) for _ in range(2)]

    class Shrinking:
        def __index__(self):
            states[0].release()
            return 1

    states[0].ensure_capacity(4000)
    append_batch(states, [900, Shrinking()])
    assert [state.len for state in states] == [900, 1] and allocator.in_use == 901
    with refuses(ValueError, "sequence", 0, 900):
        BlockTables(2, 5000).fill(states, [900, Shrinking()])
    fewer = [*states]

    class Removing:
        def __index__(self):
            fewer.pop()
            return 1

    with refuses(ValueError, 1, 2):
        append_batch(fewer, [1, Removing()])
    allocator.check(others=0)
