"""The reference decode against a plain softmax, and the canonical order against the reference decode."""

import math

import numpy as np
import pytest

from pagepool import KvLayout
from pagepool.reference import KvCachePool, decode
from pagepool.reference.canonical import CHUNK, TILE, attend, exp2, in_base_2, rounding_once_or_twice, tanh

VARIANTS = [
    *({"window_left": window} for window in (0, 3, 15, 16, 39, 100)),
    {"logits_soft_cap": 0.8},
    {"alibi_slopes": [0.5, -0.25, 0.0, 0.125]},
    {"sinks": [0.5, -math.inf, 20.0, -3.0]},
    {
        "window_left": 9,
        "logits_soft_cap": 2.0,
        "alibi_slopes": [0.5, 0.25, -0.5, 0.125],
        "sinks": [1.0, 0.0, 2.0, -2.0],
    },
]


def softmax_attention(q, k, v, scale, window_left=-1, logits_soft_cap=0.0, alibi_slopes=(0.0,), sinks=(-math.inf,)):
    """Compute attention directly in NumPy: q (heads, dim), k and v (tokens, kv heads, dim); return out and lse."""
    group, tokens = q.shape[0] // k.shape[1], len(k)
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("hd,thd->ht", q, k) * scale
    if logits_soft_cap:
        scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
    scores = scores + np.reshape(alibi_slopes, (-1, 1)) * (np.arange(tokens) - (tokens - 1))
    if window_left >= 0:
        scores[:, : max(0, tokens - 1 - window_left)] = -math.inf
    weights, sink = np.exp(scores), np.exp(sinks)
    total = weights.sum(axis=1) + sink
    return np.einsum("ht,thd->hd", weights, v) / total[:, None], np.log(total)


def filled(layout, lengths, seed=0):
    """Return a filled pool, and shuffled tables of sequences with these lengths."""
    rng = np.random.default_rng(seed)
    needed = [-(-length // layout.block_size) for length in lengths]
    pool = KvCachePool.from_layout(layout, sum(needed))
    blocks = rng.permutation(sum(needed)).astype(np.int32)
    tables = np.full((len(lengths), max(needed, default=0)), -7, dtype=np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
    for layer in range(layout.num_layers):
        for row, length in enumerate(lengths):
            tokens = np.arange(length)
            slots = tables[row, tokens // layout.block_size] * layout.block_size + tokens % layout.block_size
            shape = (length, layout.num_kv_heads, layout.head_dim)
            pool.append(layer, slots, rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32))
    return pool, tables


@pytest.mark.parametrize("fused", [True, False])
def test_exp2_is_exact_at_whole_numbers_within_2_units_of_the_last_place_and_0_at_the_end(fused):
    fma = rounding_once_or_twice(fused)
    for x in map(float, np.random.default_rng(2).uniform(-126, 8, 3000).astype(np.float32)):
        assert abs(exp2(x, fma) - 2.0**x) <= 2 * float(np.spacing(np.float32(2.0**x)))
    assert [exp2(float(n), fma) for n in range(-126, 9)] == [2.0**n for n in range(-126, 9)]
    assert [exp2(x, fma) for x in (-127.0, -128.5, -1e30, -math.inf)] == [0.0] * 4
    assert 0.0 < exp2(-126.5, fma) < 2.0**-126
    assert math.isnan(exp2(math.nan, fma))


def test_base_2_saturates_and_keeps_nan():
    largest = float(np.finfo(np.float32).max)
    assert [in_base_2(x) for x in (0.0, -math.inf, largest, -3e38)] == [0.0, -math.inf, largest, -largest]
    assert math.isnan(in_base_2(math.nan))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_decode_equals_a_softmax_in_one_go(dtype, block_size):
    lengths = [0, 1, block_size, block_size + 1, 40]
    layout = KvLayout(2, 2, 8, block_size=block_size, dtype=dtype)
    pool, tables = filled(layout, lengths)
    q = np.random.default_rng(3).standard_normal((5, 6, 8))
    out, lse = decode(q, pool, 1, tables, lengths, return_lse=True)
    assert (out.shape, lse.shape) == ((5, 6, 8), (5, 6))
    assert not out[0].any()
    assert (lse[0] == -np.inf).all()
    for row in range(1, 5):
        k, v = pool.gather(1, tables[row], lengths[row])
        expected, expected_lse = softmax_attention(q[row], k, v, 1 / math.sqrt(8))
        np.testing.assert_allclose(out[row], expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[row], expected_lse, rtol=1e-12)


def test_decode_fills_out_and_scales_as_asked():
    pool, tables = filled(KvLayout(1, 1, 8, block_size=4, dtype="float32"), [6])
    q = np.ones((1, 1, 8))
    out = np.empty((1, 1, 8), np.float32)
    assert decode(q, pool, 0, tables, [6], out=out, sm_scale=0.0) is out
    np.testing.assert_allclose(out[0, 0], pool.gather(0, tables[0], 6)[1].mean(axis=0)[0], rtol=1e-6)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_variants_equal_a_softmax_in_one_go(block_size, options):
    lengths = [0, 1, 7, 40]
    pool, tables = filled(KvLayout(1, 2, 8, block_size=block_size, dtype="float32"), lengths)
    q = np.random.default_rng(3).standard_normal((4, 4, 8))
    window = options.get("window_left", -1)
    for row, length in enumerate(lengths):  # blocks before the window are not read
        tables[row, : max(0, length - 1 - window) // block_size if window >= 0 else 0] = -9
    out, lse = decode(q, pool, 0, tables, lengths, return_lse=True, **options)
    assert not out[0].any()
    assert (lse[0] == -np.inf).all()
    for row in range(1, 4):
        skipped = max(0, lengths[row] - 1 - window) // block_size if window >= 0 else 0
        k, v = pool.gather(0, tables[row, skipped:], lengths[row] - skipped * block_size)
        k, v = (np.pad(x, ((skipped * block_size, 0), (0, 0), (0, 0))) for x in (k, v))
        expected, expected_lse = softmax_attention(q[row], k, v, 1 / math.sqrt(8), **options)
        np.testing.assert_allclose(out[row], expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[row], expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("scores", "values", "out", "lse"),
    [
        ([0.0, math.nan], [1.0, 1.0], math.nan, math.nan),
        ([0.0, math.inf], [1.0, 1.0], math.nan, math.nan),
        ([0.0, -math.inf], [3.0, 1.0], 3.0, 0.0),
        ([-math.inf, 0.0], [1.0, 3.0], 3.0, 0.0),
        ([-math.inf, -math.inf], [1.0, 3.0], math.nan, -math.inf),
        ([0.0, 0.0], [math.inf, 1.0], math.inf, math.log(2)),
        ([0.0, 0.0], [math.inf, -math.inf], math.nan, math.log(2)),
        ([0.0, -math.inf], [1.0, math.inf], math.nan, 0.0),
    ],
)
@pytest.mark.parametrize("apart", [1, TILE, CHUNK])
def test_special_values_give_the_ieee_result(scores, values, out, lse, apart):
    """Only two tokens have weight, in one tile, two tiles or two chunks. Tokens between them have a score of -inf."""
    k = [[-math.inf] * 2 for _ in range(apart + 1)]
    v = [[1.0, 1.0] for _ in range(apart + 1)]
    for token, score, value in zip((0, apart), scores, values, strict=True):
        k[token], v[token] = [score, 0.0], [value, 1.0]
    got, got_lse = attend([1.0, 1.0], k, v, 1.0)
    np.testing.assert_allclose([got[0], got_lse], [out, lse], rtol=1e-6)

    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, block_size=1, dtype="float32"), apart + 1)
    k8, v8 = (np.zeros((apart + 1, 1, 8), np.float32) for _ in "kv")
    k8[:, 0, :2], v8[:, 0, :2] = k, v
    full, full_lse = decode(
        np.ones((1, 1, 8)), pool_with(pool, k8, v8), 0, [range(apart + 1)], [apart + 1], sm_scale=1.0, return_lse=True
    )
    np.testing.assert_allclose([full[0, 0, 0], full_lse[0, 0]], [out, lse], rtol=1e-6)


def pool_with(pool, k, v):
    pool.append(0, range(len(k)), k, v)
    return pool


@pytest.mark.parametrize("options", [{}, *VARIANTS[1:]], ids=str)
@pytest.mark.parametrize("length", [1, TILE - 1, TILE, TILE + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 37])
def test_the_canonical_order_is_close_to_the_oracle(length, options):
    pool, tables = filled(KvLayout(1, 1, 8, block_size=16, dtype="float32"), [length])
    q = np.random.default_rng(5).standard_normal((1, 1, 8), np.float32)
    own = {name: value[:1] if isinstance(value, list) else value for name, value in options.items()}
    expected, expected_lse = decode(q, pool, 0, tables, [length], return_lse=True, **own)
    k, v = (x[:, 0].tolist() for x in pool.gather(0, tables[0], length))
    names = {"alibi_slopes": "alibi_slope", "sinks": "sink"}
    head = {names.get(name, name): value[0] if name in names else value for name, value in options.items()}
    out, lse = attend(q[0, 0].tolist(), k, v, 1 / math.sqrt(8), **head)
    assert np.abs(np.array(out) - expected[0, 0]).max() <= 1e-6 * np.abs(expected).max()
    assert abs(lse - expected_lse[0, 0]) <= 1e-6 * max(1, abs(expected_lse[0, 0]))


@pytest.mark.parametrize("fused", [True, False])
def test_tanh_of_the_canonical_order_is_good_to_two_units_in_the_last_place(fused):
    rng = np.random.default_rng(1)
    numbers = np.concatenate([rng.uniform(-1, 1, 2000), rng.uniform(-12, 12, 2000), [0.0, 0.625, -0.625, 1e-30, 1e30]])
    numbers = numbers.astype(np.float32).tolist()
    got = np.array([tanh(x, rounding_once_or_twice(fused)) for x in numbers])
    right = np.tanh(np.array(numbers))
    assert (np.abs(got - right) <= 2 * np.spacing(np.abs(right).astype(np.float32))).all()
    assert [tanh(x, rounding_once_or_twice(fused)) for x in (math.inf, -math.inf)] == [1.0, -1.0]
    assert math.isnan(tanh(math.nan, rounding_once_or_twice(fused)))
