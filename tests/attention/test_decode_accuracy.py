"""decode against float64 on the same stored values: every dtype, head shape, block size and length."""

import canonical_answers as canonical
import ml_dtypes
import numpy as np
import pytest
from paged_cases import DTYPES, assert_close, assert_same_bits, attention_f64, make_case

from pagepool import KvLayout, cpu_info, decode, reference

GROUPS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]
HEAD_DIMS = [8, 16, 24, 40, 64, 72, 80, 96, 128, 256]
BLOCK_SIZES = [1, 3, 16, 17, 32, 48, 128]


def check(case, sm_scale=None):
    assert_close(case.decode(sm_scale=sm_scale, return_lse=True), attention_f64(case, sm_scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_every_head_shape(group, head_dim, dtype):
    kv_heads = 1 if group == 16 else 2
    check(make_case(KvLayout(1, kv_heads, head_dim, dtype=dtype), group, [1, 37, 600], seed=group))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size_at_ragged_lengths(block_size, dtype):
    around = {0, 1, 31, 32, 33, 511, 512, 513, block_size - 1, block_size, block_size + 1, 2 * block_size}
    layout = KvLayout(1, 2, 64, block_size=block_size, dtype=dtype)
    check(make_case(layout, 3, [*sorted(around), 1500], seed=block_size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "group"), [(40, 5), (256, 1)])
def test_plain_blocks_of_other_head_shapes(head_dim, group, dtype):
    check(make_case(KvLayout(1, 2, head_dim, block_size=11, dtype=dtype), group, [600, 10, 11]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_thousands_of_tokens(dtype):
    check(make_case(KvLayout(1, 1, 64, dtype=dtype), 4, [4096, 9001]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [5, 16, 32])
def test_every_layer_of_a_page(block_size, dtype):
    layout = KvLayout(3, 2, 16, block_size=block_size, dtype=dtype)
    for layer in range(3):
        check(make_case(layout, 2, [40, 7], layer=layer))


@pytest.mark.parametrize("sm_scale", [0.0, 0.4, -0.2, 1.0])
def test_sm_scale(sm_scale):
    check(make_case(KvLayout(1, 2, 40, dtype="float32"), 2, [300, 700]), sm_scale)


def test_the_default_scale_is_one_over_the_root_of_head_dim():
    case = make_case(KvLayout(1, 1, 80), 2, [100])
    assert_same_bits(case.decode(return_lse=True), case.decode(sm_scale=1 / np.sqrt(80), return_lse=True))


def test_large_scores_after_many_small_ones():
    """The running maximum changes late, in later tiles and chunks, and the weights of earlier tokens nearly vanish."""
    layout = KvLayout(1, 1, 8, dtype="float32")
    k, v = np.random.default_rng(2).standard_normal((2, 1300, 1, 8), np.float32)
    for token, factor in ((40, 2), (515, 3), (1290, 4)):
        k[token] *= factor
    check(make_case(layout, 3, [1300], kv=[(k, v)]), 1.0)


def test_scores_beyond_the_range_of_exp():
    layout = KvLayout(1, 1, 8, dtype="float32")
    k, v = np.random.default_rng(2).standard_normal((2, 700, 1, 8), np.float32)
    case = make_case(layout, 1, [700], kv=[(k, v)])
    case.q[:] = np.float32(1000.0)
    out, lse = case.decode(return_lse=True, sm_scale=1.0)
    best = np.argmax(k[:, 0].astype(np.float64).sum(axis=1))
    np.testing.assert_array_equal(out[0, 0], v[best, 0])
    np.testing.assert_allclose(lse, attention_f64(case, 1.0)[1], rtol=1e-6)


def test_an_empty_sequence_gives_zeros_and_minus_infinity():
    out, lse = make_case(KvLayout(1, 2, 8), 2, [0, 3, 0]).decode(return_lse=True)
    for row in (0, 2):
        assert not out[row].any()
        assert np.isneginf(lse[row]).all()
    assert np.isfinite(lse[1]).all()


def test_no_sequence_at_all():
    out, lse = make_case(KvLayout(1, 2, 8), 2, []).decode(return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_says_the_same(dtype):
    case = make_case(KvLayout(1, 2, 24, dtype=dtype), 3, [0, 5, 90])
    assert_close(case.decode(return_lse=True), reference.decode(*case.args, return_lse=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "head_dim"), [(1, 8), (16, 40), (33, 256), (512, 16), (530, 72), (1061, 24)])
def test_the_bits_equal_the_canonical_order(length, head_dim, dtype):
    case = make_case(KvLayout(1, 1, head_dim, dtype=dtype), 1, [length])
    k, v = (x[:, 0].tolist() for x in case.pool.gather(0, case.block_tables[0], length))
    fused = cpu_info()["isa"] != "baseline"
    expected, expected_lse = canonical.attend(case.q[0, 0].tolist(), k, v, 1 / np.sqrt(head_dim), fused=fused)
    out, lse = case.decode(return_lse=True)
    assert_same_bits([out[0, 0]], [np.array(expected, np.float32)])
    np.testing.assert_allclose(lse[0, 0], expected_lse, rtol=3e-7)


@pytest.mark.parametrize("q_dtype", [np.float16, ml_dtypes.bfloat16])
def test_q_of_16_bits_is_widened(q_dtype):
    case = make_case(KvLayout(1, 2, 64), 2, [100, 30])
    narrow = case.q.astype(q_dtype)
    case.q = narrow.astype(np.float32)
    assert_same_bits([decode(narrow, *case.args[1:])], [case.decode()])


def test_q_may_be_a_part_of_a_larger_array():
    case = make_case(KvLayout(1, 2, 16), 2, [100, 30, 9])
    wide = np.full((6, 8, 16), np.nan, np.float32)
    wide[::2, 3:7] = case.q
    assert_same_bits([decode(wide[::2, 3:7], *case.args[1:])], [case.decode()])


def test_block_tables_may_be_a_part_of_a_wider_array():
    case = make_case(KvLayout(1, 2, 16), 2, [100, 30, 9])
    expected, width = case.decode(), case.block_tables.shape[1]
    wide = np.full((3, width + 5), -1, np.int32)
    wide[:, :width] = case.block_tables
    case.block_tables = wide[:, :width]
    assert_same_bits([case.decode()], [expected])


def test_out_is_filled_and_returned():
    case = make_case(KvLayout(1, 2, 16), 2, [100, 0, 9])
    out = np.full(case.q.shape, np.nan, np.float32)
    assert case.decode(out=out) is out
    assert_same_bits([out], [case.decode()])
    again, lse = case.decode(out=out, return_lse=True)
    assert again is out
    assert_same_bits([lse], [case.decode(return_lse=True)[1]])
