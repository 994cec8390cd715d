"""Quantised pages: documented storage, canonical order of arithmetic."""

import canonical_answers as canonical
import ml_dtypes
import numpy as np
import pytest
from paged_cases import (
    BITS,
    MOST,
    assert_same,
    assert_same_bits,
    attention_f64,
    channels,
    integers,
    make_case,
    random_kv,
    slots_of,
    stored,
)
from refusals import refuses
from test_decode_bits import VARIANTS, per_head
from test_prefill import by_lone_decodes, by_prefill, by_records
from test_several_queries import OPTIONS, options_of, random_masks, trees

from pagepool import KvCachePool, KvLayout, PagedSeqState, cpu_info, decode, prefill, reference
from pagepool.memory.quantisation import calibrate_channels, widen_fp8

KINDS = [("int8", "int8"), ("int4", "int4"), ("int8", "int4")]
every_kind = pytest.mark.parametrize(("dtype", "v_dtype"), KINDS)
LENGTHS = [0, 1, 40, 130, 600, 530, 20, 77, 0, 33]
COUNTS = [30, 1, 40, 130, 100, 1, 45, 7, 0, 8]
RMS = 1e-4  # limit of the RMS difference from float64 on the stored values, relative to the result's RMS


def layout_of(dtype, v_dtype, kv_heads=2, dim=64, **others):
    return KvLayout(1, kv_heads, dim, dtype=dtype, v_dtype=v_dtype, **others)


def case_of(layout, group, lengths, **options):
    return make_case(layout, group, lengths, k_channel_scale=channels(layout), **options)


def assert_near(got, expected, limit=RMS):
    (out, lse), (right, right_lse) = got, expected
    assert np.sqrt(np.mean((out - right) ** 2)) <= limit * np.sqrt(np.mean(right**2))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(right_lse))
    seen = ~np.isneginf(right_lse)
    np.testing.assert_allclose(lse[seen], right_lse[seen], atol=1e-3)


def quantised(x, dtype):
    """Quantise rows as layout.h documents; return integers and scales."""
    largest = np.abs(x).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        up = np.float32(MOST[dtype]) / largest
        whole = np.rint((x * up).astype(np.float32))
    usual = largest >= np.float32(2.0**-100)
    scale = np.where(usual, largest / np.float32(MOST[dtype]), np.where(largest == largest, 0, np.nan))
    bad = ~np.isfinite(x).all(-1, keepdims=True)
    return np.where(usual & ~bad, whole, 0).astype(np.float32), np.where(bad, np.nan, scale)[..., 0].astype(np.float32)


# ---------------------------------------------------------------------------------------------- stored values


@pytest.mark.parametrize("dims", [8, 24, 40, 64, 72, 128, 136])
@every_kind
def test_integers_and_scales_lie_where_the_header_says(dtype, v_dtype, dims):
    v_dims = 200 - dims
    layout = KvLayout(2, 2, dims, 32, dtype, v_dims, v_dtype=v_dtype)
    scale = channels(layout)
    pool = KvCachePool.from_layout(layout, 3, k_channel_scale=scale)
    (k, v), *_ = random_kv(layout, [32])
    k[3], k[4, 1], v[5] = 0, 1e-31, 2.0**-101
    pool.append(1, np.arange(32, 64), k, v)
    with np.errstate(over="ignore"):
        wanted = [quantised(k / scale[1], dtype), quantised(v, v_dtype)]
    page = pool.page(1)
    assert page.dtype == np.uint8 and len(page) == layout.block_bytes == pool.page_size
    k_bytes = 16 * dims * BITS[dtype] // 8 + 64
    head_bytes = k_bytes + 16 * v_dims * BITS[v_dtype] // 8 + 64
    for group in range(2):
        for head in range(2):
            at = ((2 + group) * 2 + head) * head_bytes  # layer 1 is after two groups of two heads
            part = page[at : at + head_bytes]
            for is_v, (of, size) in enumerate(((part, dims), (part[k_bytes:], v_dims))):
                got, scales = integers(of, (dtype, v_dtype)[is_v], size, is_v=bool(is_v))
                rows, expected = (x[16 * group : 16 * group + 16, head] for x in wanted[is_v])
                np.testing.assert_array_equal(got, rows)
                np.testing.assert_array_equal(scales, expected)
    back = pool.gather(1, [0, 1], 64)
    np.testing.assert_array_equal(back[0][32:], wanted[0][0] * wanted[0][1][..., None] * scale[1])
    np.testing.assert_array_equal(back[1][32:], wanted[1][0] * wanted[1][1][..., None])


@every_kind
def test_tokens_one_by_one_and_in_any_order_give_the_bytes_of_all_at_once(dtype, v_dtype):
    layout = layout_of(dtype, v_dtype, dim=72)
    (k, v), *_ = random_kv(layout, [48])
    pools = [KvCachePool.from_layout(layout, 3, k_channel_scale=channels(layout)) for _ in range(2)]
    pools[0].append(0, np.arange(48), k, v)
    for token in np.random.default_rng(1).permutation(48):
        pools[1].append(0, np.array([token]), k[[token]], v[[token]])
    assert bytes(pools[0]) == bytes(pools[1])


@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_rows_are_quantised_as_their_float32(source):
    layout = layout_of("int8", "int4", dim=40)
    (k, v), *_ = random_kv(layout, [16])
    k, v = k.astype(source), v.astype(source)
    pools = [KvCachePool.from_layout(layout, 1) for _ in range(2)]
    pools[0].append(0, np.arange(16), k, v)
    pools[1].append(0, np.arange(16), k.astype(np.float32), v.astype(np.float32))
    assert bytes(pools[0]) == bytes(pools[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_row_that_is_not_finite_gets_a_scale_of_nan_and_its_neighbours_keep_theirs(dtype, bad):
    layout = layout_of(dtype, dtype, dim=24)
    (k, v), *_ = random_kv(layout, [16])
    pool = KvCachePool.from_layout(layout, 1, k_channel_scale=channels(layout))
    k[3, 1, 5] = v[9, 0, 0] = bad
    pool.append(0, np.arange(16), k, v)
    got_k, got_v = pool.gather(0, [0], 16)
    assert np.isnan(got_k[3, 1]).all() and np.isnan(got_v[9, 0]).all()
    assert np.isnan(got_k).sum() == np.isnan(got_v).sum() == 24


def test_a_key_that_overflows_when_it_is_divided_by_its_channel_is_not_finite():
    scale = np.full((1, 1, 8), 1e-15, np.float32)
    pool = KvCachePool.from_layout(KvLayout(1, 1, 8, dtype="int8"), 1, k_channel_scale=scale)
    pool.append(0, np.arange(2), np.array([[[1e30] * 8], [[1.0] * 8]], np.float32), np.ones((2, 1, 8), np.float32))
    k, _ = pool.gather(0, [0], 2)
    assert np.isnan(k[0]).all()
    np.testing.assert_allclose(k[1], 1.0, rtol=1e-6)


def test_pages_of_zeros_are_worth_zeros():
    pool = KvCachePool.from_layout(KvLayout(1, 2, 24, dtype="int8", v_dtype="int4"), 1)
    k, v = pool.gather(0, [0], 16)
    assert not k.any() and not v.any()


def test_forks_copy_pages_of_bytes():
    layout = layout_of("int8", "int4", dim=16)
    pool = KvCachePool.from_layout(layout, 8)
    (k, v), *_ = random_kv(layout, [20])
    seq = PagedSeqState(pool.allocator, 16)
    slots = seq.append(19)
    pool.append(0, slots, k[:19], v[:19])
    other = seq.fork()
    pool.append(0, other.append(1), k[19:], v[19:])
    assert seq.block_table[1] != other.block_table[1]
    for x, y in zip(pool.gather(0, seq.block_table, 19), pool.gather(0, other.block_table, 19), strict=True):
        np.testing.assert_array_equal(x, y)


def test_views_show_bytes():
    layout = layout_of("int8", "int4", dim=16)
    pool = KvCachePool.from_layout(layout, 2, k_channel_scale=channels(layout))
    view = memoryview(pool)
    assert (view.format, view.nbytes) == ("B", 2 * layout.block_bytes)
    assert (pool.numpy().dtype, pool.numpy().shape) == (np.dtype(np.uint8), (2, layout.block_bytes))
    assert np.from_dlpack(pool).dtype == np.uint8
    assert (pool.dtype, pool.v_dtype, layout.is_quantised) == ("int8", "int4", True)
    assert not pool.k_channel_scale.flags.writeable


# ----------------------------------------------------------------------------------------------------- attention


@every_kind
@pytest.mark.parametrize(("group", "dim", "v_dim"), [(1, 8, 8), (3, 40, 24), (7, 64, 64), (4, 128, 128), (12, 80, 136)])
def test_every_kind_against_float64(dtype, v_dtype, group, dim, v_dim):
    case = case_of(layout_of(dtype, v_dtype, dim=dim, v_head_dim=v_dim), group, [1, 37, 600, 1025])
    assert_near(case.decode(return_lse=True), attention_f64(case))


@every_kind
@pytest.mark.parametrize("dim", [256, 576, 1024])
def test_many_dims(dtype, v_dtype, dim):
    """The integers of queries are small enough that no score overflows an int32."""
    case = case_of(layout_of(dtype, v_dtype, 1, dim), 2, [600])
    case.pool.append(
        0, slots_of(case.block_tables[0], 1, 16), np.ones((1, 1, dim), np.float32), np.ones((1, 1, dim), np.float32)
    )
    case.q[:, 0] = 1
    assert_near(case.decode(return_lse=True), attention_f64(case))


@pytest.mark.parametrize("group", range(1, 13))
@pytest.mark.parametrize("block_size", [16, 32, 48, 256])
def test_every_group_and_block_size(group, block_size):
    case = case_of(layout_of("int8", "int8", dim=24, block_size=block_size), group, [300, 513])
    assert_near(case.decode(return_lse=True), attention_f64(case))


@every_kind
@pytest.mark.parametrize("name", OPTIONS)
def test_a_mixed_batch_has_the_bits_of_lone_decodes(name, dtype, v_dtype):
    case, starts = case_of(layout_of(dtype, v_dtype, dim=40), 3, LENGTHS).with_queries(COUNTS)
    options = options_of(case, name)
    expected = by_prefill(case, starts, **options)
    assert_near(expected, attention_f64(case, query_start_loc=starts, **options), 2 * RMS)
    assert_same_bits(by_lone_decodes(case, starts, **options), expected)
    assert_same_bits(by_records(case, starts, **options), expected)
    for num_threads in (1, 2, 3, 8):
        assert_same_bits(by_prefill(case, starts, num_threads=num_threads, **options), expected)


@every_kind
@pytest.mark.parametrize("kind", ["tree", "random"])
def test_masks(kind, dtype, v_dtype):
    case, starts = case_of(layout_of(dtype, v_dtype, dim=24), 2, LENGTHS).with_queries(COUNTS)
    masks = trees(COUNTS) if kind == "tree" else random_masks(COUNTS, LENGTHS)
    options = {"query_start_loc": starts, "custom_mask": masks}
    got = case.decode(return_lse=True, **options)
    assert_near(got, attention_f64(case, **options), 2 * RMS)
    assert_same_bits(by_records(case, starts, custom_mask=masks), got)


@pytest.mark.one_in(3)
@every_kind
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_variants_follow_the_canonical_order(dtype, v_dtype, options):
    layout = KvLayout(1, 1, 16, dtype=dtype, v_head_dim=24, v_dtype=v_dtype)
    case = case_of(layout, 5, [561, 0, 33])
    options = per_head(options, 5)
    out, lse = case.decode(return_lse=True, **options)
    names = {"alibi_slopes": "alibi_slope", "sinks": "sink"}
    for row, head in np.ndindex(lse.shape):
        own = {names.get(name, name): float(x[head]) if name in names else x for name, x in options.items()}
        k, v = stored(case, row)
        expected, expected_lse = canonical.attend(
            case.q[row, head].tolist(), k, v, 0.25, fused=cpu_info()["isa"] != "baseline", **own
        )
        assert_same_bits([out[row, head]], [np.array(expected or [0.0] * 24, np.float32)])
        np.testing.assert_allclose(lse[row, head], expected_lse, rtol=3e-7, atol=1e-7)


@every_kind
def test_shared_prefixes_change_no_bit(dtype, v_dtype):
    layout = layout_of(dtype, v_dtype, dim=64)
    case = case_of(layout, 4, [1100] * 24)
    case.block_tables[:, :64] = case.block_tables[0, :64]
    expected = case.decode(return_lse=True, cascade=False)
    for num_threads in (1, 2, 3):
        assert_same_bits(case.decode(return_lse=True, num_threads=num_threads), expected)


def test_nan_affects_only_rows_that_give_it_weight():
    layout = layout_of("int8", "int8", 1, 16)
    (k, v), *_ = random_kv(layout, [600])
    v[10, 0, 3] = np.nan
    case = case_of(layout, 2, [600], kv=[(k, v)])
    assert np.isnan(case.decode()).all()
    assert np.isfinite(case.decode(window_left=580)).all()  # token 10 is before the window
    k[20, 0, 0] = np.inf
    case = case_of(layout, 2, [600], kv=[(k, random_kv(layout, [600])[0][1])])
    assert np.isnan(case.decode()).all()
    case.q[0, 0] = np.nan
    assert np.isfinite(case.decode(window_left=300)[0, 1]).all()
    assert np.isnan(case.decode(window_left=300)[0, 0]).all()


def test_a_token_without_weight_may_have_any_value():
    """A weight of at most 2^-127 counts as 0: a NaN scale is not multiplied with it."""
    layout = layout_of("int8", "int8", 1, 8)
    k, v = np.zeros((2, 40, 1, 8), np.float32)
    k[:, 0, 0], k[5, 0, 0], v[...] = 100, -100, 1
    v[5] = np.nan
    case = case_of(layout, 1, [40], kv=[(k, v)])
    case.q[...] = 100
    np.testing.assert_allclose(case.decode(sm_scale=1.0), 1.0, rtol=1e-6)


def test_queries_and_values_of_nothing():
    layout = layout_of("int8", "int8", 1, 8)
    (k, v), *_ = random_kv(layout, [50])
    case = case_of(layout, 1, [50], kv=[(k, v * 0)])
    assert not case.decode().any()
    case = case_of(layout, 1, [50], kv=[(k, v)])
    case.q[...] = 0
    np.testing.assert_allclose(
        case.decode()[0, 0], case.pool.gather(0, case.block_tables[0], 50)[1].mean((0, 1)), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("out_dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("q_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_queries_and_results_of_other_dtypes(q_dtype, out_dtype):
    case, starts = case_of(layout_of("int8", "int8"), 3, LENGTHS).with_queries(COUNTS)
    q = case.q.astype(q_dtype)
    expected = prefill(q.astype(np.float32), *case.args[1:], starts)
    out = np.empty(expected.shape, out_dtype)
    prefill(q, *case.args[1:], starts, out=out)
    np.testing.assert_array_equal(out.view(np.uint16), expected.astype(out_dtype).view(np.uint16))


# -------------------------------------------------------------------------------------------- accuracy


def drawn(kind, rng, tokens=2048, dims=128):
    """Return queries, keys and values. With `biased`, eight key channels have a bias of 30 before rotary embedding."""
    if kind == "t3":
        k, v = rng.standard_t(3, (2, tokens, dims)) / np.sqrt(3)
    else:
        k, v = rng.standard_normal((2, tokens, dims))
    q = rng.standard_normal((32, dims))
    if kind == "biased":
        loud = [5, 21, 40, 60, 69, 85, 104, 124]
        k[:, loud] += 30 * np.sign(rng.standard_normal(8))
        q[:, loud] *= 0.05
        half = dims // 2
        angle = np.arange(tokens)[:, None] * 1e6 ** (-np.arange(half) / half)
        a, b = k[:, :half], k[:, half:]
        k = np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], 1)
    return [x.astype(np.float32) for x in (q, k, v)]


def error_of(kind, dtype, v_dtype, *, calibrated):
    """Return the RMS difference from attention over unquantised K and V, relative to the result's RMS."""
    q, k, v = drawn(kind, np.random.default_rng(3))
    layout = KvLayout(1, 1, 128, dtype=dtype, v_dtype=v_dtype)
    scale = calibrate_channels(k[:256, None]) if calibrated else np.ones((1, 1, 128), np.float32)
    pool = KvCachePool.from_layout(layout, 128, k_channel_scale=scale if dtype in MOST else None)
    pool.append(0, np.arange(2048), k[:, None], v[:, None])
    out = decode(q[None], pool, 0, np.arange(128, dtype=np.int32)[None], np.array([2048], np.int32))[0]
    scores = q.astype(float) @ k.T.astype(float) / np.sqrt(128)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    right = weights @ v.astype(float) / weights.sum(1, keepdims=True)
    return np.sqrt(np.mean((out - right) ** 2) / np.mean(right**2))


@pytest.mark.parametrize(
    ("dtype", "v_dtype", "calibrated", "most"),
    [
        ("int8", "int8", False, {"gaussian": 0.011, "t3": 0.075, "biased": 0.12}),
        ("int8", "int8", True, {"gaussian": 0.010, "t3": 0.065, "biased": 0.010}),
        ("int4", "int4", True, {"gaussian": 0.19, "t3": 0.39, "biased": 0.20}),
        ("int8", "int4", True, {"gaussian": 0.14, "t3": 0.30, "biased": 0.14}),
    ],
)
@pytest.mark.parametrize("kind", ["gaussian", "t3", "biased"])
def test_what_quantising_costs(dtype, v_dtype, calibrated, most, kind):
    assert error_of(kind, dtype, v_dtype, calibrated=calibrated) <= most[kind]


def test_channel_scales_pay_where_channels_are_biased():
    plain, scaled = (error_of("biased", "int8", "int8", calibrated=calibrated) for calibrated in (False, True))
    assert plain > 8 * scaled


# ----------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "int8", "block_size": 15}, ("int8", "block_size", 15, 16)),
        ({"v_dtype": "float16"}, ("v_dtype", "float16", "bfloat16")),
        ({"v_dtype": "int8"}, ("v_dtype", "int8", "bfloat16")),
        ({"dtype": "int4", "v_dtype": "int8"}, ("v_dtype", "int8", "int4")),
        ({"dtype": "int8", "v_in_k": True}, ("int8", "V", "K")),
        ({"dtype": "int2"}, ("dtype", "float32", "float16", "bfloat16", "int8", "int4", "int2")),
        ({"v_dtype": "fp8"}, ("v_dtype", "fp8")),
    ],
)
def test_layouts_that_cannot_be(fields, words):
    with refuses(ValueError, *words):
        KvLayout(1, 1, 64, **fields)
    with refuses(TypeError, "v_dtype", "dtype", "int", 8):
        KvLayout(1, 1, 64, v_dtype=8)


def test_the_reference_has_no_such_pages():
    with refuses(ValueError, "K", "int8"):
        reference.KvCachePool.from_layout(layout_of("int8", "int8"), 4)


def test_a_v_dtype_equal_to_the_dtype_of_k_is_stored_as_none():
    assert KvLayout(1, 1, 64, dtype="int8", v_dtype="int8") == KvLayout(1, 1, 64, dtype="int8")
    assert not KvLayout(1, 1, 64, v_dtype="bfloat16").is_quantised


@pytest.mark.parametrize(
    ("dtype", "scale", "words"),
    [
        ("int4", None, ("int4", "k_channel_scale")),
        ("bfloat16", np.ones((1, 1, 8)), ("k_channel_scale", "int8", "int4", "bfloat16")),
        ("int8", np.ones((1, 8)), ((1, 1, 8), (1, 8))),
        ("int8", np.full((1, 1, 8), 0.0), ("1e-15", "1e+15", "0.0")),
        ("int8", np.full((1, 1, 8), -1.0), ("1e-15", "1e+15", "-1.0")),
        ("int8", np.full((1, 1, 8), np.nan), ("1e-15", "1e+15", "nan")),
        ("int8", np.full((1, 1, 8), np.inf), ("1e-15", "1e+15", "inf")),
    ],
)
def test_channel_scales_that_cannot_be(dtype, scale, words):
    with refuses(ValueError, *words):
        KvCachePool.from_layout(KvLayout(1, 1, 8, dtype=dtype), 1, k_channel_scale=scale)


def test_other_arithmetic_and_other_dtypes_are_refused():
    case = case_of(layout_of("int8", "int8"), 1, [20])
    before = bytes(case.pool)
    with refuses(ValueError, "arithmetic", "bf16", "bfloat16", "int8"):
        case.decode(arithmetic="bf16")
    with refuses(TypeError, "k", "float32", "float16", "bfloat16", "int16"):
        case.pool.append(0, np.arange(1), *np.ones((2, 1, 2, 64), np.int16))
    with refuses(TypeError, "k", "v", "dtype"):
        case.pool.append(0, np.arange(1), np.ones((1, 2, 64), np.float32), np.ones((1, 2, 64), np.float16))
    assert bytes(case.pool) == before


def test_calibrate_channels_names_a_wrong_argument():
    with refuses(ValueError, 1, (0, 1, 8)):
        calibrate_channels(np.ones((0, 1, 8)))
    with refuses(ValueError, (8,)):
        calibrate_channels(np.ones(8))
    with refuses(ValueError, 1, "channels"):
        calibrate_channels(np.array([[[1.0, np.nan]]]))
    assert calibrate_channels(np.zeros((3, 2, 8))).tolist() == [[[1.0] * 8] * 2]
    assert calibrate_channels(np.ones((2, 5, 3, 8))).shape == (2, 3, 8)


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_fp8_is_widened_as_ml_dtypes_does(kind, dtype):
    bits = np.arange(256, dtype=np.uint8).reshape(2, 128)
    expected = bits.view(dtype).astype(np.float32)
    assert_same([widen_fp8(bits, kind)], [expected])
    assert_same([widen_fp8(bits.view(dtype), kind, 0.5)], [expected * np.float32(0.5)])


def test_fp8_of_another_kind_is_refused():
    with refuses(ValueError, "kind", "e4m3", "e5m2", "e3m4"):
        widen_fp8(np.zeros(1, np.uint8), "e3m4")
    with refuses(TypeError, "values", "float8_e5m2", "kind", "e4m3"):
        widen_fp8(np.zeros(1, ml_dtypes.float8_e5m2), "e4m3")
    with refuses(TypeError, "values", "uint8", "float32"):
        widen_fp8(np.zeros(1, np.float32), "e4m3")
