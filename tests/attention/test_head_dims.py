"""K and V with different dims, and V as part of K (the latent cache of multi-head latent attention)."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from paged_cases import DTYPES, assert_close, assert_same_bits, attention_f64, garbage, make_case, random_kv, slots_of
from refusals import refuses
from test_decode_bits import VARIANTS, assert_canonical, per_head
from test_decode_variants import variants

from pagepool import KvCachePool, KvLayout, reference

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# kv heads, head_dim, v_head_dim, V in K, block size
SHAPES = [
    (1, 576, 512, True, 16),
    (1, 576, 512, True, 5),
    (2, 40, 24, True, 32),
    (1, 8, 8, True, 16),
    (3, 88, 72, True, 7),
    (2, 192, 128, False, 16),
    (2, 24, 72, False, 48),
    (1, 8, 1024, False, 16),
    (2, 64, 40, False, 3),
]
LENGTHS = [0, 1, 15, 16, 17, 33, 511, 513, 1100]


def layout_of(shape, dtype, layers=1):
    kv_heads, head_dim, v_head_dim, v_in_k, block_size = shape
    return KvLayout(layers, kv_heads, head_dim, block_size, dtype, v_head_dim=v_head_dim, v_in_k=v_in_k)


def stored(layout, both):
    """Return K and V rounded to the pages' dtype, in float32."""
    k, *v = (x.astype(NUMPY[layout.dtype]).astype(np.float32) for x in both)
    return k, v[0] if v else k[:, :, : layout.v_head_dim]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_returns_what_append_stored(shape, dtype):
    layout = layout_of(shape, dtype, layers=2)
    pool, blocks = KvCachePool.from_layout(layout, 5), np.array([3, 0, 4], np.int32)
    length = 3 * layout.block_size - layout.block_size // 2
    [both] = random_kv(layout, [length])
    slots = slots_of(blocks, length, layout.block_size)
    for tokens in (np.s_[: length // 3], np.s_[length // 3 :]):
        pool.append(1, slots[tokens], *(x[tokens] for x in both))
    for got, right in zip(pool.gather(1, blocks, length), stored(layout, both), strict=True):
        np.testing.assert_array_equal(got, right)
    assert not pool.gather(0, blocks, length)[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_have_the_bytes_of_the_reference(shape, dtype):
    layout = layout_of(shape, dtype, layers=2)
    pools = [KvCachePool.from_layout(layout, 2), reference.KvCachePool.from_layout(layout, 2)]
    slots = np.random.default_rng(1).permutation(2 * layout.block_size)[:20].astype(np.int64)
    [both] = random_kv(layout, [len(slots)])
    for pool in pools:
        pool.append(1, slots, *both)
    for block in range(2):
        ours, theirs = (np.asarray(pool.page(block)).view(np.uint8) for pool in pools)
        np.testing.assert_array_equal(ours, theirs)
    read = [pool.gather(1, [1, 0], layout.block_size) for pool in pools]
    for ours, theirs in zip(*read, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_page_holds_each_element_once(shape):
    layout = layout_of(shape, "bfloat16", layers=2)
    kv_heads, head_dim, v_head_dim, v_in_k, block_size = shape
    assert layout.page_size == 2 * kv_heads * (head_dim if v_in_k else head_dim + v_head_dim) * block_size
    pool = KvCachePool.from_layout(layout, 3)
    assert (pool.head_dim, pool.v_head_dim) == (head_dim, v_head_dim)
    assert pool.page_size == pool.page(0).size == layout.page_size
    assert pool.nbytes == 2 * len(memoryview(pool)) == 6 * layout.page_size
    half = KvCachePool.from_layout(replace(layout, dtype="float16"), 3)  # NumPy cannot read bfloat16 by DLPack
    assert np.from_dlpack(half).size == 3 * layout.page_size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 5, 16])
def test_decode(shape, dtype, group):
    case = make_case(layout_of(shape, dtype), group, LENGTHS, seed=group)
    assert_close(case.decode(return_lse=True), attention_f64(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_query_heads_of_a_large_latent_model(dtype):
    case = make_case(KvLayout(1, 1, 576, 64, dtype, v_head_dim=512, v_in_k=True), 128, [700])
    assert_close(case.decode(return_lse=True, sm_scale=192**-0.5), attention_f64(case, 192**-0.5))


@pytest.mark.parametrize("arithmetic", ["bf16", "bf16x2"])
def test_a_latent_model_has_the_same_bits_in_any_batch(arithmetic):
    """Several short sequences per thread are computed without records, long ones and single ones by chunks."""
    layout = KvLayout(1, 1, 576, 64, "bfloat16", v_head_dim=512, v_in_k=True)
    case = make_case(layout, 128, [700, 0, 33, 513, 4100])
    sinks = variants(128)[1]
    for options in ({}, {"window_left": 519, "sinks": sinks}):
        options |= {"arithmetic": arithmetic, "return_lse": True}
        out, lse = case.decode(num_threads=1, **options)
        assert_same_bits(case.decode(num_threads=2, **options), (out, lse))
        for row in range(5):
            assert_same_bits(case.rows([row]).decode(**options), (out[[row]], lse[[row]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_with_every_variant(shape, dtype):
    case = make_case(layout_of(shape, dtype), 3, [0, 70, 600])
    slopes, sinks = variants(case.q.shape[1])
    for options in (
        {"window_left": 40},
        {"logits_soft_cap": 7.0, "sinks": sinks},
        {"window_left": 520, "logits_soft_cap": 30.0, "alibi_slopes": slopes, "sinks": sinks},
    ):
        assert_close(case.decode(return_lse=True, **options), attention_f64(case, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_v_within_k_has_the_bits_of_the_same_v_stored_apart(dtype):
    lengths, sizes = [1, 47, 600], (16, 5, 48)
    inside = KvLayout(1, 2, 88, 16, dtype, v_head_dim=72, v_in_k=True)
    kv = random_kv(inside, lengths)
    q = np.random.default_rng(4).standard_normal((3, 6, 88), np.float32)
    expected = None
    for size in sizes:
        apart = KvLayout(1, 2, 88, size, dtype, v_head_dim=72)
        cases = [
            make_case(replace(inside, block_size=size), 3, lengths, kv=kv),
            make_case(apart, 3, lengths, kv=[(k, k[:, :, :72]) for (k,) in kv]),
        ]
        for case in cases:
            got = replace(case, q=q).decode(return_lse=True)
            expected = expected or got
            assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("v_in_k", "block_size"), [(True, 16), (True, 5), (False, 16), (False, 5)])
def test_the_bits_equal_the_canonical_order(v_in_k, block_size, dtype):
    layout = KvLayout(1, 1, 40, block_size, dtype, v_head_dim=24, v_in_k=v_in_k)
    case = make_case(layout, 2, [35, 0, 530])
    for options in ({}, VARIANTS[-2]):
        assert_canonical(case, per_head(options, 2))


@pytest.mark.parametrize("v_in_k", [False, True])
def test_the_reference_says_the_same(v_in_k):
    case = make_case(KvLayout(1, 2, 24, 4, "float16", v_head_dim=16, v_in_k=v_in_k), 2, [5, 0, 30])
    assert_close(case.decode(return_lse=True), reference.decode(*case.args, return_lse=True))


@pytest.mark.parametrize("block_size", [16, 5])
def test_a_special_k_is_a_special_v(block_size):
    """A NaN of a token outside of the window has no effect, although it shares vector lanes with tokens inside."""
    layout = KvLayout(1, 1, 24, block_size, "float32", v_head_dim=16, v_in_k=True)
    case = make_case(layout, 2, [40])
    expected = case.decode(window_left=5, return_lse=True)
    case.pool.append(0, slots_of(case.block_tables[0], 34, block_size), *garbage(layout, 34))
    assert_same_bits(case.decode(window_left=5, return_lse=True), expected)
    assert np.isnan(case.decode()).all()


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"v_head_dim": 12}, ValueError, ("v_head_dim", 8, 12)),
        ({"v_head_dim": 1032}, ValueError, ("v_head_dim", 8, 1024, 1032)),
        ({"head_dim": 1032}, ValueError, ("head_dim", 8, 1024, 1032)),
        ({"num_layers": 2**31}, ValueError, ("num_layers", 1, 2147483647, 2147483648)),
        ({"num_kv_heads": 2**32 + 1}, ValueError, ("num_kv_heads", 1, 2147483647, 4294967297)),
        ({"v_head_dim": 72, "v_in_k": True}, ValueError, ("K", 64, "V", 72)),
        ({"v_head_dim": 1.5}, TypeError, ("v_head_dim",)),
        ({"v_in_k": 2}, TypeError, ("v_in_k",)),
    ],
)
def test_layouts_that_are_refused(changed, error, words):
    with refuses(error, *words):
        KvLayout(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, **changed})


def test_appends_that_are_refused():
    apart = KvCachePool.from_layout(KvLayout(1, 2, 24, 4, v_head_dim=16), 1)
    inside = KvCachePool.from_layout(KvLayout(1, 2, 24, 4, v_head_dim=16, v_in_k=True), 1)
    k, v = np.ones((1, 2, 24), np.float32), np.ones((1, 2, 16), np.float32)
    slots = np.zeros(1, np.int64)
    for pool, values, words in (
        (apart, (k,), ("v",)),
        (apart, (k, k), ("v", v.shape, k.shape)),
        (apart, (v, v), ("k", k.shape, v.shape)),
        (inside, (k, v), (16, 24)),
        (inside, (v,), ("k", k.shape, v.shape)),
    ):
        with refuses(ValueError, *words):
            pool.append(0, slots, *values)
        assert not np.asarray(memoryview(pool)).any()


def test_an_out_of_the_queries_dims_is_refused():
    case = make_case(KvLayout(1, 1, 24, 16, "float32", v_head_dim=16), 2, [3])
    with refuses(ValueError, "out", (1, 2, 16), (1, 2, 24)):
        case.decode(out=np.zeros((1, 2, 24), np.float32))
