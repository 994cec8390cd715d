"""Reference memory without a compiled counterpart in the test: rounding, pages, the flat pool, states, and check().

Other tests compare the rest with the compiled classes: the state machine, the random program and the tests of pages.
"""

import struct
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from refusals import refuses

from pagepool import InvalidBlock, InvalidSlot, KvLayout, PoolError, PoolExhausted
from pagepool.reference import BlockAllocator, KvCachePool, Mamba2SequenceState, PagedSeqState, SsmStatePool
from pagepool.reference.kv_pool import place
from pagepool.reference.rounding import bf16_bits, f16_bits, f32, float_of, fma

DTYPES = ["float32", "float16", "bfloat16"]
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def samples():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    ties = np.arange(0, 2**32, 2**32 // 997, dtype=np.uint64).astype(np.uint32) & np.uint32(0xFFFFF000)
    edges = np.array([0, 65504, 65519.996, 65520, 6e-8, 2.98e-8, 2.99e-8, 6.1e-5, np.inf, 3.4e38], np.float32)
    every = np.concatenate([bits.view(np.float32), ties.view(np.float32), edges, -edges])
    return every[~np.isnan(every)]


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", f16_bits), ("bfloat16", bf16_bits)])
def test_rounding_is_to_nearest_even(dtype, rounding):
    values = samples()
    with np.errstate(over="ignore"):
        expected = values.astype(NUMPY[dtype]).view(np.uint16)
    assert [rounding(float(value)) for value in values] == expected.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widening_is_exact(dtype):
    bits = np.arange(65536, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        expected = bits.view(NUMPY[dtype]).astype(np.float64)
    np.testing.assert_array_equal([float_of(int(number), dtype) for number in bits], expected)


def test_nan_stays_nan_and_f32_overflows_to_infinity():
    for rounding, dtype in ((f16_bits, "float16"), (bf16_bits, "bfloat16")):
        for bits in (0x7F800001, 0xFFC00000, 0x7FFFFFFF):
            assert np.isnan(float_of(rounding(struct.unpack("<f", struct.pack("<I", bits))[0]), dtype))
    assert (f32(1e39), f32(0.1)) == (float("inf"), float(np.float32(0.1)))


def test_fma_rounds_once():
    rng = np.random.default_rng(7)
    # Sums close to the midpoint of two float32: the product is slightly more or less than half a ulp of c.
    c = np.float32(1) + rng.integers(0, 2**23, 3000).astype(np.float32) * np.float32(2**-23)
    a = (np.float32(1) + rng.integers(-4, 5, 3000).astype(np.float32) * np.float32(2**-23)) * np.float32(2**-12)
    b = (np.float32(1) + rng.integers(-4, 5, 3000).astype(np.float32) * np.float32(2**-23)) * np.float32(2**-12)
    twice = 0
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        low = float(np.nextafter(np.float32(z), np.float32(0)))
        near = [low, z, float(np.nextafter(np.float32(z), np.float32(4)))]
        distances = [abs(exact - Fraction(number)) for number in near]
        best = [number for number, far in zip(near, distances, strict=True) if far == min(distances)]
        got = fma(x, y, z)
        assert got in best
        assert len(best) == 1 or np.float32(got).view(np.uint32) % 2 == 0
        twice += got != f32(x * y + z)
    assert twice > 100  # for these, rounding through float64 gives a wrong result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 1), (24, 3), (72, 16), (128, 32), (64, 17)])
def test_every_element_of_a_page_has_one_place(dtype, head_dim, block_size):
    layout = KvLayout(2, 3, head_dim, block_size=block_size, dtype=dtype)
    every = product(range(2), range(3), range(block_size), range(head_dim), (False, True))
    assert sorted(place(layout, *which) for which in every) == list(range(layout.page_size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [3, 16])
def test_gather_returns_what_append_stored(dtype, block_size):
    layout = KvLayout(2, 2, 8, block_size=block_size, dtype=dtype)
    pool = KvCachePool.from_layout(layout, 3)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, block_size + 2, 2, 8), dtype=np.float32)
    tokens = [2 * block_size + i for i in range(block_size)] + [0, -1]
    pool.append(1, tokens, k, v)
    for given, stored in zip((k, v), pool.gather(1, [2, 0], block_size + 1), strict=True):
        assert (stored.shape, stored.dtype) == ((block_size + 1, 2, 8), np.float32)
        expected = given if dtype == "float32" else given.astype(NUMPY[dtype]).astype(np.float32)
        np.testing.assert_array_equal(stored, expected[:-1])
    assert not pool.gather(0, [2, 0], block_size + 1)[0].any()


def test_bits_of_the_pools_own_dtype_are_copied():
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=1), 2)
    bits = np.arange(0x7F00, 0x7F00 + 16, dtype=np.uint16).reshape(2, 1, 8)
    pool.append(0, [0, 1], bits, bits.view(ml_dtypes.bfloat16))
    assert pool.page(1).tolist() == [*range(0x7F08, 0x7F10), *range(0x7F08, 0x7F10)]


def test_a_failed_append_writes_nothing():
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=2), 2)
    ones = np.ones((2, 1, 8), np.float32)
    with refuses(InvalidSlot, "slot", 4):
        pool.append(0, [0, 4], ones, ones)
    with refuses(ValueError, "layer", 1):
        pool.append(1, [0, 1], ones, ones)
    with refuses(ValueError, "v"):
        pool.append(0, [0, 1], ones, ones[:1])
    with refuses(TypeError, "float64"):
        pool.append(0, [0, 1], ones.astype(np.float64), ones)
    assert not pool.page(0).any()


def test_the_flat_pool():
    pool = KvCachePool(4, 2)
    assert [pool.alloc(), pool.alloc()] == [0, 1]
    with pytest.raises(PoolExhausted):
        pool.alloc()
    pool.page(1)[:] = 7
    pool.free(1)
    assert (pool.alloc(), pool.page(1).tolist()) == (1, [7, 7, 7, 7])
    for call in (lambda: pool.page(2), lambda: pool.free(-1), lambda: pool.free([0, 0])):
        with pytest.raises(InvalidBlock):
            call()
    with refuses(ValueError, "flat"):
        pool.gather(0, [0], 1)
    pool.check()


def test_states_are_zeroed_on_release_and_slots_come_back_last_first():
    pool = SsmStatePool(2, lambda i: Mamba2SequenceState(1, 2, 3, max_context=4))
    assert [pool.alloc(5), pool.alloc(6)] == [0, 1]
    with refuses(PoolExhausted, 0, 2):
        pool.alloc(7)
    slot = pool.slot(0)
    slot.step()
    slot.state.h[:] = 1
    assert (slot.position, slot.request_id, slot.state.h.shape) == (1, 5, (1, 3, 2))
    pool.release(0)
    assert (slot.position, slot.request_id, slot.state.h.any(), slot.state.step_position) == (0, 0, False, 0)
    for wrong in (0, 2, -1):
        with refuses(InvalidSlot, wrong):
            pool.release(wrong)
    assert (pool.free_count, pool.used_count) == (1, 1)
    pool.check()


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
