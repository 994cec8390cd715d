"""ctypes arrays are accepted like NumPy arrays, although their buffers have no strides even on request."""

import ctypes

import numpy as np
import pytest
from refusals import refuses

from pagepool import BlockAllocator, KvCachePool, KvLayout, decode


def like(array):
    """Return a ctypes array with the same elements."""
    kind = {"f": ctypes.c_float, "i": ctypes.c_int32, "l": ctypes.c_int64, "H": ctypes.c_uint16}[array.dtype.char]
    for length in reversed(array.shape):
        kind *= length
    copy = kind()
    np.frombuffer(copy, array.dtype)[:] = array.ravel()
    return copy


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_block_ids(dtype):
    allocator = BlockAllocator(8)
    blocks = like(allocator.allocate_n(5).astype(dtype))
    allocator.share(blocks)
    allocator.free(blocks)
    allocator.free(blocks)
    assert allocator.free_count == 8


@pytest.fixture
def pool():
    rng = np.random.default_rng(0)
    pool = KvCachePool.from_layout(KvLayout(1, 2, 8, 4, "float32"), 6)
    pool.append(0, np.arange(24), *rng.standard_normal((2, 24, 2, 8), np.float32))
    return pool


def test_slots_keys_and_values(pool):
    k, v = np.random.default_rng(1).standard_normal((2, 3, 2, 8), np.float32)
    pool.append(0, like(np.array([4, 9, 6])), like(k), like(v))
    for got, given in zip(pool.gather(0, like(np.array([1, 2], np.int32)), 8), (k, v), strict=True):
        np.testing.assert_array_equal(got[[0, 5, 2]], given)


def test_every_array_of_decode(pool):
    rng = np.random.default_rng(2)
    q, per_head = rng.standard_normal((3, 4, 8), np.float32), rng.standard_normal(4).astype(np.float32)
    tables, lens = np.array([[0, 3, 1], [2, 5, -1]], np.int32), np.array([11, 6], np.int32)
    starts = np.array([0, 1, 3], np.int32)
    options = {"query_start_loc": starts, "alibi_slopes": per_head, "sinks": per_head}
    expected = decode(q, pool, 0, tables, lens, **options)
    out = like(np.zeros_like(q))
    options = {name: like(array) for name, array in options.items()}
    assert decode(like(q), pool, 0, like(tables), like(lens), out=out, **options) is out
    np.testing.assert_array_equal(np.frombuffer(out, np.float32).reshape(q.shape), expected)
    with refuses(ValueError, "seq_lens", 1, 2):
        decode(q, pool, 0, tables, like(tables), query_start_loc=starts)
    with refuses(TypeError, "q", "float32", "float16", "bfloat16"):
        decode(like(tables), pool, 0, tables, lens, query_start_loc=starts)
