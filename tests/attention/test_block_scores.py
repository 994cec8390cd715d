"""Scores out: the weights of each query token's head, block by block."""

from itertools import product

import canonical_answers as canonical
import numpy as np
import pytest
from paged_cases import DTYPES, assert_same_bits, block_scores_f64, make_case, random_kv
from test_decode_bits import VARIANTS, per_head
from test_decode_variants import variants

from pagepool import KvLayout, cpu_info, decode

LENGTHS = [0, 1, 15, 16, 33, 511, 512, 1100]
LIMIT = 1e-5  # absolute error; the weights of a row add up to 1


@pytest.fixture(scope="module", params=product(DTYPES, [1, 5, 16, 48, 128, 1000, 1024]), ids=str)
def case(request):
    dtype, block_size = request.param
    return make_case(KvLayout(1, 2, 24, block_size, dtype), 3, LENGTHS)


def options_of(case):
    slopes, sinks = variants(case.q.shape[1])
    yield from ({}, {"window_left": 40}, {"logits_soft_cap": 4.0}, {"alibi_slopes": slopes}, {"sinks": sinks})
    yield {"window_left": 530, "logits_soft_cap": 4.0, "alibi_slopes": slopes, "sinks": sinks}


def test_scores_are_the_weights_of_float64(case):
    for options in options_of(case):
        out, scores = case.decode(return_block_scores=True, **options)
        expected = block_scores_f64(case, **options)
        assert scores.dtype == np.float32 and scores.shape == expected.shape
        assert np.abs(scores - expected).max() <= LIMIT
        assert_same_bits([out], [case.decode(**options)])


def test_a_row_adds_up_to_1_minus_the_weight_of_the_sink(case):
    _, sinks = variants(case.q.shape[1])
    some = case.seq_lens > 0
    for own in (np.full_like(sinks, -np.inf), sinks):
        _, lse, scores = case.decode(return_lse=True, return_block_scores=True, sinks=own)
        left = 1.0 - np.exp((own - lse[some]).astype(np.float64))
        np.testing.assert_allclose(scores[some].sum(axis=2, dtype=np.float64), left, atol=LIMIT)
        assert not scores[~some].any()


def test_blocks_outside_of_the_window_and_past_the_end_have_score_0(case):
    size, window_left = case.pool.layout.block_size, 20
    scores = case.decode(window_left=window_left, return_block_scores=True)[1]
    for row, length in enumerate(LENGTHS):
        blocks = range(max(0, length - 1 - window_left) // size, -(-length // size))
        outside = [b for b in range(scores.shape[2]) if b not in blocks]
        assert not scores[row][:, outside].any()
        assert (scores[row][:, list(blocks)] > 0).all()


def test_neither_threads_nor_batch_change_the_bits(case):
    options = {"return_lse": True, "return_block_scores": True}
    whole = case.decode(num_threads=1, **options)
    for num_threads in range(2, 9):
        assert_same_bits(case.decode(num_threads=num_threads, **options), whole)
    for row in range(len(LENGTHS)):
        assert_same_bits(case.rows([row]).decode(**options), [part[[row]] for part in whole])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "block_size"), [("float32", 16), ("float16", 5), ("bfloat16", 48), ("float32", 1000)]
)
def test_scores_follow_the_canonical_order(dtype, block_size, options):
    case = make_case(KvLayout(1, 1, 16, block_size, dtype), 2, [561, 0, 30])
    options = per_head(options, 2)
    scores = case.decode(return_block_scores=True, **options)[1]
    names = {"alibi_slopes": "alibi_slope", "sinks": "sink"}
    for row, head in np.ndindex(scores.shape[:2]):
        k, v = (x[:, 0].tolist() for x in case.pool.gather(0, case.block_tables[row], int(case.seq_lens[row])))
        own = {names.get(name, name): float(x[head]) if name in names else x for name, x in options.items()}
        fused = cpu_info()["isa"] != "baseline"
        q = case.q[row, head].tolist()
        *_, expected = canonical.attend_with_scores(q, k, v, 0.25, block_size, fused=fused, **own)
        expected += [0.0] * (scores.shape[2] - len(expected))
        assert_same_bits([scores[row, head]], [np.array(expected, np.float32)])


def test_scores_of_large_blocks_are_sums_of_scores_of_small_blocks():
    lengths = [1100, 70]
    kv, q = random_kv(KvLayout(1, 1, 16), lengths), np.random.default_rng(3).standard_normal((2, 4, 16), np.float32)
    scores = {}
    for size in (16, 128):
        case = make_case(KvLayout(1, 1, 16, size, "float32"), 4, lengths, kv=kv)
        scores[size] = decode(q, *case.args[1:], return_block_scores=True)[1]
    summed = scores[16][:, :, :64].reshape(2, 4, 8, 8).sum(axis=3)
    np.testing.assert_allclose(scores[128][:, :, :8], summed, atol=1e-6)


def test_scores_of_minus_infinity_and_nan():
    layout = KvLayout(1, 1, 8, 16, "float32")
    k, v = np.zeros((40, 1, 8), np.float32), np.ones((40, 1, 8), np.float32)
    k[:16] = -np.inf
    case = make_case(layout, 1, [40], kv=[(k, v)])
    case.q[:] = 1.0
    scores = case.decode(return_block_scores=True)[1][0, 0]
    np.testing.assert_allclose(scores[:3], [0.0, 16 / 24, 8 / 24], rtol=1e-6)
    k[20] = np.nan
    case = make_case(layout, 1, [40], kv=[(k, v)])
    scores = case.decode(return_block_scores=True)[1][0, 0]
    assert np.isnan(scores[:3]).all() and not scores[3:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_blocks_outside_of_the_window_have_score_0_even_if_the_head_is_nan(value):
    """The scaling of inf - inf gives NaN, and NaN * 0 is NaN: such blocks must not be scaled."""
    k, v = np.zeros((64, 1, 8), np.float32), np.ones((64, 1, 8), np.float32)
    k[40] = value
    case = make_case(KvLayout(1, 1, 8, 5, "float32"), 1, [64], kv=[(k, v)])
    case.q[:] = 1.0
    scores = case.decode(window_left=30, return_block_scores=True)[1][0, 0]
    inside = slice((63 - 30) // 5, -(-64 // 5))
    assert np.isnan(scores[inside]).all()
    assert not np.delete(scores, np.r_[inside]).any()
