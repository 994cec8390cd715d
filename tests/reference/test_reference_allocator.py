"""The reference allocator has the properties of the contract; it is what the compiled one is compared with."""

import numpy as np
import pytest

from pagepool import InvalidBlock, PoolError, PoolExhausted
from pagepool.reference import BlockAllocator


def snapshot(allocator):
    return allocator._fresh, list(allocator._freed), list(allocator._refs), allocator.peak_in_use


def test_fresh_blocks_come_in_order_and_freed_ones_most_recent_first():
    allocator = BlockAllocator(6)
    assert [allocator.allocate() for _ in range(4)] == [0, 1, 2, 3]
    allocator.free([1, 3])
    assert [allocator.allocate() for _ in range(4)] == [3, 1, 4, 5]


def test_allocate_n_is_n_times_allocate():
    one, many = BlockAllocator(8), BlockAllocator(8)
    for allocator in (one, many):
        allocator.allocate_n(5)
        allocator.free([4, 0, 2])
    blocks = many.allocate_n(5)
    assert blocks.dtype == np.int32
    assert blocks.tolist() == [one.allocate() for _ in range(5)] == [2, 0, 4, 5, 6]


def test_exhaustion_names_both_numbers_and_changes_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate_n(3)
    before = snapshot(allocator)
    with pytest.raises(PoolExhausted, match="asked for 2 blocks, 1 of 4 are free"):
        allocator.allocate_n(2)
    assert snapshot(allocator) == before
    allocator.allocate()
    with pytest.raises(PoolExhausted, match="asked for 1 block, 0 of 4 are free"):
        allocator.allocate()


@pytest.mark.parametrize(
    ("method", "blocks"),
    [("free", [0, 1, 1]), ("free", [2, 2, 2])]
    + [(method, blocks) for method in ("free", "share") for blocks in ([0, 3], [0, 4], [0, 9], [0, -1], 3)],
)
def test_a_wrong_id_changes_nothing(method, blocks):
    allocator = BlockAllocator(5)
    allocator.allocate_n(4)
    allocator.free(3)
    allocator.share(2)
    before = snapshot(allocator)
    with pytest.raises(InvalidBlock):
        getattr(allocator, method)(blocks)
    assert snapshot(allocator) == before


def test_references_are_counted_and_the_last_one_frees():
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator.share([block, block])
    assert allocator.ref_count(block) == 3
    allocator.free([block, block])
    assert (allocator.ref_count(block), allocator.in_use) == (1, 1)
    allocator.free(block)
    assert (allocator.ref_count(block), allocator.in_use, allocator.peak_in_use) == (0, 0, 1)
    with pytest.raises(InvalidBlock, match="out of range: there are 2 blocks"):
        allocator.ref_count(2)


def test_capacity_zero_and_wrong_arguments():
    assert BlockAllocator(0).allocate_n(0).tolist() == []
    with pytest.raises(PoolExhausted):
        BlockAllocator(0).allocate()
    with pytest.raises(ValueError, match="-1"):
        BlockAllocator(-1)
    with pytest.raises(TypeError, match="float"):
        BlockAllocator(2.0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a._freed.append(a._freed[0]),
        lambda a: a._refs.__setitem__(0, 0),
        lambda a: a._refs.__setitem__(a._freed[0], 1),
        lambda a: setattr(a, "_fresh", 9),
    ],
)
def test_check_finds_a_broken_invariant(damage):
    allocator = BlockAllocator(4)
    allocator.allocate_n(3)
    allocator.free(1)
    allocator.check()
    damage(allocator)
    with pytest.raises(PoolError):
        allocator.check()
