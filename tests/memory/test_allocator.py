"""BlockAllocator, as the fixed table describes it."""

import numpy as np
import pytest

from pagepool import BlockAllocator, InvalidBlock, PoolError, PoolExhausted


def test_fresh_allocator_hands_out_ids_in_order():
    allocator = BlockAllocator(5)
    assert [allocator.allocate() for _ in range(2)] == [0, 1]
    assert allocator.allocate_n(3).tolist() == [2, 3, 4]


def test_most_recently_freed_comes_first():
    allocator = BlockAllocator(6)
    allocator.allocate_n(5)
    allocator.free([1, 3])
    assert [allocator.allocate() for _ in range(3)] == [3, 1, 5]
    allocator.free([0, 2, 4])
    assert allocator.allocate_n(3).tolist() == [4, 2, 0]


def test_allocate_n_continues_from_freed_to_fresh_blocks():
    allocator = BlockAllocator(6)
    allocator.allocate_n(3)
    allocator.free(1)
    assert allocator.allocate_n(4).tolist() == [1, 3, 4, 5]


def test_allocate_n_returns_int32_array():
    allocator = BlockAllocator(3)
    blocks = allocator.allocate_n(np.int64(2))
    assert isinstance(blocks, np.ndarray) and blocks.dtype == np.int32 and blocks.shape == (2,)
    assert allocator.allocate_n(0).shape == (0,)


def test_exhaustion_names_both_numbers_and_changes_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate_n(3)
    with pytest.raises(PoolExhausted, match="asked for 2 blocks, 1 of 4 is free"):
        allocator.allocate_n(2)
    assert (allocator.free_count, allocator.in_use) == (1, 3)
    allocator.allocate()
    with pytest.raises(PoolExhausted, match="asked for 1 block, 0 of 4 are free") as caught:
        allocator.allocate()
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, PoolError)
    with pytest.raises(PoolExhausted, match="asked for 1180591620717411303424 blocks, 0 of 4 are free"):
        allocator.allocate_n(2**70)
    allocator.check()


def test_capacity_zero_is_legal():
    allocator = BlockAllocator(0)
    assert (allocator.capacity, allocator.free_count, allocator.in_use, allocator.peak_in_use) == (0, 0, 0, 0)
    assert allocator.allocate_n(0).tolist() == []
    allocator.free([])
    with pytest.raises(PoolExhausted):
        allocator.allocate()
    with pytest.raises(InvalidBlock):
        allocator.free(0)
    with pytest.raises(InvalidBlock):
        allocator.ref_count(0)
    allocator.check()


def test_largest_capacity_is_made_at_once_and_touches_nothing():
    allocator = BlockAllocator(2**31 - 1)
    assert allocator.allocate() == 0
    allocator.check()


@pytest.mark.parametrize("number", [-1, 2**31, 2**80])
def test_capacity_out_of_range(number):
    with pytest.raises(ValueError, match=str(number)):
        BlockAllocator(number)


@pytest.mark.parametrize("number", [1.0, "1", None])
def test_capacity_must_be_an_integer(number):
    with pytest.raises(TypeError):
        BlockAllocator(number)


def test_negative_number_of_blocks():
    with pytest.raises(ValueError, match="-1"):
        BlockAllocator(4).allocate_n(-1)


def snapshot(allocator):
    allocator.check()
    return [allocator.ref_count(b) for b in range(allocator.capacity)], allocator.free_count, allocator.peak_in_use


@pytest.mark.parametrize(
    "blocks",
    [
        5,  # free again
        [5],
        [0, 5],
        [1, 2, 5, 0],
        [0, 1, 0],  # more often than it has references, in one call
        [3, 3, 3],  # likewise, with 2 references
        6,  # never handed out
        8,  # foreign
        [0, 1, 8],
        -1,
        [0, -1],
        2**31,
        -(2**31) - 1,
        2**80,
        [0, 2**40],
        np.array([0, 2**40]),
        np.array([0, -1]),
        np.array([0, 1, 0], np.int32),
        np.array([0, 9], np.uint8),
    ],
    ids=str,
)
def test_bad_free_raises_and_changes_nothing(blocks):
    allocator = BlockAllocator(8)
    allocator.allocate_n(6)
    allocator.share(3)
    allocator.free(5)
    before = snapshot(allocator)
    with pytest.raises(InvalidBlock):
        allocator.free(blocks)
    assert snapshot(allocator) == before
    assert allocator.allocate() == 5, "the order of the free list is as it was"


def test_errors_say_what_is_wrong():
    allocator = BlockAllocator(4)
    allocator.allocate_n(3)
    allocator.free(2)
    with pytest.raises(InvalidBlock, match="block 7 is out of range: there are 4 blocks"):
        allocator.free([0, 7])
    with pytest.raises(InvalidBlock, match="cannot drop 1 reference of block 2: it is free and has 0"):
        allocator.free(2)
    with pytest.raises(InvalidBlock, match="cannot drop 2 references of block 1: it has 1"):
        allocator.free([1, 1])
    with pytest.raises(InvalidBlock, match="cannot add 1 reference to block 3: it is free and has 0"):
        allocator.share([0, 3])


@pytest.mark.parametrize(
    "blocks",
    [
        [1, 3],
        (1, 3),
        range(1, 4, 2),
        {1: None, 3: None},
        np.array([1, 3], np.int32),
        np.array([1, 3], np.int64),
        np.array([1, 9, 3, 9], np.int32)[::2],
        np.array([3, 9, 1, 9], np.int64)[::-2][::1][:2][::-1][:0:-1].tolist() + [1, 3][0:2],
        np.array([1, 3], np.uint16),
        np.array([1, 3], ">i4"),
        np.frombuffer(b"\0" + np.array([1, 3], np.int32).tobytes(), np.int32, 2, 1),  # not aligned
        [np.int8(1), np.uint64(3)],
        memoryview(np.array([1, 3], np.int32)),
    ],
    ids=lambda blocks: type(blocks).__name__ if isinstance(blocks, memoryview) else repr(blocks),
)
def test_free_takes_any_integers(blocks):
    allocator = BlockAllocator(4)
    allocator.allocate_n(4)
    if isinstance(blocks, list) and len(blocks) > 2:
        blocks = blocks[-2:]
    allocator.free(blocks)
    assert [allocator.allocate(), allocator.allocate()] == [3, 1]


@pytest.mark.parametrize("block", [1, np.int32(1), np.uint8(1), np.array(1)], ids=repr)
def test_free_takes_one_integer(block):
    allocator = BlockAllocator(2)
    allocator.allocate_n(2)
    allocator.free(block)
    assert allocator.allocate() == 1


@pytest.mark.parametrize("blocks", [1.0, "1", None, [1.0], ["1"], np.array([1.0]), np.float32(1), np.array([True])])
def test_no_integer_is_a_type_error(blocks):
    allocator = BlockAllocator(2)
    allocator.allocate_n(2)
    for method in allocator.free, allocator.share:
        with pytest.raises(TypeError):
            method(blocks)
    assert allocator.in_use == 2


def test_more_than_one_dimension_is_a_value_error():
    with pytest.raises(ValueError, match="2"):
        BlockAllocator(4).free(np.zeros((2, 2), np.int32))


def test_many_ids_beyond_the_stack():
    allocator = BlockAllocator(1000)
    blocks = allocator.allocate_n(1000)
    allocator.free(blocks.tolist())
    assert allocator.allocate_n(1000).tolist() == blocks.tolist()[::-1]
    allocator.free(blocks.astype(np.int64))
    allocator.check()


def test_ids_that_change_the_list_while_it_is_read():
    class Shrinking:
        def __index__(self):
            blocks.clear()
            return 0

    allocator = BlockAllocator(2)
    allocator.allocate_n(2)
    blocks = [Shrinking(), 1]
    with pytest.raises(ValueError, match="changed"):
        allocator.free(blocks)
    assert allocator.in_use == 2


def test_share_adds_references_and_each_wants_a_free():
    allocator = BlockAllocator(3)
    allocator.allocate_n(2)
    allocator.share([0, 0, 1])
    assert [allocator.ref_count(b) for b in range(3)] == [3, 2, 0]
    allocator.free([0, 1, 0])
    assert (allocator.in_use, allocator.ref_count(np.int16(0))) == (2, 1)
    allocator.free([0, 1])
    assert allocator.in_use == 0


def test_bad_share_changes_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate_n(2)
    before = snapshot(allocator)
    for blocks in ([0, 1, 2], [0, 4], [-1], 2**33):
        with pytest.raises(InvalidBlock):
            allocator.share(blocks)
        assert snapshot(allocator) == before


def test_ref_count_of_a_block_out_of_range():
    allocator = BlockAllocator(4)
    assert allocator.ref_count(3) == 0
    for block in (4, -1, 2**40):
        with pytest.raises(InvalidBlock):
            allocator.ref_count(block)
    with pytest.raises(TypeError):
        allocator.ref_count(1.0)


def test_counts():
    allocator = BlockAllocator(5)
    blocks = allocator.allocate_n(3)
    assert (allocator.free_count, allocator.in_use, allocator.capacity, allocator.peak_in_use) == (2, 3, 5, 3)
    allocator.free(blocks)
    allocator.allocate()
    assert (allocator.free_count, allocator.in_use, allocator.capacity, allocator.peak_in_use) == (4, 1, 5, 3)


def test_no_attribute_can_be_set():
    allocator = BlockAllocator(1)
    for name in ("capacity", "free_count", "in_use", "peak_in_use"):
        with pytest.raises(AttributeError):
            setattr(allocator, name, 0)
