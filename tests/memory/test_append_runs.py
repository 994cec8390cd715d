"""Tokens appended in runs: a run that begins and ends anywhere in groups of 16 writes exactly its tokens."""

import numpy as np
import pytest

from pagepool import KvCachePool, KvLayout

DIMS = [8, 24, 64, 72, 136]  # less than a vector, not a multiple of 64, several runs of 64
BLOCKS = 3


def bits(values, dtype):
    """Return f32 values rounded to `dtype`: as bits of that dtype, and widened to f32."""
    if dtype == "bfloat16":
        whole = values.view(np.uint32).astype(np.uint64)
        half = ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16)
        return half, (half.astype(np.uint32) << 16).view(np.float32)
    return values.astype(dtype), values.astype(dtype).astype(np.float32)


def filled(layout, rng):
    """Return a pool filled with random numbers, and the numbers."""
    pool = KvCachePool.from_layout(layout, BLOCKS)
    n = BLOCKS * layout.block_size
    k = rng.standard_normal((n, layout.num_kv_heads, layout.head_dim), np.float32)
    v = rng.standard_normal((n, layout.num_kv_heads, layout.v_head_dim), np.float32)
    for slot in range(n):  # token by token: runs are tested against this
        rows = (k[slot : slot + 1],) if layout.v_in_k else (k[slot : slot + 1], v[slot : slot + 1])
        pool.append(0, np.array([slot]), *rows)
    k, v = bits(k, layout.dtype)[1], bits(v, layout.dtype)[1]
    return pool, k, k[:, :, : layout.v_head_dim].copy() if layout.v_in_k else v


def assert_holds(pool, k, v):
    got = pool.gather(0, range(BLOCKS), BLOCKS * pool.block_size)
    np.testing.assert_array_equal(got[0], k)
    np.testing.assert_array_equal(got[1], v)


@pytest.mark.parametrize("own", [False, True], ids=["float32", "own dtype"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", DIMS)
def test_runs_of_every_length_from_every_place(head_dim, dtype, own):
    rng = np.random.default_rng(head_dim)
    layout = KvLayout(1, 2, head_dim, 16, dtype, v_head_dim=DIMS[-1 - DIMS.index(head_dim)])
    pool, k, v = filled(layout, rng)
    for first in range(16):
        for count in range(1, 33 - first):
            new = [rng.standard_normal((count, *x.shape[1:]), np.float32) for x in (k, v)]
            at = slice(16 + first, 16 + first + count)
            (k_bits, k[at]), (v_bits, v[at]) = (bits(x, dtype) for x in new)
            pool.append(0, np.arange(at.start, at.stop), *((k_bits, v_bits) if own else new))
            if count in (1, 2, 7, 8, 9, 15, 16, 17, 32):
                assert_holds(pool, k, v)
    assert_holds(pool, k, v)


@pytest.mark.parametrize("block_size", [16, 7])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_v_within_k(dtype, block_size):
    rng = np.random.default_rng(1)
    pool, k, v = filled(KvLayout(1, 1, 72, block_size, dtype, v_head_dim=64, v_in_k=True), rng)
    new = rng.standard_normal((11, 1, 72), np.float32)
    pool.append(0, np.arange(3, 14), new)
    k[3:14] = bits(new, dtype)[1]
    v[3:14] = k[3:14, :, :64]
    assert_holds(pool, k, v)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_slots_in_any_order_with_gaps(dtype):
    rng = np.random.default_rng(2)
    pool, k, v = filled(KvLayout(1, 3, 40, 32, dtype), rng)
    for _ in range(30):
        slots = rng.permutation(BLOCKS * 32)[: rng.integers(1, 60)]
        if rng.integers(2):
            slots.sort()  # runs between gaps
        new = rng.standard_normal((2, len(slots), 3, 40), np.float32)
        mapping = np.where(rng.random(len(slots)) < 0.2, -1, slots)
        pool.append(0, mapping, *new)
        kept = mapping >= 0
        k[slots[kept]], v[slots[kept]] = (bits(x[kept], dtype)[1] for x in new)
    assert_holds(pool, k, v)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_token_is_rounded_as_a_run_is(dtype):
    special = np.array([0.0, -0.0, 1e-8, -1e-8, 6e-8, 1e-40, 65504, 65519, 65520, 3e38, 3.4e38, np.inf, -np.inf], "f4")
    rng = np.random.default_rng(3)
    rows = rng.permuted(np.resize(special, (16, 1, 104)), axis=2)
    pool = KvCachePool.from_layout(KvLayout(1, 1, 104, 16, dtype), 2)
    pool.append(0, np.arange(16), rows, rows)
    for token in range(16):
        pool.append(0, np.array([16 + token]), rows[token : token + 1], rows[token : token + 1])
    assert pool.page(0).tobytes() == pool.page(1).tobytes()
    rows[:, 0, ::3] = np.nan
    pool.append(0, np.arange(16), rows, rows)
    for got in pool.gather(0, [0], 16):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(rows))
