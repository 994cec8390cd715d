"""decode(arithmetic="bf16" and "bf16x2"): documented error bounds, and the bits of the canonical order.

With AMX the products are computed by tiles, on other CPUs by vectors.
"""

import canonical_answers as canonical
import ml_dtypes
import numpy as np
import pytest
from paged_cases import (
    LIMIT,
    TINY,
    assert_close,
    assert_same,
    assert_same_bits,
    attention_f64,
    make_case,
    random_kv,
    rounding_bounds,
    slots_of,
)
from refusals import refuses
from test_decode_accuracy import GROUPS, HEAD_DIMS
from test_decode_bits import VARIANTS, assert_canonical, per_head
from test_several_queries import COUNTS, lone, random_masks, trees

from pagepool import KvLayout, cpu_info, decode, reference
from pagepool.attention.merge import merge_state
from pagepool.reference.views import views

pytestmark = pytest.mark.one_in(3)
ROUNDED = {"arithmetic": "bf16"}
both = pytest.mark.parametrize("arithmetic", ["bf16", "bf16x2"])
every_page = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
LENGTHS = [1, 16, 512, 0, 513, 33, 1300]
MLA = {"v_head_dim": 64, "v_in_k": True}


def layout_of(kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16", **dims):
    return KvLayout(1, kv_heads, head_dim, block_size, dtype, **dims)


def check_accuracy(case, **options):
    """Check that the error of "bf16x2" is below 1e-5, except in rows whose scores are in the hundreds."""
    answer, right = case.decode(return_lse=True, arithmetic="bf16x2", **options), attention_f64(case, **options)
    small = ~(np.abs(right[1]) > 100).any(axis=1) | np.isneginf(right[1]).any(axis=1)
    assert_close([x[small] for x in answer], [x[small] for x in right])


def check_bounds(case, **options):
    """Check the error of "bf16x2" and both bounds of "bf16".

    Returns the largest error of the outputs of "bf16", of the largest output and as a part of its bound.
    """
    check_accuracy(case, **options)
    out, lse = case.decode(return_lse=True, **ROUNDED, **options)
    right, right_lse = attention_f64(case, **options)
    bound, lse_bound = rounding_bounds(case, **options)
    error, size = np.abs(out - right), np.abs(right).max(axis=2, keepdims=True)
    assert (error <= bound + LIMIT * size + TINY).all()
    empty = np.isneginf(right_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    off = np.abs(lse[~empty] - right_lse[~empty])
    assert (off <= lse_bound[~empty] + LIMIT * np.maximum(1, np.abs(right_lse[~empty]))).all()
    return np.max(error / np.maximum(size, TINY), initial=0.0), np.max(error / np.maximum(bound, TINY), initial=0.0)


@every_page
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_every_head_shape_is_within_the_bound(group, head_dim, dtype):
    layout = layout_of(1 if group == 16 else 2, head_dim, dtype=dtype)
    check_bounds(make_case(layout, group, [1, 37, 600], seed=group))


@every_page
@pytest.mark.parametrize("block_size", [1, 3, 17, 32, 48, 128])
def test_every_block_size_at_ragged_lengths(block_size, dtype):
    around = {0, 1, 2, 31, 32, 33, 511, 512, 513, block_size - 1, block_size, block_size + 1}
    check_bounds(make_case(layout_of(block_size=block_size, dtype=dtype), 3, sorted(around), seed=block_size))


@every_page
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_variant_is_within_the_bound(options, dtype):
    case = make_case(layout_of(dtype=dtype), 3, LENGTHS)
    check_bounds(case, **per_head(options, 6))


def test_it_rounds_and_no_more():
    """The bits differ clearly from exact arithmetic. The error is far below the bound, because errors of many tokens
    cancel."""
    case = make_case(layout_of(8, 128), 4, [4096])
    error, part = check_bounds(case)
    assert 1e-4 < error < 2e-2 and part < 0.25


@pytest.mark.parametrize("sm_scale", [0.02, -0.1, 0.3])
@pytest.mark.parametrize("group", [1, 7])
def test_queries_that_rounding_changes_most_are_within_the_bound(group, sm_scale):
    """The worst case: rounding changes each number by nearly 2^-8 of it in the same direction, and K has one sign."""
    layout = layout_of(1, 128)
    kv = [tuple(np.abs(x) for x in random_kv(layout, [600])[0])]
    case = make_case(layout, group, [600], kv=kv)
    case.q[:] = np.array([0x3F807FFF, 0x40007FFF], np.uint32).view(np.float32)[np.arange(128) % 2]
    check_bounds(case, sm_scale=sm_scale)
    lse = case.decode(return_lse=True, sm_scale=sm_scale, **ROUNDED)[1]
    off = np.abs(lse - attention_f64(case, sm_scale=sm_scale)[1])
    assert (off > 0.5 * rounding_bounds(case, sm_scale=sm_scale)[1]).all() or abs(sm_scale) < 0.1


def test_exactly_representable_queries_and_equal_scores_are_exact():
    """Nothing is rounded: q is exact in bf16, and so are the weights, which are 1."""
    layout = layout_of(1, 8)
    k, v = np.zeros((512, 1, 8), np.float32), random_kv(layout, [512])[0][1]
    case = make_case(layout, 2, [512], kv=[(k, v)])
    out, lse = case.decode(return_lse=True, **ROUNDED)
    right = attention_f64(case)
    np.testing.assert_allclose(out, right[0], atol=LIMIT * np.abs(right[0]).max())
    np.testing.assert_allclose(lse, right[1], rtol=LIMIT)


@pytest.mark.one_in(6)
@both
@pytest.mark.parametrize("options", [{}, *VARIANTS], ids=str)
@pytest.mark.parametrize(
    ("block_size", "kv_heads", "group", "head_dim", "dims", "lengths"),
    [
        (16, 1, 5, 24, {}, [561, 0, 1]),
        (5, 2, 2, 8, {}, [47, 530]),
        (32, 1, 9, 40, {"v_head_dim": 24}, [31, 32, 70]),
        (16, 1, 3, 72, MLA, [61]),
        (16, 1, 3, 24, {"dtype": "float16"}, [525, 0, 1]),
        (5, 2, 1, 40, {"dtype": "float16", "v_head_dim": 72}, [47]),
        (16, 1, 2, 72, MLA | {"dtype": "float16"}, [37]),
    ],
)
def test_the_bits_are_those_of_the_canonical_order(
    block_size, kv_heads, group, head_dim, dims, lengths, options, arithmetic
):
    case = make_case(layout_of(kv_heads, head_dim, block_size, **dims), group, lengths)
    assert_canonical(case, {**per_head(options, kv_heads * group), "arithmetic": arithmetic})


@both
@pytest.mark.parametrize("window_left", [-1, 21])
@pytest.mark.parametrize("group", [1, 3])
def test_masks_that_see_one_token_of_a_pair_follow_the_canonical_order(group, window_left, arithmetic):
    counts, lengths = [5, 3, 1], [75, 40, 600]
    case, starts = make_case(layout_of(1, 16), group, lengths).with_queries(counts)
    masks = random_masks(counts, lengths, share=0.5)
    out = case.decode(query_start_loc=starts, custom_mask=masks, window_left=window_left, arithmetic=arithmetic)
    options = {"window_left": window_left, "fused": cpu_info()["isa"] != "baseline", "arithmetic": arithmetic}
    rows = [row for mask in masks for row in mask]
    for row, (view, mask) in enumerate(zip(views(starts, lengths, window_left, masks), rows, strict=True)):
        kv = case.pool.gather(0, case.block_tables[view.sequence], lengths[view.sequence])
        k, v = (x[:, 0].tolist() for x in kv)
        for head in range(group):
            right, _ = canonical.attend(
                case.q[row, head].tolist(), k, v, 0.25, position=view.position, mask=mask.tolist(), **options
            )
            assert_same_bits([out[row, head]], [np.array(right, np.float32)])


@pytest.mark.parametrize("dims", [{}, MLA, {"dtype": "float16"}, MLA | {"dtype": "float16"}], ids=str)
@pytest.mark.parametrize("kind", ["causal", "trees", "random"])
def test_several_queries_are_within_the_bound(kind, dims):
    lengths = [0, 1, 15, 33, 512, 530, 1100]
    case, starts = make_case(layout_of(1, 72, **dims), 3, lengths).with_queries(COUNTS)
    masks = {"causal": None, "trees": trees(COUNTS), "random": random_masks(COUNTS, lengths)}[kind]
    if kind == "trees":
        masks = [mask if length else None for mask, length in zip(masks, lengths, strict=True)]
    check_bounds(case, query_start_loc=starts, custom_mask=masks)
    if kind == "causal":
        out, lse = case.decode(query_start_loc=starts, return_lse=True, **ROUNDED)
        for row, view in enumerate(views(starts, lengths, -1, None)):
            alone = lone(case, row, view).decode(return_lse=True, **ROUNDED)
            assert_same_bits(alone, (out[[row]], lse[[row]]))


def tiny(random, shape, highest):
    """Return numbers around the smallest normal float32 and up to 2**highest."""
    exponents = random.integers(-140, highest, shape)
    return (random.choice([-1.0, 1.0], shape) * random.uniform(1, 2, shape) * 2.0**exponents).astype(np.float32)


@both
@pytest.mark.parametrize("seed", range(4))
def test_subnormals_count_as_zeros(seed, arithmetic):
    """Subnormals in q, K, V and sums count as zeros, as in the AMX instruction. A large scale makes the remaining
    scores visible."""
    random = np.random.default_rng(seed)
    k, v = tiny(random, (70, 1, 16), -50), tiny(random, (70, 1, 16), -110)
    v[..., 5] = 2.0**-127
    case = make_case(layout_of(1, 16), 3, [70], kv=[(k, v)])
    case.q[:] = tiny(random, case.q.shape, -50)
    out, lse = case.decode(sm_scale=2.0**110, return_lse=True, arithmetic=arithmetic)
    fused = cpu_info()["isa"] != "baseline"
    stored = [x[:, 0].astype(ml_dtypes.bfloat16).astype(np.float32).tolist() for x in (k, v)]
    for head in range(3):
        right, right_lse = canonical.attend(
            case.q[0, head].tolist(), *stored, 2.0**110, fused=fused, arithmetic=arithmetic
        )
        assert_same_bits([out[0, head]], [np.array(right, np.float32)])
        np.testing.assert_allclose(lse[0, head], right_lse, rtol=3e-7)
    assert (out[..., 5] == 0).all() and np.delete(out, 5, axis=2).any()


@both
def test_subnormal_weights_count_as_zeros(arithmetic):
    """Some scores are so low that their weights are subnormal or nearly so. Large values of V make these weights
    visible."""
    k, v = np.zeros((64, 1, 8), np.float32), np.full((64, 1, 8), 2.0**120, np.float32)
    k[1:, 0, 0], k[1:, 0, 1] = -87.0, -np.arange(1, 64) / 64
    v[0] = 0.0
    case = make_case(layout_of(1, 8), 1, [64], kv=[(k, v)])
    case.q[:] = 1.0
    fused = cpu_info()["isa"] != "baseline"
    right, _ = canonical.attend([1.0] * 8, k[:, 0].tolist(), v[:, 0].tolist(), 1.0, fused=fused, arithmetic=arithmetic)
    out = case.decode(sm_scale=1.0, arithmetic=arithmetic)
    assert_same_bits([out[0, 0]], [np.array(right, np.float32)])
    assert (out > 0).all()


@both
@every_page
@pytest.mark.parametrize("length", [1, 2, 15, 31, 33, 513])
@pytest.mark.parametrize("block_size", [16, 5])
def test_nan_and_infinities_beside_the_tokens_do_not_matter(block_size, length, arithmetic, dtype):
    """`make_case` has filled all slots without tokens with NaN and infinities. With an odd length, the last pair of
    tokens has such a slot."""
    case = make_case(layout_of(1, 40, block_size, dtype), 2, [length])
    out, lse = case.decode(return_lse=True, arithmetic=arithmetic)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    kv = case.pool.gather(0, case.block_tables[0], length)
    for block in range(case.num_blocks):
        case.pool.page(block)[:] = 255  # NaN with all bits set
    case.pool.append(0, slots_of(case.block_tables[0], length, block_size), *kv)
    assert_same_bits(case.decode(return_lse=True, arithmetic=arithmetic), (out, lse))


@both
@every_page
@pytest.mark.parametrize("place", [0, 1, 30, 511, 598])
def test_a_nan_that_is_seen_poisons_the_head(place, arithmetic, dtype):
    layout, length = layout_of(1, 8, dtype=dtype), 599
    [(k, v)] = random_kv(layout, [length])
    poisoned = k.copy()
    poisoned[place, 0, 3] = np.nan
    out, lse = make_case(layout, 2, [length], kv=[(poisoned, v)]).decode(return_lse=True, arithmetic=arithmetic)
    assert np.isnan(out).all() and np.isnan(lse).all()
    poisoned = v.copy()
    poisoned[place, 0, 3] = np.nan
    out, lse = make_case(layout, 2, [length], kv=[(k, poisoned)]).decode(return_lse=True, arithmetic=arithmetic)
    assert np.isnan(out[..., 3]).all() and np.isfinite(np.delete(out, 3, axis=2)).all() and np.isfinite(lse).all()


def test_parts_merge_with_exact_ones():
    case = make_case(layout_of(), 2, [1100])
    first = case.decode(window_left=499, return_lse=True, **ROUNDED)
    case.seq_lens[:] = 600
    second = case.decode(return_lse=True)
    case.seq_lens[:] = 1100
    merged = merge_state(*second, *first)
    bound, lse_bound = rounding_bounds(case)
    right, right_lse = attention_f64(case)
    assert (np.abs(merged[0] - right) <= bound + LIMIT * np.abs(right).max()).all()
    assert (np.abs(merged[1] - right_lse) <= lse_bound + LIMIT * np.abs(right_lse)).all()


@both
@pytest.mark.parametrize(
    ("dtype", "v_dtype", "said"),
    [("float32", None, "float32"), ("int8", None, "int8"), ("int8", "int4", "int4 and int8")],
)
def test_other_pages_are_refused(dtype, v_dtype, said, arithmetic):
    case = make_case(KvLayout(1, 1, 8, dtype=dtype, v_dtype=v_dtype), 2, [20])
    out = np.full(case.q.shape, 12345.0, np.float32)
    with refuses(ValueError, "arithmetic", arithmetic, "bfloat16 or float16", f"the pool has {said}"):
        case.decode(out=out, arithmetic=arithmetic)
    assert (out == 12345.0).all()


@pytest.mark.parametrize("arithmetic", ["bfloat16", "", None, 1, b"bf16"])
def test_an_unknown_arithmetic_is_refused(arithmetic):
    case = make_case(layout_of(1, 8), 1, [3])
    out = np.full(case.q.shape, 12345.0, np.float32)
    with refuses(ValueError, "arithmetic", "exact", "bf16"):
        case.decode(out=out, arithmetic=arithmetic)
    assert (out == 12345.0).all()
    with refuses(ValueError, "arithmetic", "exact", "bf16"):
        reference.decode(*case.args, arithmetic=arithmetic)


def test_exact_is_the_default():
    case = make_case(layout_of(), 2, [100])
    assert_same_bits([case.decode(arithmetic="exact")], [decode(*case.args)])


@both
@every_page
@pytest.mark.parametrize("q_dtype", [np.float16, ml_dtypes.bfloat16])
def test_queries_of_16_bit_have_the_bits_of_the_same_numbers_in_float32(q_dtype, dtype, arithmetic):
    case = make_case(layout_of(2, 72, dtype=dtype), 3, [600, 33])
    case.q[:] = case.q.astype(q_dtype).astype(np.float32)
    options = {"return_lse": True, "arithmetic": arithmetic}
    narrow = decode(case.q.astype(q_dtype), *case.args[1:], **options)
    assert_same_bits(narrow, case.decode(**options))


def test_a_scale_of_any_sign_follows_the_canonical_order():
    """If the scale is not above 0, scores are scaled before the maximum is searched."""
    case = make_case(layout_of(1, 24), 2, [70])
    for sm_scale in (-0.3, 0.0, -0.0, 1e-39):
        assert_canonical(case, {"sm_scale": sm_scale, "arithmetic": "bf16x2"})


@pytest.mark.one_in(1)
@both
def test_scores_of_any_size_follow_the_canonical_order(arithmetic):
    """Rounding of large scores moves them by more than 2^x can take, and some products overflow: 2e38 * 3 is inf."""
    layout = layout_of(1, 24)
    [(k, v)] = random_kv(layout, [70])
    for sign in (1, -1):  # all scores of the second sequence have one sign
        case = make_case(layout, 2, [70, 40], kv=[(k, v), (np.full_like(k[:40], sign), v[:40])])
        case.q[1] = abs(case.q[1])
        for sm_scale in (2.0**24, 2.0**26, 2.0**31, 1e20, 1e37, 2e38):
            assert_canonical(case, {"sm_scale": sm_scale, "arithmetic": arithmetic})


@pytest.mark.one_in(1)  # AMX computes a chunk with such values query by query, in few of the cases
@both
@every_page
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_reach_the_rows_that_see_them(arithmetic, value, dtype):
    """Some rows of the prompt do not see these tokens, because of causality, a window or a mask."""
    length, count = 700, 150
    layout = layout_of(1, 40, dtype=dtype)
    [(k, v)] = random_kv(layout, [length])
    v[[560, 631], 0, 7] = value
    case, starts = make_case(layout, 3, [length], kv=[(k, v)]).with_queries([count])
    for options in ({}, {"window_left": 30}, {"custom_mask": random_masks([count], [length], share=0.5)}):
        options |= {"arithmetic": arithmetic, "query_start_loc": starts, "return_lse": True}
        got = case.decode(**options)
        seen = list(views(starts, [length], options.get("window_left", -1), options.get("custom_mask")))
        sees = np.array([bool({560, 631} & set(view.seen)) for view in seen])
        assert sees.any() and not sees.all()
        assert (np.isnan(got[0][..., 7]).any(axis=1) | np.isinf(got[0][..., 7]).any(axis=1))[sees].all()
        assert np.isfinite(got[0][~sees]).all() and np.isfinite(np.delete(got[0], 7, axis=2)).all()


@both
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("heads", "group", "dim"), [(3, 1, 64), (2, 4, 128), (2, 12, 40)])
def test_decode_of_few_rows_is_not_reached_by_masked_values(heads, group, dim, count, arithmetic):
    """The token just before the window of the first query has a V that is not finite in the last head."""
    length, window = 700, 40
    layout = layout_of(heads, dim)
    [(k, v)] = random_kv(layout, [length])
    options = {"window_left": window, "arithmetic": arithmetic, "return_lse": True, "num_threads": 2}
    results = []
    for value in (0.5, np.nan, np.inf):
        v[length - count - window - 1, -1, 3] = value
        case, starts = make_case(layout, group, [length], kv=[(k, v)]).with_queries([count])
        results.append(case.decode(query_start_loc=starts, **options))
    for got in results[1:]:
        assert_same(got, results[0])


@every_page
def test_the_error_does_not_grow_with_scores_or_tokens(dtype):
    for gain, length in ((1, 4096), (4, 1536), (8, 1536)):
        case = make_case(layout_of(2, 128, dtype=dtype), 4, [length], seed=gain)
        case.q *= np.float32(gain)
        check_accuracy(case)


@both
def test_every_float16_is_exact_as_the_sum_of_two_parts(arithmetic):
    """A lone token has the weight 1, so its V is the result. A scale of 1 makes one number of its K the score."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    values = np.where(np.isfinite(every), every, np.float32(0)).reshape(-1, 256)
    kv = [(np.zeros((1, 1, 256), np.float32), row[None, None]) for row in values]
    case = make_case(layout_of(1, 256, dtype="float16"), 1, [1] * len(kv), kv=kv)
    assert_same_bits([case.decode(arithmetic=arithmetic)[:, 0]], [values + np.float32(0)])  # -0 becomes 0
    numbers = every[np.isfinite(every)]
    keys = numbers.reshape(-1, 1, 1, 8)
    case = make_case(layout_of(1, 8, dtype="float16"), 8, [1] * len(keys), kv=[(row, row) for row in keys])
    case.q[:] = np.eye(8)
    lse = case.decode(sm_scale=1.0, return_lse=True, arithmetic=arithmetic)[1]
    np.testing.assert_allclose(lse.ravel(), numbers, rtol=3e-7, atol=0)


@both
def test_the_largest_and_smallest_float16_follow_the_canonical_order(arithmetic):
    random = np.random.default_rng(3)
    extreme = np.array([65504.0, -65504.0, 2.0**-24, 2.0**-14 - 2.0**-24, 65472.0, -(2.0**-15)], np.float32)
    kv = [tuple(random.choice(extreme, (70, 1, 16)) for _ in range(2))]
    case = make_case(layout_of(1, 16, dtype="float16"), 2, [70], kv=kv)
    for sm_scale in (1e-4, 30.0):
        assert_canonical(case, {"sm_scale": sm_scale, "arithmetic": arithmetic})
