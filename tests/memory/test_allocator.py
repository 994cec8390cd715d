"""BlockAllocator: allocation order, reference counts, refused calls."""

import numpy as np
import pytest
from refusals import refuses

from pagepool import BlockAllocator, InvalidBlock, PoolError, PoolExhausted


def test_allocate_n_returns_int32_array():
    allocator = BlockAllocator(3)
    blocks = allocator.allocate_n(np.int64(2))
    assert isinstance(blocks, np.ndarray) and blocks.dtype == np.int32 and blocks.shape == (2,)
    assert allocator.allocate_n(0).shape == (0,)


def test_exhaustion_names_both_numbers_and_changes_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate_n(3)
    with refuses(PoolExhausted, 2, 1, 4):
        allocator.allocate_n(2)
    assert (allocator.free_count, allocator.in_use) == (1, 3)
    allocator.allocate()
    with refuses(PoolExhausted, 1, 0, 4) as caught:
        allocator.allocate()
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, PoolError)
    with refuses(PoolExhausted, 1180591620717411303424, 0, 4):
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


def snapshot(allocator):
    allocator.check()
    return [allocator.ref_count(b) for b in range(allocator.capacity)], allocator.free_count, allocator.peak_in_use


BIT_32 = ("block", 32, 2147483647)
NO_IDS = ("block", "integer")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda it: BlockAllocator(-1), ValueError, ("num_blocks", 0, 2147483647, -1)),
        (lambda it: BlockAllocator(2**31), ValueError, ("num_blocks", 0, 2147483647, 2147483648)),
        (lambda it: BlockAllocator(2**80), ValueError, ("num_blocks", 0, 2147483647, 2**80)),
        (lambda it: BlockAllocator(1.0), TypeError, ("num_blocks", "float", "1.0")),
        (lambda it: BlockAllocator("1"), TypeError, ("num_blocks", "str", "1")),
        (lambda it: BlockAllocator(None), TypeError, ("num_blocks", "None")),
        (lambda it: it.allocate_n(-1), ValueError, (-1,)),
        (lambda it: it.ref_count(8), InvalidBlock, ("block", 8, 8)),
        (lambda it: it.ref_count(-1), InvalidBlock, ("block", -1, 8)),
        (lambda it: it.ref_count(2**40), InvalidBlock, BIT_32),
        (lambda it: it.ref_count(1.0), TypeError, ("block", "float")),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(call, error, words):
    allocator = six_of_eight()
    before = snapshot(allocator)
    with refuses(error, *words):
        call(allocator)
    assert snapshot(allocator) == before


@pytest.mark.parametrize(
    ("blocks", "error", "to_free", "to_share"),
    [
        (5, InvalidBlock, ("block", 5, 1, 0), None),
        ([0, 5], InvalidBlock, None, ("block", 5, 1, 0)),
        ([1, 2, 5, 0], InvalidBlock, ("block", 5, 1, 0), ("block", 5)),
        (6, InvalidBlock, ("block", 6, 1, 0), ("block", 6)),  # never handed out
        (8, InvalidBlock, *[("block", 8, 8)] * 2),
        ([0, 1, 8], InvalidBlock, *[("block", 8, 8)] * 2),
        (-1, InvalidBlock, *[("block", -1, 8)] * 2),
        ([0, -1], InvalidBlock, *[("block", -1, 8)] * 2),
        (2**31, InvalidBlock, BIT_32, BIT_32),
        (-(2**31) - 1, InvalidBlock, BIT_32, BIT_32),
        (2**80, InvalidBlock, BIT_32, BIT_32),
        ([0, 2**40], InvalidBlock, BIT_32, BIT_32),
        (np.array([0, 2**40]), InvalidBlock, BIT_32, BIT_32),
        (np.array([0, -1]), InvalidBlock, *[("block", -1, 8)] * 2),
        (np.array([0, 9], np.uint8), InvalidBlock, *[("block", 9, 8)] * 2),
        (1.0, TypeError, NO_IDS, NO_IDS),
        (None, TypeError, NO_IDS, NO_IDS),
        ("1", TypeError, *[("block", "str")] * 2),
        ([1.0], TypeError, *[("block", "float")] * 2),
        (["1"], TypeError, *[("block", "str")] * 2),
        (np.array([1.0]), TypeError, *[("block", "float64")] * 2),
        (np.float32(1), TypeError, *[("block", "float32")] * 2),
        (np.array([True]), TypeError, *[("block", "bool")] * 2),
        (np.zeros((2, 2), np.int32), ValueError, *[("block", 1, 2)] * 2),
        # more references than the block has: an error of `free`, but not of `share`
        ([0, 1, 0], InvalidBlock, ("block", 0, 2, 1), "accepted"),
        ([3, 3, 3], InvalidBlock, ("block", 3, 3, 2), "accepted"),
        (np.array([0, 1, 0], np.int32), InvalidBlock, ("block", 0, 2, 1), "accepted"),
    ],
    ids=str,
)
def test_wrong_ids_are_named_and_change_nothing(blocks, error, to_free, to_share):
    allocator = six_of_eight()
    before = snapshot(allocator)
    with refuses(error, *(to_free or ())):
        allocator.free(blocks)
    assert snapshot(allocator) == before
    if to_share == "accepted":
        allocator.share(blocks)
    else:
        with refuses(error, *(to_share or ())):
            allocator.share(blocks)
        assert snapshot(allocator) == before
    assert allocator.allocate() == 5, "the order of the free list is as it was"


def six_of_eight():
    """Blocks 0 to 4 are allocated, block 3 has two references; 5 was freed, 6 and 7 were never allocated."""
    allocator = BlockAllocator(8)
    allocator.allocate_n(6)
    allocator.share(3)
    allocator.free(5)
    return allocator


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
    with refuses(ValueError, "changed"):
        allocator.free(blocks)
    assert allocator.in_use == 2


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
