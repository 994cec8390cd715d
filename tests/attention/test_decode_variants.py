"""decode with a sliding window, soft cap, ALiBi and sinks against float64; tokens before the window are not read."""

from itertools import product

import numpy as np
import pytest
from paged_cases import DTYPES, assert_close, assert_same_bits, attention_f64, make_case
from refusals import refuses

from pagepool import InvalidBlock, KvLayout, decode

LENGTHS = [0, 1, 15, 16, 17, 33, 511, 513, 1100]
WINDOWS = [0, 1, 14, 15, 16, 17, 31, 32, 100, 511, 512, 700, 5000]


def variants(heads, seed=5):
    """Return one number per head for ALiBi and for the sinks."""
    rng = np.random.default_rng(seed)
    slopes = (2.0 ** -np.arange(1, heads + 1)).astype(np.float32)
    return slopes, 3 * rng.standard_normal(heads).astype(np.float32)


def both(case, **options):
    return case.decode(return_lse=True, **options), attention_f64(case, **options)


@pytest.fixture(scope="module", params=product(DTYPES, [(16, 2, 3, 40), (48, 1, 8, 64), (5, 2, 1, 128)]), ids=str)
def case(request):
    dtype, (block_size, kv_heads, group, head_dim) = request.param
    return make_case(KvLayout(1, kv_heads, head_dim, block_size, dtype), group, LENGTHS)


@pytest.mark.parametrize("window_left", WINDOWS)
def test_a_window(case, window_left):
    assert_close(*both(case, window_left=window_left))


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_a_soft_cap(case, cap):
    assert_close(*both(case, logits_soft_cap=cap))


def test_alibi(case):
    assert_close(*both(case, alibi_slopes=variants(case.q.shape[1])[0]))


def test_sinks(case):
    assert_close(*both(case, sinks=variants(case.q.shape[1])[1]))


@pytest.mark.parametrize("window_left", [0, 16, 600])
def test_all_together(case, window_left):
    slopes, sinks = variants(case.q.shape[1])
    assert_close(*both(case, window_left=window_left, logits_soft_cap=7.0, alibi_slopes=slopes, sinks=sinks))


@pytest.mark.parametrize("window_left", [0, 15, 16, 100, 511, 700])
def test_tokens_before_the_window_are_not_read(case, window_left):
    """Neither block ids (replaced by invalid ones here) nor values (the next test fills them with NaN) are read."""
    expected = case.decode(window_left=window_left, return_lse=True)
    size, tables = case.pool.layout.block_size, case.block_tables.copy()
    for row, length in enumerate(LENGTHS):
        tables[row, : max(0, length - 1 - window_left) // size] = -7
    got = decode(case.q, case.pool, 0, tables, case.seq_lens, window_left=window_left, return_lse=True)
    assert_same_bits(got, expected)


def test_values_outside_of_the_window_do_not_count():
    layout, window_left = KvLayout(1, 1, 16, 16, "float32"), 20
    case = make_case(layout, 2, [600])
    expected = case.decode(window_left=window_left, return_lse=True)
    outside = np.arange(600 - 1 - window_left)
    slots = case.block_tables[0, outside // 16].astype(np.int64) * 16 + outside % 16
    junk = np.full((len(outside), 1, 16), np.nan, np.float32)
    case.pool.append(0, slots, junk, junk)
    assert_same_bits(case.decode(window_left=window_left, return_lse=True), expected)


def test_an_id_inside_of_the_window_is_checked(case):
    tables = case.block_tables.copy()
    size, row = case.pool.layout.block_size, len(LENGTHS) - 1
    column = (LENGTHS[row] - 1 - 100) // size
    tables[row, column] = case.num_blocks
    with refuses(InvalidBlock, "block_tables", row, column, case.num_blocks):
        decode(case.q, case.pool, 0, tables, case.seq_lens, window_left=100)


def test_a_window_as_long_as_the_sequence_has_the_bits_of_no_window(case):
    assert_same_bits(case.decode(window_left=1099, return_lse=True), case.decode(return_lse=True))


@pytest.mark.parametrize("window_left", [2**31 - 1, 2**31, 2**63 - 1, 2**100])
def test_a_window_longer_than_any_sequence_equals_no_window(case, window_left):
    assert_same_bits(case.decode(window_left=window_left, return_lse=True), case.decode(return_lse=True))


def test_sinks_of_minus_infinity_take_no_weight(case):
    nothing = np.full(case.q.shape[1], -np.inf, np.float32)
    assert_same_bits(case.decode(sinks=nothing, return_lse=True), case.decode(return_lse=True))


def test_slopes_and_sinks_in_half_precision_and_with_strides(case):
    heads = case.q.shape[1]
    slopes, sinks = (x.astype(np.float16) for x in variants(heads))
    expected = case.decode(alibi_slopes=slopes.astype(np.float32), sinks=sinks.astype(np.float32))
    apart = np.repeat(slopes, 2)[::2]
    assert_same_bits([case.decode(alibi_slopes=apart, sinks=sinks)], [expected])
