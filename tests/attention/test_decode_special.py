"""NaN and infinities in K, V and q follow IEEE arithmetic in every tile and chunk, like the reference."""

import numpy as np
import pytest
from paged_cases import DTYPES, assert_same_bits, make_case

from pagepool import KvLayout, reference

NAN, INF = float("nan"), float("inf")
PLACES = [0, 15, 31, 32, 500, 511, 512, 600, 1023]
LENGTH = 1024


def plain(dtype="float32", block_size=16):
    """Return a layout, and K = 0 and V = 1 of a sequence, so that all scores are 0."""
    k, v = np.zeros((LENGTH, 1, 8), np.float32), np.ones((LENGTH, 1, 8), np.float32)
    return KvLayout(1, 1, 8, block_size=block_size, dtype=dtype), k, v


def run(layout, k, v, length=LENGTH):
    case = make_case(layout, 3, [length], kv=[(k[:length], v[:length])])
    case.q[:] = 1.0
    out, lse = case.decode(sm_scale=1.0, return_lse=True, num_threads=1)
    np.testing.assert_array_equal(case.decode(sm_scale=1.0, num_threads=2), out)
    return out, lse


def assert_is(got, out, lse):
    np.testing.assert_allclose(got[0][0], np.broadcast_to(out, got[0][0].shape), rtol=1e-6)
    np.testing.assert_allclose(got[1][0], np.full(3, lse), rtol=1e-6)


def only(dim, value):
    out = np.ones(8)
    out[dim] = value
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_a_nan_in_k_poisons_the_head(place, dtype):
    layout, k, v = plain(dtype)
    k[place, 0, 3] = NAN
    assert_is(run(layout, k, v), NAN, NAN)


@pytest.mark.parametrize("place", PLACES)
def test_a_score_of_plus_infinity_poisons_the_head(place):
    layout, k, v = plain()
    k[place, 0, 3] = INF
    assert_is(run(layout, k, v), NAN, NAN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_score_of_minus_infinity_weighs_nothing(place, block_size, dtype):
    layout, k, v = plain(dtype, block_size)
    k[place, 0, 3], v[place] = -INF, 77.0
    assert_is(run(layout, k, v), 1.0, np.log(LENGTH - 1))


@pytest.mark.parametrize("first", [1, 32, 40, 512, 513, 1000])
def test_tokens_that_weigh_nothing_may_fill_tiles_and_chunks(first):
    layout, k, v = plain()
    k[:first], v[:first] = -INF, 77.0
    assert_is(run(layout, k, v), 1.0, np.log(LENGTH - first))
    layout, k, v = plain()
    k[first:], v[first:] = -INF, 77.0
    assert_is(run(layout, k, v), 1.0, np.log(first))


@pytest.mark.parametrize("length", [1, 33, 513, 1024])
def test_scores_that_are_all_minus_infinity_give_nan(length):
    layout, k, v = plain()
    k[:] = -INF
    assert_is(run(layout, k, v, length), NAN, -INF)


def test_with_a_sink_scores_that_are_all_minus_infinity_give_zeros():
    layout, k, v = plain()
    k[:40] = -INF
    case = make_case(layout, 3, [40], kv=[(k[:40], v[:40])])
    case.q[:] = 1.0
    sinks = np.array([1.5, -INF, INF], np.float32)
    out, lse = case.decode(sm_scale=1.0, sinks=sinks, return_lse=True)
    np.testing.assert_array_equal(out[0], np.broadcast_to([[0.0], [NAN], [NAN]], (3, 8)))
    np.testing.assert_allclose(lse[0], [1.5, -INF, NAN], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("place", PLACES)
def test_special_values_of_v_stay_in_their_dim(place, value, dtype):
    layout, k, v = plain(dtype)
    v[place, 0, 5] = value
    assert_is(run(layout, k, v), only(5, value), np.log(LENGTH))


def test_infinities_of_both_signs_in_v_give_nan():
    layout, k, v = plain()
    v[3, 0, 5], v[700, 0, 5] = INF, -INF
    assert_is(run(layout, k, v), only(5, NAN), np.log(LENGTH))


@pytest.mark.parametrize("place", PLACES)
def test_a_weight_of_zero_times_infinity_is_nan(place):
    layout, k, v = plain()
    k[place, 0, 0], v[place, 0, 5] = -INF, INF
    assert_is(run(layout, k, v), only(5, NAN), np.log(LENGTH - 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", [40, 600])
def test_v_may_be_as_large_as_is_promised(place, dtype):
    """A score just below the threshold that updates the maximum has a weight of nearly 2^8."""
    layout, k, v = plain(dtype)
    k[place], v[place] = 5.5 / 8, 2.0**120 * 125 / 128  # which bfloat16 holds
    weight = np.exp(5.5)
    assert_is(run(layout, k, v, 640), np.full(8, weight * v[place, 0, 0] / (639 + weight)), np.log(639 + weight))


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_special_q_poisons_only_its_head(value):
    layout, k, v = plain()
    k[:] = 1.0
    case = make_case(layout, 3, [LENGTH], kv=[(k, v)])
    case.q[:] = 1.0
    clean = case.decode()
    case.q[0, 1, 2] = value
    out = case.decode()
    assert np.isnan(out[0, 1]).all()
    assert_same_bits([out[0, 0], out[0, 2]], [clean[0, 0], clean[0, 2]])


OPTIONS = [
    {},
    {"window_left": 20},
    {"logits_soft_cap": 2.0},
    {"alibi_slopes": np.array([0.1, -0.02], np.float32)},
    {"sinks": np.array([1.0, -INF], np.float32)},
    {"sinks": np.array([INF, NAN], np.float32)},
    {"window_left": 33, "logits_soft_cap": 2.0, "sinks": np.array([-INF, 9.0], np.float32)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 3])
def test_the_reference_says_the_same_of_random_special_values(block_size, dtype, options):
    rng = np.random.default_rng(block_size)
    layout = KvLayout(1, 1, 8, block_size=block_size, dtype=dtype)
    for trial in range(20):
        length = int(rng.integers(1, 70))
        k, v = rng.standard_normal((2, length, 1, 8), np.float32)
        for array in (k, v):
            for _ in range(rng.integers(0, 3)):
                array[rng.integers(length), 0, rng.integers(8)] = rng.choice([NAN, INF, -INF])
        case = make_case(layout, 2, [length], kv=[(k, v)], seed=trial)
        got = case.decode(return_lse=True, **options)
        expected = reference.decode(*case.args, return_lse=True, **options)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
