"""append and gather convert exactly, bit by bit, in every dtype and layout. Conversion is a kernel as well."""

import ml_dtypes
import numpy as np
import pytest
from paged_cases import DTYPES, slots_of

from pagepool import KvCachePool, KvLayout, reference

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = [(1, 8, 16), (2, 24, 16), (1, 40, 3), (2, 64, 32), (1, 72, 48), (3, 80, 1), (1, 128, 17), (1, 256, 16)]


def special_floats():
    """Return float32 of every exponent, midpoints of 16-bit values and their neighbours, subnormals, infinities."""
    exponents = np.arange(256, dtype=np.uint32)[:, None] << np.uint32(23)
    fractions = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFFFF], np.uint32)
    bits = (exponents | fractions).ravel()
    random = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = np.concatenate([bits, bits | np.uint32(1 << 31), random]).view(np.float32)
    return np.resize(values, -(-len(values) // 8) * 8)


def store(dtype, values, block_size):
    """Return a pool with heads of 8 dims: K of consecutive tokens is `values`, V their negatives."""
    tokens = values.reshape(-1, 1, 8)
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=block_size, dtype=dtype), -(-len(tokens) // block_size))
    pool.append(0, np.arange(len(tokens), dtype=np.int64), tokens, -tokens)
    return pool, len(tokens)


def everything(pool, tokens):
    k, v = pool.gather(0, np.arange(pool.total_pages, dtype=np.int32), tokens)
    return k.ravel(), v.ravel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 7])
def test_values_are_rounded_to_nearest_even(dtype, block_size):
    values = special_floats()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(NUMPY[dtype]).astype(np.float32)
    k, v = everything(*store(dtype, values, block_size))
    nan = np.isnan(expected)
    for got, right in ((k, expected), (v, -expected)):
        np.testing.assert_array_equal(np.isnan(got), nan)
        np.testing.assert_array_equal(got[~nan].view(np.uint32), right[~nan].view(np.uint32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 7])
def test_bits_of_the_pools_dtype_are_kept_and_widened_exactly(dtype, block_size):
    bits = np.arange(65536, dtype=np.uint16)
    given = bits.view(NUMPY[dtype]).reshape(-1, 1, 8)
    layout = KvLayout(1, 1, 8, block_size=block_size, dtype=dtype)
    pool = KvCachePool.from_layout(layout, -(-len(given) // block_size))
    pool.append(0, np.arange(len(given), dtype=np.int64), given, given[::-1].copy())
    stored = np.concatenate([pool.page(i).view(np.uint16) for i in range(pool.total_pages)])
    counts = np.bincount(stored, minlength=65536)
    counts[0] -= len(stored) - 2 * len(bits)  # the rest of the last block
    assert (counts == 2).all()
    with np.errstate(invalid="ignore"):
        expected = given.astype(np.float32).ravel()
    np.testing.assert_array_equal(everything(pool, len(given))[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), SHAPES)
def test_pages_have_the_bytes_of_the_reference(kv_heads, head_dim, block_size, dtype):
    layout = KvLayout(2, kv_heads, head_dim, block_size=block_size, dtype=dtype)
    pools = [KvCachePool.from_layout(layout, 3), reference.KvCachePool.from_layout(layout, 3)]
    tokens = min(3 * block_size, 40)
    slots = np.random.default_rng(1).permutation(3 * block_size)[:tokens].astype(np.int64)
    k, v = np.random.default_rng(2).standard_normal((2, tokens, kv_heads, head_dim), np.float32)
    for pool in pools:
        pool.append(1, slots, k, v)
    for block in range(3):
        ours, theirs = (np.asarray(pool.page(block)).view(np.uint8) for pool in pools)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), SHAPES)
def test_gather_returns_what_append_stored_on_shuffled_blocks(kv_heads, head_dim, block_size, dtype):
    layout = KvLayout(2, kv_heads, head_dim, block_size=block_size, dtype=dtype)
    length = 5 * block_size - block_size // 2
    blocks = np.random.default_rng(0).permutation(5).astype(np.int32)
    pool = KvCachePool.from_layout(layout, 5)
    k, v = np.random.default_rng(2).standard_normal((2, length, kv_heads, head_dim), np.float32)
    slots = slots_of(blocks, length, block_size)
    first = length // 3  # two parts that meet within a block
    pool.append(1, slots[:first], k[:first], v[:first])
    pool.append(1, slots[first:], k[first:], v[first:])
    for got, given in zip(pool.gather(1, blocks, length), (k, v), strict=True):
        np.testing.assert_array_equal(got, given.astype(NUMPY[dtype]).astype(np.float32))
    assert not pool.gather(0, blocks, length)[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_of_minus_one_are_skipped_wherever_they_stand(dtype):
    pool = KvCachePool.from_layout(KvLayout(1, 2, 24, dtype=dtype), 1)
    slots = np.array([-1, 3, 4, -1, 5, 9, -1], np.int64)
    k = np.arange(7, dtype=np.float32)[:, None, None] + np.zeros((7, 2, 24), np.float32)
    pool.append(0, slots, k, -k)
    expected = np.zeros((16, 2, 24), np.float32)
    expected[[3, 4, 5, 9]] = k[[1, 2, 4, 5]]
    for got, right in zip(pool.gather(0, np.array([0], np.int32), 16), (expected, -expected), strict=True):
        np.testing.assert_array_equal(got, right)
